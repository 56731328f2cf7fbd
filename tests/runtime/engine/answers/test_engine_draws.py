"""Sampled tokens have the distribution that the definitions of the parameters give them. Chi-square tests on
known logits through the whole engine, over seeds and over the positions of one request.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.runtime import Engine, StoppingParams
from penstock.runtime.requests.request import Request
from penstock.runtime.requests.sampling import ResolvedSampling
from tests.support.batch import answers
from tests.support.mix import Turns
from tests.support.models.table import VOCAB, Tables, table_engine
from tests.support.models.witness import probabilities, shaped_logits

pytestmark = pytest.mark.ci

WEIGHTS = (0.4, 0.3, 0.2, 0.06, 0.04)
FLAT = Tables.constant(np.log(WEIGHTS).tolist())
"""The tokens of WEIGHTS have these probabilities, and the other 56 of VOCAB's 61 tokens have the logit -50.
These 56 are never drawn, but they decide any statistic over all logits: the mean is about -46, the standard
deviation about 13."""
PROMPT = (0, 4, 9)
SWEEP = pytest.mark.sweep
"""CI has what combines parameters. tests/runtime/ops/native/test_native_sample.py has each of them."""


@pytest.fixture(
    scope="module",
    params=["auto", pytest.param("off", marks=pytest.mark.sweep("draws by XLA"))],
    ids=["native", "XLA"],
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Yield an engine with the native sampler, and one with XLA's. Of the latter's draws
    tests/runtime/ops/test_sampler.py has the distributions, too.
    """
    engine = table_engine(
        FLAT,
        native=request.param,
        max_model_len=1024,
        max_num_seqs=16,
        page_size=64,
        kv_cache_bytes=2**20,
        max_queued_requests=10_000,
    )
    yield engine
    assert engine.compiles_after_warmup == 0
    assert engine.load().pages_used == 0
    engine.shutdown()


def requests(sampling: dict[str, Any], num: int, length: int, **more: Any) -> list[Request]:
    stopping = StoppingParams(max_tokens=length, ignore_eos=True)
    return [
        Request(f"r{seed}", PROMPT, ResolvedSampling(**sampling, seed=seed), stopping, **more)
        for seed in range(num)
    ]


def assert_drawn_from(counts: NDArray[Any], probs: NDArray[np.float64]) -> None:
    """Pearson's test at p = 1e-6. The critical value is computed by Wilson and Hilferty's cube root. Cells
    whose expected count is below 5 are merged.
    """
    assert counts[probs == 0].sum() == 0
    expected = probs * counts.sum()
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 5:
        assert counts[-1] < 30
        counts, expected = counts[:-1], expected[:-1]
    degrees = len(expected) - 1
    if degrees == 0:
        return
    critical = degrees * (1 - 2 / (9 * degrees) + 4.753 * np.sqrt(2 / (9 * degrees))) ** 3
    assert ((counts - expected) ** 2 / expected).sum() < critical


@pytest.mark.parametrize(
    ("sampling", "weights"),
    [
        ({}, WEIGHTS),
        pytest.param({"temperature": 0.5}, [w**2 for w in WEIGHTS], marks=SWEEP),
        pytest.param({"temperature": 3.0}, [w ** (1 / 3) for w in WEIGHTS], marks=SWEEP),
        pytest.param({"top_k": 2}, [4, 3], marks=SWEEP),
        pytest.param({"top_p": 0.75}, [4, 3, 2], marks=SWEEP),
        pytest.param({"min_p": 0.12}, [40, 30, 20, 6], marks=SWEEP),
        ({"temperature": 2.0, "top_k": 4, "top_p": 0.7, "min_p": 0.8}, [0.4**0.5, 0.3**0.5]),
        pytest.param({"logit_bias": ((1, np.log(2)), (3, -np.inf))}, [4, 6, 2, 0, 0.4], marks=SWEEP),
        ({"allowed_token_ids": (1, 3, 4)}, [0, 30, 0, 6, 4]),
        pytest.param({"bad_words": ((0,),)}, [0, 30, 20, 6, 4], marks=SWEEP),
        # 0 and 4 are in the prompt, and the logarithms are negative: w ** penalty
        pytest.param({"repetition_penalty": 1.5}, [0.4**1.5, 0.3, 0.2, 0.06, 0.04**1.5], marks=SWEEP),
        ({"repetition_penalty": 1.5, "temperature": 2.0, "logit_bias": ((2, np.log(3)),)},
         [0.4**0.75, 0.3**0.5, 0.6**0.5, 0.06**0.5, 0.04**0.75]),
        # No token was generated yet.
        pytest.param({"presence_penalty": 2.0, "frequency_penalty": -2.0}, WEIGHTS, marks=SWEEP),
    ],
)  # fmt: skip
def test_first_tokens_over_seeds(engine: Engine, sampling: dict[str, Any], weights: list[float]) -> None:
    params = {"temperature": 1.0, **sampling}
    drawn = [result.tokens[0] for result in answers(engine, requests(params, 2000, 1))]
    probs = np.zeros(VOCAB)
    probs[: len(weights)] = np.array(weights) / sum(weights)
    assert_drawn_from(np.bincount(drawn, minlength=VOCAB), probs)


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({"presence_penalty": 1.0}, marks=SWEEP),
        {"frequency_penalty": -0.7, "repetition_penalty": 1.3},
        pytest.param({"frequency_penalty": 0.5, "logit_bias": ((3, 1.0),), "temperature": 2.5}, marks=SWEEP),
        pytest.param({"presence_penalty": -1.0, "top_k": 3}, marks=SWEEP),
        pytest.param({"bad_words": ((0, 1), (2, 2)), "repetition_penalty": 0.8}, marks=SWEEP),
    ],
)
def test_pairs_of_tokens_over_seeds(engine: Engine, sampling: dict[str, Any]) -> None:
    """The second token's penalties depend on the first, so all 25 pairs are counted and compared with P(a) *
    P(b | a) of the witness.
    """
    params = {"temperature": 1.0, **sampling, "allowed_token_ids": tuple(range(5))}
    asked = requests(params, 2500, 2)
    counts = np.zeros((5, 5))
    for result in answers(engine, asked):
        counts[tuple(result.tokens)] += 1

    def next_probs(*made: int) -> NDArray[np.float64]:
        return probabilities(shaped_logits(asked[0], FLAT, made), asked[0].sampling)[:5]

    expected = np.stack([next_probs()[a] * next_probs(a) for a in range(5)])
    assert_drawn_from(counts.ravel(), expected.ravel())


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({}, marks=SWEEP),
        {"temperature": 2.2, "top_k": 4},
        pytest.param({"logit_bias": ((4, 2.0),), "top_p": 0.9}, marks=SWEEP),
    ],
)
def test_positions_of_one_request_are_alike_and_independent(engine: Engine, sampling: dict[str, Any]) -> None:
    """All positions have the same distribution, and neighbours are independent: 4 requests of 1,000 tokens
    each, in windows of decode steps, counted as single tokens and as pairs.
    """
    asked = requests({"temperature": 1.0, **sampling}, 4, 1000)
    single = probabilities(shaped_logits(asked[0], FLAT, ()), asked[0].sampling)[:5]
    made = [result.tokens for result in answers(engine, asked)]
    counts = np.bincount([token for tokens in made for token in tokens], minlength=5)
    assert_drawn_from(counts, single)
    pairs = np.zeros((5, 5))
    for tokens in made:
        for pair in pairwise(tokens):
            pairs[pair] += 1
    assert_drawn_from(pairs.ravel(), np.outer(single, single).ravel())
    between = np.zeros((5, 5))  # the same position under two seeds
    for pair in zip(made[0] + made[2], made[1] + made[3], strict=True):
        between[pair] += 1
    assert_drawn_from(between.ravel(), np.outer(single, single).ravel())


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({"frequency_penalty": 0.02, "presence_penalty": 0.5}, marks=SWEEP),
        {"repetition_penalty": 1.4, "temperature": 3.0, "logit_bias": ((7, 47.0),)},
        pytest.param({"frequency_penalty": 0.05, "min_p": 0.2}, marks=SWEEP),
    ],
)
def test_long_outputs_under_penalties(engine: Engine, sampling: dict[str, Any], constrained: bool) -> None:
    """Each token is drawn from the probabilities that the witness gives after the tokens before it. So over 8
    x 150 positions the count of each token is within 5 standard deviations of the sum of its probabilities.
    """
    asked = [
        Request(r.request_id, r.prompt_token_ids, r.sampling, r.stopping, constraint=Turns())
        if constrained
        else r
        for r in requests({"temperature": 1.0, **sampling}, 8, 150)
    ]
    observed, expected, variance = np.zeros((3, VOCAB))
    for request, result in zip(asked, answers(engine, asked), strict=True):
        turns = Turns()
        for i, token in enumerate(result.tokens):
            allowed = turns.allowed() if constrained else None
            probs = probabilities(shaped_logits(request, FLAT, result.tokens[:i], allowed), request.sampling)
            assert probs[token] > 0
            observed[token] += 1
            expected += probs
            variance += probs * (1 - probs)
            if constrained:
                turns.accept([token])
    common = variance > 5
    assert common.sum() >= 3
    assert (np.abs(observed - expected)[common] / np.sqrt(variance[common]) < 5).all()
