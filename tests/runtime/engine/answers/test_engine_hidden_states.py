"""Hidden states of generated tokens, embeddings of prompts and scores, compared with PyTorch's.

PyTorch's log-probabilities are those of head x hidden state, so they are a witness of every hidden state of
an output. The hidden state of a prompt's last token is that from which the next token was drawn, and the mean
of those of all positions is made by hand of the hidden states of shorter prompts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from penstock.runtime import Engine, StoppingParams
from penstock.runtime.requests.request import Finish, FinishReason, Pooling, PromptReading, Request
from penstock.runtime.requests.sampling import ResolvedSampling
from tests.support.batch import Answer, answer, answers
from tests.support.chunks import set_chunk
from tests.support.goldens import CONFIG, GOLDEN, KINDS, small_config
from tests.support.models.witness import log_softmax
from tests.support.suite.drawing import few

pytestmark = pytest.mark.ci

GREEDY = ResolvedSampling(temperature=0.0)
Case = dict[str, Any]
READ = Finish(FinishReason.PROMPT_READ)
LAST, MEAN = PromptReading(pooling=Pooling.LAST_TOKEN), PromptReading(pooling=Pooling.MEAN)
MAX = PromptReading(pooling=Pooling.MAX)


class Golden:
    """A golden checkpoint that an engine serves, and the head by which PyTorch's logits were made."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.cases: list[Case] = json.loads((folder / "expected.json").read_text())["cases"]
        tensors = load_file(folder / "model.safetensors")
        self._head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).astype(np.float64)
        config = json.loads((folder / "config.json").read_text())
        self._softcap = config.get("final_logit_softcapping")
        self._divisor = config.get("logits_scaling") or 1.0

    def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float64]:
        """Logits [V] of one hidden state."""
        logits: NDArray[np.float64] = self._head @ hidden.astype(np.float64) / self._divisor
        return np.tanh(logits / self._softcap) * self._softcap if self._softcap else logits


@pytest.fixture(scope="module", params=few([n for n in KINDS if n != "deepseek_v3"], ("qwen3",)))
def golden(request: pytest.FixtureRequest) -> Iterator[Golden]:
    folder = GOLDEN / request.param
    engine = Engine.from_pretrained(str(folder), small_config(request.param))
    engine.start()
    yield Golden(engine, folder)
    assert engine.compiles_after_warmup == 0
    assert engine.load().pages_used == 0
    engine.shutdown()


def generate(case: Case, name: str = "r", known: int = 0) -> Request:
    """Make a request for hidden states, whose prompt is extended by the first `known` tokens of PyTorch's."""
    stopping = StoppingParams(max_tokens=len(case["tokens"]) - known, ignore_eos=True)
    return Request(name, (*case["prompt"], *case["tokens"][:known]), GREEDY, stopping, hidden_states=True)


def pool(tokens: list[int], reading: PromptReading, name: str = "r") -> Request:
    return Request(name, tuple(tokens), reading=reading)


def check_hidden(golden: Golden, case: Case, result: Answer, known: int = 0) -> None:
    assert result.tokens == case["tokens"][known:]
    hidden = np.concatenate(result.hidden)
    assert len(hidden) == len(result.tokens)
    assert hidden.dtype == np.float32
    told = [log_softmax(golden.logits(h))[t] for h, t in zip(hidden, result.tokens, strict=True)]
    np.testing.assert_allclose(told, case["logprobs"][known:], rtol=1e-4)


def pooled(result: Answer) -> NDArray[np.float32]:
    """Return the one hidden state that a request which pools has got, at its end."""
    assert (result.finish, result.tokens, result.error) == (READ, [], None)
    (hidden,) = result.hidden
    assert hidden.dtype == np.float32
    return hidden


def test_every_hidden_state_times_the_head_gives_pytorchs_log_probabilities(golden: Golden) -> None:
    for case in golden.cases:
        result = answer(golden.engine, generate(case))
        check_hidden(golden, case, result)
        ids, logits = zip(*case["last_logits_top"], strict=True)
        ours = golden.logits(result.hidden[0][0])
        np.testing.assert_allclose(ours[list(ids)], logits, rtol=1e-4, atol=1e-4)


def test_hidden_states_beside_rows_that_step_in_windows(golden: Golden) -> None:
    """Requests without hidden states take part in the same steps, and get the same tokens."""
    case, *others = golden.cases
    plain = [
        Request(f"p{i}", tuple(c["prompt"]), GREEDY, StoppingParams(max_tokens=24, ignore_eos=True))
        for i, c in enumerate([case, *others])
    ]
    results = answers(golden.engine, [generate(case, "h"), *plain, generate(case, "later", 7)])
    check_hidden(golden, case, results[0])
    check_hidden(golden, case, results[-1], 7)
    for one, result in zip([case, *others], results[1:-1], strict=True):
        assert result.tokens == one["tokens"]
        assert result.hidden == []


def test_embeddings_in_every_chunking(golden: Golden) -> None:
    """The page has 8 tokens."""
    engine = golden.engine
    case = golden.cases[1]
    tokens = [*case["prompt"], *case["tokens"]][:25]
    states = np.stack([pooled(answer(engine, pool(tokens[:end], LAST))) for end in range(1, 26)])
    for size in (None, 1, 7, 8, 24):
        set_chunk(engine, size)
        engine.flush_prefix_cache()
        pooled_by = (
            ("l", LAST, states[-1]),
            ("m", MEAN, states.mean(axis=0)),
            ("x", MAX, states.max(axis=0)),
        )
        for name, reading, expected in pooled_by:
            result = answer(engine, pool(tokens, reading, name))
            np.testing.assert_allclose(pooled(result), expected, rtol=1e-4, atol=1e-4)
            assert result.weights == 1
            # The last token's needs no other position, and so comes from the cache; the others need them all.
            assert result.cached_prompt_tokens == 0
            again = answer(engine, pool(tokens, reading, name))
            np.testing.assert_allclose(pooled(again), expected, rtol=1e-4, atol=1e-4)
            assert again.cached_prompt_tokens == (24 if reading is LAST else 0)
            engine.flush_prefix_cache()
    set_chunk(engine, None)


def test_the_last_tokens_embedding_is_the_state_from_which_the_next_token_is_drawn(golden: Golden) -> None:
    for case in golden.cases:
        hidden = np.concatenate(answer(golden.engine, generate(case)).hidden)
        for known in (0, 1, 24 - 1):
            result = answer(golden.engine, pool([*case["prompt"], *case["tokens"][:known]], LAST))
            np.testing.assert_allclose(pooled(result), hidden[known], rtol=1e-4, atol=1e-4)


def test_scores_are_pytorchs_log_probabilities(golden: Golden) -> None:
    engine = golden.engine
    for size in (None, 1, 7, 8):
        set_chunk(engine, size)
        for case in golden.cases:
            engine.flush_prefix_cache()
            for known in (0, 0, 5, 23):
                prompt = (*case["prompt"], *case["tokens"])
                first = len(case["prompt"]) + known
                score = Request("r", prompt, prompt_logprobs=0, reading=PromptReading(scores_from=first))
                result = answer(engine, score)
                assert (result.finish, result.tokens) == (READ, [])
                told = [one.sampled for one in result.prompt_logprobs]
                np.testing.assert_allclose(told, case["logprobs"][known:], rtol=1e-4)
                # Up to the token before the first that is scored, pages may come from the cache.
                assert result.cached_prompt_tokens <= (first - 1) // 8 * 8
            assert result.cached_prompt_tokens == (first - 1) // 8 * 8
    set_chunk(engine, None)


def test_all_kinds_in_the_same_steps(golden: Golden) -> None:
    engine, cases = golden.engine, golden.cases
    alone: dict[str, NDArray[np.float32]] = {}
    for i, case in enumerate(cases):
        for reading in (LAST, MEAN, MAX):
            engine.flush_prefix_cache()
            result = answer(engine, pool(case["prompt"], reading))
            alone[f"{reading.pooling}{i}"] = pooled(result)
    for size in (None, 9):
        set_chunk(engine, size)
        engine.flush_prefix_cache()
        requests = [
            request
            for i, case in enumerate(cases)
            for request in (
                generate(case, f"g{i}"),
                pool(case["prompt"], MEAN, f"{Pooling.MEAN}{i}"),
                pool(case["prompt"], MAX, f"{Pooling.MAX}{i}"),
                pool(case["prompt"], LAST, f"{Pooling.LAST_TOKEN}{i}"),
            )
        ]
        told = answers(engine, requests, together=True)
        results = {one.request_id: result for one, result in zip(requests, told, strict=True)}
        for i, case in enumerate(cases):
            check_hidden(golden, case, results[f"g{i}"])
        for name, expected in alone.items():
            np.testing.assert_allclose(pooled(results[name]), expected, rtol=1e-4, atol=1e-4)
    set_chunk(engine, None)


def test_preempted_in_the_middle_of_a_prompt() -> None:
    """The pool has 20 pages of 8 tokens. While prompts are computed 3 tokens at a time, another request grows
    and takes their pages.
    """
    page_bytes = 8 * 2 * 2 * 2 * 32 * 4  # tokens * layers * key and value * heads * channels * bytes
    config = dataclasses.replace(
        CONFIG, kv_cache_bytes=20 * page_bytes, max_model_len=144, max_num_batched_tokens=16
    )
    engine = Engine.from_pretrained(str(GOLDEN / "qwen3"), config)
    engine.start()
    try:
        golden = Golden(engine, GOLDEN / "qwen3")
        middle, long = golden.cases[1:]
        tokens = [*long["prompt"], *long["tokens"]]
        expected = {reading: pooled(answer(engine, pool(tokens, reading))) for reading in (LAST, MEAN, MAX)}
        set_chunk(engine, 3)
        for reading in (LAST, MEAN, MAX):
            engine.flush_prefix_cache()
            grows = dataclasses.replace(
                generate(middle, "grows"), stopping=StoppingParams(max_tokens=60, ignore_eos=True)
            )
            first, waits, last = answers(
                engine, [grows, pool(tokens, reading, "w"), pool(tokens, reading, "l")], together=True
            )
            assert waits.preemptions + last.preemptions > 0
            assert first.tokens[:24] == middle["tokens"]
            for result in (waits, last):
                np.testing.assert_allclose(pooled(result), expected[reading], rtol=1e-4, atol=1e-4)
        assert engine.load().pages_used == 0
    finally:
        engine.shutdown()
