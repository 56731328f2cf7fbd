"""Several outputs of one prompt, with real programs and the real cache: their tokens, and what they compute
and hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest

from penstock.runtime import Engine, SamplingParams
from penstock.runtime.loop.interface import StepRecord
from penstock.runtime.requests.request import CacheParams, Request, outputs_of
from penstock.runtime.requests.sampling import ResolvedSampling
from tests.support.collector import GREEDY, Collector, at_gate, long
from tests.support.models.toy import VOCAB, toy_engine, toy_tokens

N, NUM_TOKENS = 4, 30
DRAWN = ResolvedSampling(temperature=2.5, seed=5)
"""At this temperature about every second token is the one that the toy model's formula gives."""


@pytest.fixture(scope="module", params=[True, False], ids=["overlap and cache", "windows and no cache"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    first = request.param
    engine = (
        toy_engine(max_decode_steps=1)
        if first
        else toy_engine(overlap=False, prefix_cache_pages=0, max_decode_steps=8)
    )
    yield engine
    assert engine.compiles_after_warmup == 0
    assert engine.load().pages_used == 0
    engine.shutdown()


@pytest.fixture(scope="module")
def alone() -> Iterator[Engine]:
    """Yield an engine that serves one request at a time, without a prefix cache."""
    engine = toy_engine(prefix_cache_pages=0)
    yield engine
    engine.shutdown()


def asked(num_prompt: int, sampling: ResolvedSampling = DRAWN, bypass: bool = False) -> list[Request]:
    """Return the outputs of a prompt that has no prefix in common with another test's."""
    prompt = tuple(token % VOCAB for token in range(num_prompt, 2 * num_prompt))
    request = Request("r", prompt, sampling, long(NUM_TOKENS), cache=CacheParams(bypass=bypass))
    return outputs_of(request, N)


def run(engine: Engine, outputs: Sequence[Request]) -> Collector:
    """Submit all outputs together, while the only token of another request is being delivered, and wait for
    their ends.
    """
    gate, sink = at_gate(engine, tokens=1), Collector()
    for output in outputs:
        engine.submit(output, sink)
    gate.open()
    for output in outputs:
        sink.last(output.request_id)
    return sink


@pytest.mark.parametrize("num_prompt", [1, 11, 12, 13, 37])
def test_outputs_are_those_of_separate_requests_with_their_seeds(
    engine: Engine, alone: Engine, num_prompt: int
) -> None:
    outputs = asked(num_prompt)
    sink = run(engine, outputs)
    tokens = [sink.tokens(output.request_id) for output in outputs]
    assert tokens == [
        list(
            alone.generate(
                o.prompt_token_ids,
                sampling=SamplingParams(temperature=DRAWN.temperature, seed=o.sampling.seed),
                stopping=o.stopping,
            ).token_ids
        )
        for o in outputs
    ]
    assert all(a != b for a, b in itertools.combinations(tokens, 2))
    timings = [sink.last(output.request_id).timing for output in outputs]
    cached = [timing.cached_prompt_tokens for timing in timings if timing is not None]
    assert cached == [0] + [num_prompt - 1] * (N - 1)


def test_greedy_outputs_are_the_formulas(engine: Engine) -> None:
    outputs = asked(14, GREEDY)
    sink = run(engine, outputs)
    for output in outputs:
        assert sink.tokens(output.request_id) == toy_tokens(output.prompt_token_ids, NUM_TOKENS)


class Records:
    """An observer that keeps all records."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)


@pytest.mark.parametrize("bypass", [False, True])
def test_the_prompt_is_computed_once_and_held_once(bypass: bool) -> None:
    """The prompt has 38 tokens in pages of 4. So 9 pages are shared, and each output has a tenth page of its
    own. A step takes 16 tokens.
    """
    records = Records()
    engine = toy_engine(observer=records, overlap=False, max_decode_steps=1)
    try:
        run(engine, asked(38, bypass=bypass))
    finally:
        engine.shutdown()
    steps = records.steps[1:]  # the first step is that of the request at the gate
    assert [step.num_tokens for step in steps[:5]] == [16, 16, 6, 1 + 3, 4]
    assert sum(step.num_tokens for step in steps) == 38 + 3 + N * (NUM_TOKENS - 1)
    assert [step.pages_used for step in steps[:4]] == [10, 10, 10, 13]
    # The last token needs no KV: 67 positions each, in 17 pages. The first output ends one step early.
    assert steps[-2].pages_used == 9 + 3 * 8
    assert steps[-3].pages_used == 9 + 4 * 8
