"""A KV cache of int8, compared with PyTorch's results for the same models in float32.

Rounding keys and values to 8 bits moved a log-probability of these models by 0.034 nats at most, so the
tolerance is three times that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.runtime import Engine
from tests.runtime.engine.answers.test_engine_prompt_logprobs import ask, cases
from tests.support.batch import answer
from tests.support.goldens import CONFIG, GOLDEN
from tests.support.suite.drawing import few

MOST = 0.1
"""Nats."""
JUMPS = {"deepseek_v3": 2}
"""How many of 24 tokens may be farther off. Most likely two experts are nearly equally good there, and the
rounding decides between them. The other tokens of DeepSeek's were within 0.08."""
FAMILIES = ("qwen3", "mistral_swa", "deepseek_v3", "qwen3_next")
"""Plain attention, a window, latent attention, and recurrent layers beside attention."""


@pytest.fixture(scope="module", params=few(FAMILIES, (), ci=("qwen3",)))
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module", params=[16, pytest.param(8, marks=pytest.mark.sweep)])
def engine(request: pytest.FixtureRequest, name: str) -> Iterator[Engine]:
    """Yield an engine: the native kernels take pages of 16 tokens, and XLA those of 8."""
    config = dataclasses.replace(CONFIG, kv_cache_dtype="int8", page_size=request.param)
    engine = Engine.from_pretrained(str(GOLDEN / name), config)
    engine.start()
    yield engine
    assert engine.compiles_after_warmup == 0
    engine.shutdown()


@pytest.mark.parametrize("number", range(3))
def test_log_probabilities_are_nearly_pytorchs(engine: Engine, name: str, number: int) -> None:
    """Of the tokens that PyTorch chose greedily, each read as a part of the prompt. Where another one is
    likelier here, it leads by no more than both may be off.
    """
    case = cases(name)[number]
    known = answer(engine, ask(case, len(case["tokens"]))).prompt_logprobs[len(case["prompt"]) - 1 :]
    ours, theirs = np.array([one.sampled for one in known]), np.array(case["logprobs"])
    off, jumps = np.abs(ours - theirs), JUMPS.get(name, 0)
    assert (off > MOST).sum() <= jumps
    assert off.max() > 1e-4  # it is not float32 that was measured
    leads = np.array([one.top[0][1] - one.sampled for one in known])
    assert (leads > 2 * MOST).sum() <= jumps
    assert np.mean([one.top[0][0] == token for one, token in zip(known, case["tokens"], strict=True)]) > 0.8
    ids, logits = zip(*case["last_logits_top"], strict=True)
    shift = case["logprobs"][0] - logits[0]
    top = dict(known[0].top)
    both = [(top[token] - shift, logit) for token, logit in zip(ids, logits, strict=True) if token in top]
    seen, expected = np.array(both).T
    np.testing.assert_allclose(seen, expected, atol=MOST)
