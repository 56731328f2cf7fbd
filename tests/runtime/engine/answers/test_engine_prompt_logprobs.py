"""Log-probabilities of prompts, compared with PyTorch's: the value that PyTorch gave a token when it
generated it must hold for the same token in a prompt. This is tested for every architecture, with the prompt
in one chunk and in several, with a warm prefix cache, beside other requests, and after preemption.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from penstock.runtime import Engine, StoppingParams
from penstock.runtime.loop.interface import InFlightPolicy
from penstock.runtime.requests.request import Request, StepOutput, TokenLogprobs
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.updating.interface import UpdateReport
from tests.support.batch import Answer, answer, answers
from tests.support.chunks import set_chunk
from tests.support.collector import Collector, at_gate
from tests.support.goldens import CONFIG, GOLDEN, KINDS, small_config
from tests.support.mix import Mixer
from tests.support.models.table import random_tables, table_engine
from tests.support.models.witness import log_softmax
from tests.support.suite.drawing import few

pytestmark = pytest.mark.ci

GREEDY = ResolvedSampling(temperature=0.0)
NUM_TOP = 8
Case = dict[str, Any]


def cases(name: str) -> list[Case]:
    loaded: list[Case] = json.loads((GOLDEN / name / "expected.json").read_text())["cases"]
    return loaded


@pytest.fixture(scope="module", params=few(KINDS, ("qwen3",)))
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, list[Case]]]:
    engine = Engine.from_pretrained(str(GOLDEN / request.param), small_config(request.param))
    engine.start()
    yield engine, cases(request.param)
    assert engine.compiles_after_warmup == 0
    assert engine.load().pages_used == 0
    engine.shutdown()


def ask(case: Case, known: int, name: str = "r", max_tokens: int = 1) -> Request:
    """Make a request whose prompt is extended by the first `known` tokens that PyTorch generated."""
    return Request(
        name,
        (*case["prompt"], *case["tokens"][:known]),
        GREEDY,
        StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        prompt_logprobs=NUM_TOP,
    )


def check(result: Answer, case: Case, known: int) -> None:
    told = result.prompt_logprobs
    assert len(told) == len(case["prompt"]) + known - 1
    of_known = told[len(case["prompt"]) - 1 :]
    np.testing.assert_allclose([one.sampled for one in of_known], case["logprobs"][:known], rtol=1e-4)
    for one, token in zip(of_known, case["tokens"][:known], strict=True):
        assert one.top[0] == (token, one.sampled)  # PyTorch generated greedily
    # The eight likeliest tokens after the prompt are PyTorch's, and their logits differ by as much as
    # PyTorch's.
    ids, logits = zip(*case["last_logits_top"], strict=True)
    assert [token for token, _ in of_known[0].top] == list(ids)
    shift = case["logprobs"][0] - logits[0]
    np.testing.assert_allclose([logprob - shift for _, logprob in of_known[0].top], logits, rtol=1e-4)


def close(left: list[TokenLogprobs], right: list[TokenLogprobs]) -> bool:
    assert [[t for t, _ in one.top] for one in left] == [[t for t, _ in one.top] for one in right]
    flat = [[v for one in side for v in (one.sampled, *(v for _, v in one.top))] for side in (left, right)]
    return flat[0] == pytest.approx(flat[1], rel=1e-4)


def test_whole_and_in_chunks(served: tuple[Engine, list[Case]]) -> None:
    """A page has 8 tokens. Chunks of every size up to two pages and a token, and of sizes that cut a prompt
    in the middle, before its last token, and not at all.
    """
    engine, goldens = served
    for case in goldens:
        known = len(case["tokens"])
        length = len(case["prompt"]) + known
        for size in (None, *sorted({*range(1, 18), length // 2, length - 1, length})):
            set_chunk(engine, size)
            engine.flush_prefix_cache()
            check(answer(engine, ask(case, known)), case, known)
    set_chunk(engine, None)


def test_with_a_warm_prefix_cache(served: tuple[Engine, list[Case]]) -> None:
    """Cached pages hold no log-probabilities, so a request that asks for them computes its prompt anew.
    Others may use the pages that it publishes.
    """
    engine, goldens = served
    for case in goldens:
        engine.flush_prefix_cache()
        plain = dataclasses.replace(ask(case, 24), prompt_logprobs=None)
        whole = answer(engine, plain)
        assert whole.prompt_logprobs == []
        for known in (24, 24, 7, 1):
            result = answer(engine, ask(case, known))
            check(result, case, known)
        again = answer(engine, plain)
        assert again.tokens == whole.tokens
        assert again.cached_prompt_tokens == (len(plain.prompt_token_ids) - 1) // 8 * 8


def test_packed_with_others(served: tuple[Engine, list[Case]]) -> None:
    engine, goldens = served
    for size in (None, 9):
        set_chunk(engine, size)
        engine.flush_prefix_cache()
        asked = [(case, known) for known in (1, 24, 6) for case in goldens]
        requests = [ask(case, known, f"r{i}", 1 + 3 * i) for i, (case, known) in enumerate(asked)]
        requests[4] = dataclasses.replace(requests[4], prompt_logprobs=None, logprobs=2)
        results = answers(engine, requests)
        assert results[4].prompt_logprobs == []
        for i, (case, known) in enumerate(asked):
            if i != 4:
                check(results[i], case, known)
    set_chunk(engine, None)


def test_candidates_are_those_of_generation(served: tuple[Engine, list[Case]]) -> None:
    """A token of a prompt and a generated token at the same position have the same likeliest tokens."""
    engine, goldens = served
    for case in goldens:
        request = dataclasses.replace(ask(case, 0, max_tokens=24), logprobs=NUM_TOP)
        generated = answer(engine, request)
        assert generated.tokens == case["tokens"]
        read = answer(engine, ask(case, 24))
        assert close(generated.logprobs, read.prompt_logprobs[len(case["prompt"]) - 1 :])
        assert close(generated.prompt_logprobs, read.prompt_logprobs[: len(case["prompt"]) - 1])


def test_preempted_in_the_middle_of_a_prompt() -> None:
    """The pool has 20 pages of 8 tokens. While the second request's prompt of 114 tokens is computed 3 tokens
    at a time, the first request grows and takes its pages.
    """
    page_bytes = 8 * 2 * 2 * 2 * 32 * 4  # tokens * layers * key and value * heads * channels * bytes
    config = dataclasses.replace(
        CONFIG, kv_cache_bytes=20 * page_bytes, max_model_len=144, max_num_batched_tokens=16
    )
    engine = Engine.from_pretrained(str(GOLDEN / "qwen3"), config)
    engine.start()
    try:
        assert engine.info.num_pages == 20
        _, middle, long = cases("qwen3")
        set_chunk(engine, 3)
        for _ in range(2):
            requests = [ask(middle, 0, "grows", 60), ask(long, 24, "waits", 5), ask(middle, 24, "last", 5)]
            grows, waits, last = answers(engine, requests, together=True)
            assert waits.preemptions + last.preemptions > 0
            assert grows.preemptions == 0
            assert grows.tokens[:24] == middle["tokens"]
            check(waits, long, 24)
            check(last, middle, 24)
        assert engine.load().pages_used == 0
    finally:
        engine.shutdown()


@pytest.mark.parametrize("chunk", [None, 1, 2, 7])
def test_the_table_models_prompts_agree_with_the_witness(chunk: int | None) -> None:
    """Every token of a prompt from the second on has a log-probability; a prompt of one token has none.
    Penalties and biases do not change it.
    """
    tables = random_tables(5)
    engine = table_engine(tables, max_prefill_chunk=chunk)
    try:
        mixer = Mixer(6)
        requests = [dataclasses.replace(mixer.sampled(f"r{i}"), prompt_logprobs=i % 4) for i in range(20)]
        requests.append(Request("one", (5,), GREEDY, StoppingParams(max_tokens=2), prompt_logprobs=3))
        for request, result in zip(requests, answers(engine, requests), strict=True):
            prompt = request.prompt_token_ids
            assert len(result.prompt_logprobs) == len(prompt) - 1
            for i, one in enumerate(result.prompt_logprobs, 1):
                raw = log_softmax(tables.logits(prompt[:i]))
                assert one.sampled == pytest.approx(raw[prompt[i]], rel=1e-5, abs=1e-5)
                assert [t for t, _ in one.top] == np.argsort(-raw)[: request.prompt_logprobs].tolist()
        assert engine.compiles_after_warmup == 0
    finally:
        engine.shutdown()


def test_a_prompt_recomputed_with_new_weights_has_only_their_logprobs() -> None:
    """The update comes while the prompt is being computed, 3 tokens at a time, and drops what the old weights
    computed. All log-probabilities must be those of the new weights.
    """
    old, new = random_tables(5), random_tables(6)
    engine = table_engine(old, max_prefill_chunk=3)
    sink = Collector()
    updates: list[Future[UpdateReport]] = []
    held: list[StepOutput] = []

    def other(outputs: Sequence[StepOutput]) -> None:
        held.extend(outputs)
        if len(held) == 4:
            updates.append(
                engine.update_weights(new.tensors(), label="new", in_flight=InFlightPolicy.RECOMPUTE)
            )

    try:
        prompt = tuple(range(3, 60))
        asked = Request("r", prompt, GREEDY, StoppingParams(max_tokens=4), prompt_logprobs=0)
        gate = at_gate(engine, tokens=1)
        engine.submit(Request("other", (1,), GREEDY, StoppingParams(max_tokens=90, ignore_eos=True)), other)
        engine.submit(asked, sink)
        gate.open()
        sink.last("r")
        result = Answer.of(sink.outputs["r"])
        assert updates[0].result(60).current.label == "new"
        assert result.preemptions == 1
        raw = [log_softmax(new.logits(prompt[:i]))[prompt[i]] for i in range(1, len(prompt))]
        assert [one.sampled for one in result.prompt_logprobs] == pytest.approx(raw, rel=1e-5, abs=1e-5)
    finally:
        engine.shutdown()
