"""Requests on models with recurrent state share prefixes and fork behind snapshots of the state, through the
whole engine and in every schedule. The toy model's tokens are computed by hand: if a state missed a token,
took one twice, or was another request's, they would be wrong.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from penstock.runtime import Engine
from penstock.runtime.loop.interface import InFlightPolicy
from penstock.runtime.ops.cache_spec import CacheSpec
from penstock.runtime.requests.request import CacheParams, Request, outputs_of
from tests.runtime.engine.state.test_state_by_slot import accelerator, prompt_of
from tests.support.collector import GREEDY, Collector, at_gate, long
from tests.support.models.hybrid import NEWEST, PAGED, STATE, hybrid_model, hybrid_tokens
from tests.support.models.toy import VOCAB, toy_engine
from tests.support.scheduler.put_off import Anything, HalfPutOff
from tests.support.suite.drawing import few

PAGE = 4
ENGINES: dict[str, dict[str, Any]] = {
    "windows": {"decode_window_s": 10.0},
    "chunks of one token": {"max_prefill_chunk": 1, "overlap": False},
    "chunks of 7 tokens": {"max_prefill_chunk": 7, "decode_window_s": 10.0},
    "chunks of a page": {"max_prefill_chunk": PAGE, "max_decode_steps": 1},
    "as on an accelerator": {"decode_window_s": 10.0, "kv_cache_bytes": 1 << 16},
    "no layer has pages": {"decode_window_s": 10.0},
}


CI = ("windows", "no layer has pages")
ALWAYS = ("chunks of 7 tokens",)
"""What `make test` runs."""


@pytest.fixture(scope="module", params=few(tuple(ENGINES), ALWAYS, CI, shared="engine of snapshots"))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    options = dict(ENGINES[request.param])
    if request.param == "as on an accelerator":
        options["backend"] = accelerator()
    engine = toy_engine(hybrid_model(paged=request.param != "no layer has pages"), **options)
    assert engine.config.state_snapshots == engine.config.max_num_seqs == 4
    yield engine
    assert engine.ready
    assert engine.compiles_after_warmup == 0
    assert engine.load().pages_used == 0
    engine.shutdown()


def prompt(seed: int, num: int, shared: int = 0) -> tuple[int, ...]:
    """Make a prompt of which the first `shared` tokens are those of all prompts."""
    rng = random.Random(seed)
    return (*random.Random(4711).choices(range(VOCAB), k=shared), *rng.choices(range(VOCAB), k=num - shared))


def run(engine: Engine, requests: Sequence[Request], *, together: bool = True) -> list[int]:
    """Submit requests, together while another one's only token is being delivered or each after the one
    before, and check their tokens. Returns for each how many tokens of its prompt it did not compute.
    """
    gate = at_gate(engine, tokens=1) if together else None
    sinks = [Collector() for _ in requests]
    for request, sink in zip(requests, sinks, strict=True):
        engine.submit(request, sink)
        if gate is None:
            sink.last(request.request_id)
    if gate is not None:
        gate.open()
    cached = []
    for request, sink in zip(requests, sinks, strict=True):
        timing = sink.last(request.request_id).timing
        assert request.stopping.max_tokens is not None
        paged = engine.info.name == "hybrid"
        made = hybrid_tokens(request.prompt_token_ids, request.stopping.max_tokens, paged=paged)
        assert sink.tokens(request.request_id) == made, request
        assert timing is not None
        cached.append(timing.cached_prompt_tokens)
    return cached


def asked(name: str, tokens: Sequence[int], num: int = 9, **changes: Any) -> Request:
    return Request(name, tuple(tokens), GREEDY, long(num), **changes)


def flushed(engine: Engine) -> Engine:
    """Return the engine, with an empty prefix cache."""
    engine.flush_prefix_cache()
    return engine


# -- who begins where --


@pytest.mark.parametrize("num", [4, 5, 8, 9, 31, 45])
def test_a_prompt_that_comes_again_begins_at_its_last_page(engine: Engine, num: int) -> None:
    """It begins behind the last full page before its last token, which must be computed."""
    again = asked("again", prompt(num, num))
    assert run(flushed(engine), [again, again, again], together=False) == [0] + 2 * [(num - 1) // PAGE * PAGE]


def test_prompts_with_a_common_beginning_share_it_from_the_third_on(engine: Engine) -> None:
    """The first keeps its state at its end only. The second has 22 tokens in common with it, 20 of them in
    full pages, but there is no snapshot; so it computes them and keeps its state there for those after it.
    """
    requests = [asked(f"r{i}", prompt(100 + i, 30 + i, shared=22)) for i in range(4)]
    assert run(flushed(engine), requests, together=False) == [0, 0, 20, 20]


def test_prompts_that_arrive_together_wait_for_the_first(engine: Engine) -> None:
    requests = [asked(f"r{i}", prompt(200 + i, 30 + i, shared=22)) for i in range(4)]
    assert run(flushed(engine), requests) == [0, 20, 20, 20]


def test_a_conversation_goes_on_behind_its_last_prompt(engine: Engine) -> None:
    """The next turn's prompt begins with the prompt and the output before. The state is kept within prompts
    only, so the output is computed again.
    """
    tokens, known = list(prompt(300, 17)), 0
    flushed(engine)
    for turn in range(3):
        request = asked(f"turn{turn}", tokens, num=10)
        (cached,) = run(engine, [request], together=False)
        assert cached >= known if turn else cached == 0
        known = len(tokens) // PAGE * PAGE if turn == 0 else cached + 1
        tokens += hybrid_tokens(tokens, 10, paged=engine.info.name == "hybrid") + list(prompt(310 + turn, 7))


@pytest.mark.parametrize("num", [1, 4, 5, 9, 30])
@pytest.mark.parametrize("bypass", [False, True])
def test_forks_begin_at_the_last_page_of_their_prompt(engine: Engine, num: int, bypass: bool) -> None:
    outputs = outputs_of(asked("r", prompt(400 + num, num), cache=CacheParams(bypass=bypass)), 4)
    for _ in range(2):
        start = (num - 1) // PAGE * PAGE
        assert run(flushed(engine), outputs) == [0, start, start, start]


def test_an_update_flushes_snapshots(engine: Engine) -> None:
    request = asked("r", prompt(500, 21))
    assert run(flushed(engine), [request, request], together=False) == [0, 20]
    engine.update_weights({"one": np.ones((1,), np.float32)}, label="same").result(60)
    assert run(engine, [request, request], together=False) == [0, 20]


# -- anything at once --


def mixed(rng: random.Random, num: int) -> list[Request]:
    """Make requests of one or several outputs, most of which begin like others."""
    requests: list[Request] = []
    for i in range(num):
        length = rng.randint(1, 45)
        tokens = prompt(rng.randint(0, 6), length, shared=min(rng.choice([0, 6, 22, 30]), length))
        cache = CacheParams(bypass=rng.random() < 0.2, salt=rng.choice(["", "", "salt"]))
        request = asked(f"r{i}", tokens, rng.randint(1, 20), cache=cache)
        requests += outputs_of(request, rng.choice([1, 1, 3]))
    return requests


@pytest.mark.parametrize("seed", range(2))
def test_a_mix_of_requests(engine: Engine, seed: int) -> None:
    assert sum(run(engine, mixed(random.Random(seed), 14))) > 0


@pytest.mark.sweep
def test_few_snapshots_and_few_pages() -> None:
    """Snapshots are given away while others need them, and requests are preempted, which then begin behind
    what is left of theirs.
    """
    cache = CacheSpec((STATE, PAGED, NEWEST))
    pages = 26 * PAGED.page_bytes(PAGE, np.dtype(np.float32))
    engine = toy_engine(
        hybrid_model(max_model_len=72),
        state_snapshots=2,
        kv_cache_bytes=pages + cache.state_bytes(4, 2),
        decode_window_s=10.0,
    )
    try:
        assert engine.info.num_pages == 26
        for seed in range(3):
            run(engine, mixed(random.Random(seed), 12))
        requests = [asked(f"r{i}", prompt_of(4 + i), 40) for i in range(6)]
        run(engine, requests)
        assert engine.totals().preemptions > 0
    finally:
        engine.shutdown()


def test_without_a_prefix_cache_only_forks_share() -> None:
    engine = toy_engine(hybrid_model(), prefix_cache_pages=0)
    try:
        outputs = outputs_of(asked("r", prompt(1, 30)), 4)
        assert run(engine, outputs) == [0, 28, 28, 28]
        assert run(engine, outputs) == [0, 28, 28, 28]
    finally:
        engine.shutdown()


def test_tokens_that_are_put_off_begin_behind_their_snapshot_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """About half of the masks are not ready in time, for decodes as well as for last chunks of prompts, of
    which many begin behind a snapshot.
    """
    put_off = HalfPutOff(monkeypatch)
    engine = toy_engine(hybrid_model(), decode_window_s=10.0)
    try:
        for seed in range(2):
            requests = [
                dataclasses.replace(request, constraint=Anything() if i % 3 else None)
                for i, request in enumerate(mixed(random.Random(seed), 12))
            ]
            assert sum(run(engine, requests)) > 0
        assert put_off.num_skipped > 10
    finally:
        engine.shutdown()


def test_requests_that_run_through_an_update_keep_or_recompute_their_state() -> None:
    """With RECOMPUTE, running requests are preempted, and do not begin behind snapshots of old weights."""
    engine = toy_engine(hybrid_model())
    try:
        same = {"one": np.ones((1,), np.float32)}
        tokens = prompt(3, 21)
        assert run(engine, [asked("a", tokens), asked("b", tokens)], together=False) == [0, 20]
        for policy in (InFlightPolicy.RECOMPUTE, InFlightPolicy.KEEP):
            gate = at_gate(engine, tokens=40)
            done = engine.update_weights(same, label="same", in_flight=policy)
            gate.open()
            done.result(60)
            gate.sink.last("held")
            assert gate.sink.tokens("held") == hybrid_tokens((1,), 40)
            assert run(engine, [asked("a", tokens), asked("b", tokens)], together=False) == [0, 20]
    finally:
        engine.shutdown()
