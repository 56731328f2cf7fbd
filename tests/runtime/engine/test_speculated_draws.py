"""Tokens that are drawn behind proposed ones have the model's own distribution, wherever in a step they are.

The witness is the table of a model whose distribution is known exactly: what follows one of four tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest

from penstock.runtime import StoppingParams, building
from penstock.runtime.requests.request import Request
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.lookup import Copy
from penstock.runtime.scheduling.sequence import Sequence as Output
from tests.support.collector import Collector
from tests.support.models.table import VOCAB, Tables, table_engine
from tests.support.scheduler.proposing import Guesses

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
    """What followed the same tokens before, whether that pays or not."""
    return Copy(seq.token_ids, 1.0).guess(most)


@pytest.mark.ci
@pytest.mark.parametrize("is_right_often", [True, False])
def test_draws_at_every_place_of_a_step_have_the_models_distribution(is_right_often: bool) -> None:
    """Of 80 requests of 100 tokens. Seeds are fixed, so it is always the same draws. Proposals that are the
    unlikeliest token are as harmless as good ones.
    """

    def guess(seq: Output, most: int) -> Sequence[int]:
        return copied(seq, most) if is_right_often else [(seq.token_ids[-1] + 3) % 4] * most

    proposer = Guesses(guess, random.Random(1), patience=1.0)
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_decode_steps": 1, "max_proposed_tokens": MOST}
    with mock.patch.object(building, "Lookup", return_value=proposer):
        engine = table_engine(tables(), speculation="lookup", **sizes)
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
    engine.shutdown()
    assert counts.sum() == 80 * 100
    for at_place in counts:
        expected = at_place.sum(axis=1, keepdims=True) * CHANCES
        if expected.min() >= 5:
            assert ((at_place - expected) ** 2 / expected).sum() < TOO_FAR
    # A copy is right about as often as two draws are equal; the unlikeliest token is drawn once in twenty.
    later = counts[1:].sum() / counts.sum()
    assert (0.35 < later < 0.6) if is_right_often else (0.02 < later < 0.08), later
