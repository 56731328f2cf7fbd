"""A request's tokens, log-probabilities and end do not depend on overlap, windows, the prefix cache, chunks,
preemption, neighbours or rows, whatever features it and its neighbours use.

The reference is an engine that does one thing after the other: one request at a time, one step at a time,
without a prefix cache. test_engine_sampling.py compares such answers with the witness.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from penstock.runtime.requests.request import CacheParams, Request
from tests.support.batch import Answer, answer, answers
from tests.support.chunks import set_chunk
from tests.support.mix import Mixer, Turns
from tests.support.models.table import random_tables, table_engine

pytestmark = pytest.mark.ci

TABLES = random_tables(21)
PAGE_BYTES = 4 * 2 * 4 * 4  # 4 tokens, key and value, 4 channels, float32


def mixed() -> list[Request]:
    """32 requests, some of which share a prefix."""
    mixer = Mixer(300)
    requests = [mixer.greedy(f"g{i}", TABLES) for i in range(12)]
    requests += [mixer.sampled(f"s{i}") for i in range(20)]
    shared = tuple(range(1, 14))
    return [
        dataclasses.replace(
            request,
            prompt_token_ids=(shared if i % 4 == 0 else ()) + request.prompt_token_ids,
            logprobs=i % 5 if i % 2 else None,
            prompt_logprobs=i % 3 if i % 7 == 0 else None,
            cache=CacheParams(bypass=i % 9 == 0),
            priority=i % 3,
        )
        for i, request in enumerate(requests)
    ]


def constrained(requests: list[Request]) -> list[Request]:
    """Return the requests, every third with a new constraint, because a constraint serves one output only."""
    return [
        dataclasses.replace(request, constraint=Turns(limit=9 + i)) if i % 3 == 0 else request
        for i, request in enumerate(requests)
    ]


@pytest.fixture(scope="module")
def expected() -> dict[str, Answer]:
    engine = table_engine(TABLES, overlap=False, max_decode_steps=1, prefix_cache_pages=0)
    try:
        return {r.request_id: answer(engine, r) for r in constrained(mixed())}
    finally:
        engine.shutdown()


FEATURES: dict[str, Callable[[Request], object]] = {
    "penalties": lambda r: r.sampling.has_penalties,
    "bias": lambda r: r.sampling.has_bias,
    "bad words of several tokens": lambda r: any(len(word) > 1 for word in r.sampling.bad_words),
    "constraints": lambda r: r.constraint is not None,
    "draws": lambda r: r.constraint is None and not r.sampling.greedy,
    "min_tokens": lambda r: r.stopping.min_tokens,
    "log-probabilities of prompts": lambda r: r.prompt_logprobs is not None,
}


def assert_same(results: list[Answer], requests: list[Request], expected: dict[str, Answer]) -> None:
    for request, result in zip(requests, results, strict=True):
        told = expected[request.request_id]
        assert (result.tokens, result.finish, result.error) == (told.tokens, told.finish, told.error), request
        for got, wanted in (
            (result.logprobs, told.logprobs),
            (result.prompt_logprobs, told.prompt_logprobs),
        ):
            assert [[t for t, _ in one.top] for one in got] == [[t for t, _ in one.top] for one in wanted]
            assert [one.sampled for one in got] == pytest.approx([one.sampled for one in wanted], rel=1e-5)


def test_the_reference_uses_every_feature(expected: dict[str, Answer]) -> None:
    """Otherwise the comparisons below would prove little."""
    requests = constrained(mixed())
    assert {told.finish.reason.name for told in expected.values() if told.finish} == {
        "EOS",
        "STOP",
        "MAX_TOKENS",
    }
    counts = {name: sum(map(bool, map(has, requests))) for name, has in FEATURES.items()}
    assert min(counts.values()) >= 4, counts
    assert all(
        len(told.prompt_logprobs) == (len(r.prompt_token_ids) - 1 if r.prompt_logprobs is not None else 0)
        for r, told in zip(requests, expected.values(), strict=True)
    )
    assert len({tuple(told.tokens) for told in expected.values()}) == len(expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        # The reference has both, so that these say less than the default does.
        pytest.param({"overlap": False}, marks=pytest.mark.sweep),
        pytest.param({"prefix_cache_pages": 0}, marks=pytest.mark.sweep),
        pytest.param({"max_decode_steps": 1}, marks=pytest.mark.sweep),
        pytest.param({"scheduling_policy": "priority"}, marks=pytest.mark.sweep),
        pytest.param({"kv_cache_bytes": 24 * PAGE_BYTES, "max_model_len": 96}, marks=pytest.mark.sweep),
        {"kv_cache_bytes": 24 * PAGE_BYTES, "max_model_len": 96, "scheduling_policy": "priority"},
        pytest.param({"max_num_seqs": 16, "max_num_batched_tokens": 64}),
        pytest.param({"max_num_seqs": 1}, marks=pytest.mark.sweep),
        pytest.param({"native": "off"}),
    ],
    ids=lambda options: ", ".join(f"{name}={value}" for name, value in options.items()) or "default",
)
def test_answers_do_not_depend_on_how_they_are_computed(
    options: dict[str, Any], expected: dict[str, Answer]
) -> None:
    engine = table_engine(TABLES, **options)
    shuffle = random.Random(5)
    preemptions = cached = 0
    try:
        for chunk in (None, None, 1, 5, 13):  # at the second None the prefix cache is warm
            set_chunk(engine, chunk)
            requests = constrained(mixed())
            shuffle.shuffle(requests)
            results = answers(engine, requests, together=True)
            assert_same(results, requests, expected)
            preemptions += sum(result.preemptions for result in results)
            cached += sum(result.cached_prompt_tokens for result in results)
        for request in constrained(mixed())[::5]:
            assert_same([answer(engine, request)], [request], expected)
        assert preemptions > 0 or "kv_cache_bytes" not in options
        assert (cached > 0) == ("prefix_cache_pages" not in options)
        assert engine.compiles_after_warmup == 0
        assert engine.load().pages_used == 0
    finally:
        engine.shutdown()
