"""With real programs and the real cache, tokens are the same with overlapped steps or without, in windows or
not, and from cached prefixes. The expected tokens come from the toy model's formula.
"""

from __future__ import annotations

import pytest

from penstock.runtime.requests.request import FinishReason, Request, StoppingParams
from penstock.runtime.requests.sampling import SamplingParams
from tests.support.collector import GREEDY, Collector
from tests.support.models.toy import EOS, VOCAB, toy_engine, toy_tokens


def expected(prompt: tuple[int, ...], num: int, stops: set[int]) -> list[int]:
    tokens = toy_tokens(prompt, num)
    ends = [i for i, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [1, 8])
def test_streams_are_the_formulas(overlap: bool, steps: int) -> None:
    engine = toy_engine(overlap=overlap, max_decode_steps=steps, decode_window_s=10.0)
    try:
        sink = Collector()
        shared = tuple(range(1, 15))
        asked = {}
        for i in range(12):
            prompt, stop = (*shared[: 3 + i], i), (5 * i) % VOCAB
            asked[f"r{i}"] = expected(prompt, 30 + i, {stop, EOS} if i % 2 else {stop})
            stopping = StoppingParams(max_tokens=30 + i, stop_token_ids=(stop,), ignore_eos=not i % 2)
            engine.submit(Request(f"r{i}", prompt, GREEDY, stopping), sink)
        for name, tokens in asked.items():
            sink.last(name)
            assert sink.tokens(name) == tokens
        assert any(
            last.timing is not None and last.timing.cached_prompt_tokens > 0
            for last in (outputs[-1] for outputs in sink.outputs.values())
        )
        assert engine.compiles_after_warmup == 0
        assert engine.load().pages_used == 0
    finally:
        engine.shutdown()


def test_seeded_samples_and_banned_stops_are_the_same_in_windows() -> None:
    """Draws depend on seed and position, so windows of eight steps give the same tokens as single steps."""
    made = []
    for steps in (1, 8):
        engine = toy_engine(max_decode_steps=steps, decode_window_s=10.0)
        try:
            made.append(
                [
                    engine.generate(
                        [i, 2, 3],
                        sampling=SamplingParams(temperature=9.0, top_k=20, seed=i),
                        stopping=StoppingParams(max_tokens=40, min_tokens=13),
                        logprobs=2,
                    )
                    for i in range(6)
                ]
            )
        finally:
            engine.shutdown()
    one, eight = made
    assert [g.token_ids for g in one] == [g.token_ids for g in eight]
    assert [g.finish for g in one] == [g.finish for g in eight]
    for generation in eight:
        assert EOS not in generation.token_ids[:13]
        assert generation.logprobs is not None
        assert len(generation.logprobs) == len(generation.token_ids) >= 13
    reasons = {g.finish.reason for g in eight}
    assert reasons <= {FinishReason.EOS, FinishReason.MAX_TOKENS}
