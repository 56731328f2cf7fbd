"""Tokens that are drawn behind proposed ones have the model's own distribution, wherever in a step they are.

The witness is the table of a model whose distribution is known exactly: what follows one of four tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest

from penstock.runtime import Engine, SamplingParams, StoppingParams, building
from penstock.runtime.requests.request import Request
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.lookup import Copy
from penstock.runtime.scheduling.sequence import Sequence as Output
from tests.support.collector import Collector
from tests.support.models.table import VOCAB, Tables, table_engine
from tests.support.scheduler.proposing import Guess, Guesses

pytestmark = pytest.mark.ci

CHANCES = np.array([0.1, 0.7, 0.15, 0.05])
"""Of the tokens 0, 1, 2 and 3 places further."""
MOST = 3
TOO_FAR = 45.1
"""Of chi-square with 12 degrees of freedom, p = 1e-5."""


def tables() -> Tables:
    """After each of the four tokens, the four with CHANCES, and no other."""
    table = np.full((VOCAB, VOCAB), -50.0, np.float32)
    for token in range(4):
        table[token, (token + np.arange(4)) % 4] = np.log(CHANCES)
    return Tables(table, np.zeros_like(table))


def copied(seq: Output, most: int) -> Sequence[int]:
    """Return what followed the same tokens before, whether that pays or not."""
    return Copy(seq.token_ids, 1.0).guess(most)


def unlikeliest(seq: Output, most: int) -> Sequence[int]:
    return [(seq.token_ids[-1] + 3) % 4] * most


@pytest.fixture(scope="module")
def proposer() -> Guesses:
    return Guesses(copied, random.Random(1), patience=1.0)


@pytest.fixture(scope="module")
def engine(proposer: Guesses) -> Iterator[Engine]:
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_decode_steps": 1, "max_proposed_tokens": MOST}
    with mock.patch.object(building, "Lookup", return_value=proposer):
        engine = table_engine(tables(), speculation="lookup", **sizes)
    yield engine
    engine.shutdown()


@pytest.mark.parametrize(("guess", "least", "most"), [(copied, 0.35, 0.6), (unlikeliest, 0.02, 0.08)])
def test_draws_at_every_place_of_a_step_have_the_models_distribution(
    engine: Engine, proposer: Guesses, guess: Guess, least: float, most: float
) -> None:
    """Of 80 requests of 100 tokens. Seeds are fixed, so it is always the same draws. The share of tokens that
    do not come first in their step is about what proposals are worth: a copy is right about as often as two
    draws are equal, and the unlikeliest token is drawn once in twenty.
    """
    proposer.guess = guess
    stopping = StoppingParams(max_tokens=100, ignore_eos=True)
    sink = Collector()
    for seed in range(80):
        engine.submit(Request(f"r{seed}", (0, 1, 2, 3), ResolvedSampling(seed=seed), stopping), sink)
    counts = np.zeros((1 + MOST, 4, 4))
    for seed in range(80):
        sink.last(f"r{seed}")
        last = 3
        for output in sink.outputs[f"r{seed}"]:
            for place, token in enumerate(output.token_ids):
                counts[place, last, (token - last) % 4] += 1
                last = token
    assert counts.sum() == 80 * 100
    for at_place in counts:
        expected = at_place.sum(axis=1, keepdims=True) * CHANCES
        if expected.min() >= 5:
            assert ((at_place - expected) ** 2 / expected).sum() < TOO_FAR
    assert least < counts[1:].sum() / counts.sum() < most


def test_usage_of_an_embedded_engine_tells_what_was_proposed(engine: Engine, proposer: Guesses) -> None:
    proposer.guess = copied
    options: dict[str, Any] = {"sampling": SamplingParams(seed=3), "n": 2}
    options["stopping"] = StoppingParams(max_tokens=50, ignore_eos=True)
    told = engine.generate([0, 1, 2, 3], **options)
    without = engine.generate([0, 1, 2, 3], max_proposed_tokens=0, **options)
    assert [one.token_ids for one in told.outputs] == [one.token_ids for one in without.outputs]
    assert told.usage.proposed_tokens > told.usage.accepted_tokens > 20
    assert (without.usage.proposed_tokens, without.usage.accepted_tokens) == (0, 0)
