"""The sampler in XLA: filters computed by hand, and chi-square tests of the draw on known distributions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime.ops import filters, sampler
from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.sample import native_token_logprobs
from penstock.runtime.ops.sampler import RowState
from penstock.runtime.ops.sampling_codes import (
    BANNED,
    BIAS,
    IN_PROMPT,
    MASK,
    NON_FINITE,
    PENALTIES,
    SAMPLING,
)
from penstock.runtime.ops.sampling_rows import SamplingRows
from penstock.runtime.requests.sampling import FLOATS, INTS, SamplingNumbers

filter_logits = jax.jit(filters.filter_logits)  # without jit every operation would be compiled by itself
choose = jax.jit(sampler.sample, static_argnames="num_top")
LOGPROBS = {
    name: jax.jit(made, static_argnums=2)
    for name, made in (("XLA", sampler.token_logprobs), ("native", native_token_logprobs))
    if name == "XLA" or (jax.default_backend() == "cpu" and library.available())
}


@pytest.fixture(params=list(LOGPROBS))
def token_logprobs(request: pytest.FixtureRequest) -> sampler.LogprobsOp:
    return LOGPROBS[request.param]


NEUTRAL = SamplingNumbers()
LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04], np.float32))


def rows(
    n: int, *, seeds: np.ndarray | None = None, positions: np.ndarray | None = None, **params: Any
) -> SamplingRows:
    """Rows with these parameters, each one value for all rows or an array with one for each; all others are
    neutral.
    """
    seed = np.zeros((n, 2), np.uint32)
    seed[:, 1] = np.arange(n) if seeds is None else seeds
    neutral: dict[str, tuple[Any, type]] = {
        "slots": (np.arange(n), np.int32),
        "banned": (False, np.bool_),
        "features": (0, np.int32),
        "num_logprobs": (-1, np.int32),
        **{name: (getattr(NEUTRAL, name), np.int32) for name in INTS},
        **{name: (getattr(NEUTRAL, name), np.float32) for name in FLOATS},
    }
    stop_ids = jnp.asarray(params.pop("stop_ids", np.full((n, 2), 2**30)), jnp.int32)
    fields = {
        name: jnp.asarray(np.broadcast_to(np.asarray(params.pop(name, value), kind), (n,)))
        for name, (value, kind) in neutral.items()
    }
    assert not params
    at = jnp.zeros(n, jnp.int32) if positions is None else jnp.asarray(positions, jnp.int32)
    fields["feature_slots"] = jnp.arange(n, dtype=jnp.int32)
    ints, floats = (jnp.stack([fields.pop(name) for name in names], axis=1) for names in (INTS, FLOATS))
    return SamplingRows(
        seed=jnp.asarray(seed), positions=at, stop_ids=stop_ids, ints=ints, floats=floats, **fields
    )


def sample(
    logits: jax.Array,
    rows: SamplingRows,
    any_sampling: jax.Array,
    history: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    mask: np.ndarray | None = None,
) -> jax.Array:
    """Return the tokens that are chosen, without log-probabilities."""
    n, vocab = logits.shape
    state = RowState(
        jnp.zeros(n, jnp.int32),
        (jnp.zeros((n, 1), jnp.int32),),
        jnp.zeros((n, vocab), jnp.int32) if history is None else jnp.asarray(history, jnp.int32),
        jnp.zeros((n, vocab), jnp.float32) if bias is None else jnp.asarray(bias, jnp.float32),
    )
    flags = np.bitwise_or.reduce(np.asarray(rows.features)) | int(any_sampling) * SAMPLING
    flags |= BANNED * bool(np.asarray(rows.banned).any())
    packed = None if mask is None else pack(mask)
    tokens: jax.Array = choose(logits, state, rows, jnp.int32(flags), packed, num_top=0).tokens
    return tokens


def pack(allowed: np.ndarray) -> jax.Array:
    """bool[R, V] -> int32[R, words]."""
    padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
    return jnp.asarray(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


def kept(logits: np.ndarray, **params: Any) -> list[int]:
    out = filter_logits(jnp.asarray(logits)[None], rows(1, **params))
    return np.flatnonzero(np.isfinite(np.asarray(out)[0])).tolist()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.39}, [0]),
        ({"top_p": 0.41}, [0, 1]),
        ({"top_p": 0.69}, [0, 1]),
        ({"top_p": 0.71}, [0, 1, 2]),
        ({"top_p": 0.95}, [0, 1, 2, 3]),
        ({"min_p": 0.45}, [0, 1, 2]),
        ({"min_p": 0.55}, [0, 1]),
        ({"min_p": 1.0}, [0]),
        # top_p works on what top_k left: 0.4 / 0.9 = 0.444 and (0.4 + 0.3) / 0.9 = 0.777
        ({"top_k": 3, "top_p": 0.45}, [0, 1]),
        ({"top_k": 3, "top_p": 0.44}, [0]),
        # temperature 2 flattens: the masses' square roots sum to 2.072, so 0.305 + 0.264 = 0.569
        ({"temperature": 2.0, "top_p": 0.56}, [0, 1]),
        ({"temperature": 2.0, "top_p": 0.58}, [0, 1, 2]),
        ({"temperature": 0.5, "min_p": 0.5}, [0, 1]),  # (0.3 / 0.4) ** 2 = 0.5625, (0.2 / 0.4) ** 2 = 0.25
    ],
)
def test_filters_keep_the_hand_computed_set(params: dict[str, Any], expected: list[int]) -> None:
    assert kept(LOGITS, **params) == expected
    order = np.array([3, 1, 4, 0, 2])  # the order of the tokens must not matter
    assert kept(LOGITS[order], **params) == sorted(np.flatnonzero(np.isin(order, expected)).tolist())


def test_top_k_keeps_ties_and_handles_negative_and_impossible_logits() -> None:
    assert kept(np.array([-1.0, -2.0, -2.0, -3.0], np.float32), top_k=2) == [0, 1, 2]
    assert kept(np.array([-np.inf, 0.0, -1e30, 50.0], np.float32), top_p=0.999999) == [3]
    assert kept(np.array([-np.inf, 0.0, -0.0, -np.inf], np.float32), top_k=4) == [1, 2]


def test_values_too_small_for_float32_act_as_their_limit() -> None:
    """Values near 0 are accepted. They leave the likeliest token alone: not no token, and not the first of
    several that are infinite.
    """
    logits = np.array([1.0, 30.0, 50.0, -5.0], np.float32)
    for tiny in (1e-30, 1e-37, 1e-38, 1e-40, 1e-45):
        assert kept(logits, top_p=tiny) == [2]
        assert int(sample(jnp.asarray(logits)[None], rows(1, temperature=tiny), jnp.array(True))[0]) == 2
    assert kept(logits, top_p=1e-60) == [2]
    assert kept(logits, min_p=1e-60) == [0, 1, 2, 3]


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("params", "probs"),
    [
        ({}, [0.4, 0.3, 0.2, 0.06, 0.04]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0, 0]),
        ({"temperature": 0.5}, [x**2 / 0.2952 for x in (0.4, 0.3, 0.2, 0.06, 0.04)]),
    ],
)
@pytest.mark.parametrize("by", ["seed", "position"])
def test_the_draw_has_the_right_distribution(params: dict[str, Any], probs: list[float], by: str) -> None:
    """20,000 draws, over seeds or over positions with one seed. With 4 degrees of freedom, 28.5 is the
    critical value for p = 1e-5.
    """
    n = 20_000
    seeds = None if by == "seed" else np.full(n, 1234)
    positions = None if by == "seed" else np.arange(n)
    drawn = sample(
        jnp.broadcast_to(jnp.asarray(LOGITS), (n, 5)),
        rows(n, seeds=seeds, positions=positions, **params),
        jnp.array(True),
    )
    counts = np.bincount(np.asarray(drawn), minlength=5)
    expected = np.array(probs)
    assert counts[expected == 0].sum() == 0
    assert chi_square(counts[expected > 0], expected[expected > 0]) < 28.5


@pytest.mark.ci
def test_a_wide_vocabulary_is_drawn_evenly_over_its_chunks() -> None:
    """1,300 equally likely tokens span three chunks of the two-stage draw, the last of which is partly
    filled.
    """
    n, vocab = 13_000, 1300
    drawn = np.asarray(sample(jnp.zeros((n, vocab), jnp.float32), rows(n), jnp.array(True)))
    counts = np.bincount(drawn, minlength=vocab)
    assert len(counts) == vocab
    # 1,299 degrees of freedom: mean 1,299 and standard deviation 51. Six deviations are allowed either way.
    assert 993 < chi_square(counts, np.full(vocab, 1 / vocab)) < 1605


@pytest.mark.ci
def test_a_row_does_not_depend_on_its_place_or_its_neighbours() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((8, 700)).astype(np.float32)
    seeds, positions = np.arange(8), np.arange(8) * 3
    together = np.asarray(
        sample(jnp.asarray(logits), rows(8, seeds=seeds, positions=positions), jnp.array(True))
    )
    order = rng.permutation(8)
    shuffled = sample(
        jnp.asarray(logits[order]), rows(8, seeds=seeds[order], positions=positions[order]), jnp.array(True)
    )
    np.testing.assert_array_equal(np.asarray(shuffled), together[order])
    alone = [
        int(
            sample(
                jnp.asarray(logits[i : i + 1]),
                rows(1, seeds=seeds[i : i + 1], positions=positions[i : i + 1]),
                jnp.array(True),
            )[0]
        )
        for i in range(8)
    ]
    assert alone == together.tolist()


def test_both_words_of_the_seed_and_the_position_count() -> None:
    logits = jnp.zeros((8, 700), jnp.float32)
    base = rows(8, seeds=np.zeros(8), positions=np.eye(8)[2])
    seed = np.zeros((8, 2), np.uint32)
    seed[1, 0] = 1
    drawn = sample(logits, base._replace(seed=jnp.asarray(seed)), jnp.array(True))
    assert len(set(np.asarray(drawn[:3]).tolist())) == 3


def test_greedy_rows_take_the_argmax_in_a_mixed_batch_and_alone() -> None:
    logits = jnp.asarray(np.stack([LOGITS[::-1], LOGITS]))
    mixed = rows(2, top_k=1, temperature=np.array([0.0, 1.0], np.float32))
    assert np.asarray(sample(logits, mixed, jnp.array(True))).tolist() == [4, 0]
    assert np.asarray(sample(logits, rows(2, temperature=0.0), jnp.array(False))).tolist() == [4, 0]


def test_logprobs_are_those_of_the_raw_logits(token_logprobs: sampler.LogprobsOp) -> None:
    logits = jnp.asarray(LOGITS + np.float32(3.0))[None]
    sampled, ids, values = token_logprobs(logits, jnp.array([2]), 3, jnp.int32(1))
    np.testing.assert_allclose(np.asarray(sampled), [np.log(0.2)], rtol=1e-5)
    assert np.asarray(ids).tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(np.asarray(values)[0], np.log([0.4, 0.3, 0.2]), rtol=1e-5)


def test_the_likeliest_tokens_of_a_wide_row_are_in_order_with_ties_by_id(
    token_logprobs: sampler.LogprobsOp,
) -> None:
    rng = np.random.default_rng(3)
    logits = np.round(rng.standard_normal((4, 10_001)).astype(np.float32), 2)  # many ties
    tokens = np.array([0, 17, 10_000, 0], np.int32)
    logits[3] = np.nan  # padding may hold anything
    made = token_logprobs(jnp.asarray(logits), jnp.asarray(tokens), 20, jnp.int32(3))
    sampled, ids, values = (np.asarray(each)[:3] for each in made)
    logits = logits[:3]
    order = np.argsort(-logits, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(ids, order)
    norm = np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(values, np.take_along_axis(logits, order, 1) - norm, rtol=1e-5)
    np.testing.assert_allclose(sampled, logits[np.arange(3), tokens[:3]] - norm[:, 0], rtol=1e-5)


def test_logprobs_without_others_and_of_impossible_tokens(token_logprobs: sampler.LogprobsOp) -> None:
    """A token with a logit of -inf has no probability. Beside NaN or +inf, or where all logits are -inf, no
    probability is known.
    """
    logits = np.zeros((6, 8), np.float32)
    logits[1, 3], logits[2, 7], logits[3:5, 0], logits[5] = -np.inf, np.nan, np.inf, -np.inf
    tokens = jnp.array([5, 3, 1, 0, 1, 1])
    sampled, ids, values = token_logprobs(jnp.asarray(logits), tokens, 0, jnp.int32(6))
    assert ids.shape == values.shape == (6, 0)
    np.testing.assert_allclose(sampled, [-np.log(8), -np.inf, *[np.nan] * 4], rtol=1e-6)
    *_, values = token_logprobs(jnp.asarray(logits), tokens, 2, jnp.int32(6))
    assert np.isnan(np.asarray(values)).all(axis=1).tolist() == [False, False, True, True, True, True]


GREEDY: dict[str, Any] = {"temperature": 0.0}


def greedy(logits: list[float], **given: Any) -> int:
    arrays = {name: given.pop(name) for name in ("history", "bias", "mask") if name in given}
    made = {name: np.asarray(value)[None] for name, value in arrays.items()}
    return int(
        sample(jnp.asarray([logits], jnp.float32), rows(1, **GREEDY, **given), jnp.array(False), **made)[0]
    )


@pytest.mark.parametrize(
    ("penalties", "expected"),
    [
        # logits 3.0, 2.9, -1, -1.1; token 0 was generated twice, token 1 is in the prompt only, and 2 and 3
        # in neither
        ({}, 0),
        ({"presence_penalty": 0.05}, 0),  # 2.95
        ({"presence_penalty": 0.2}, 1),  # 2.8: counted once, and never for the prompt
        ({"frequency_penalty": 0.04}, 0),  # 3 - 2 * 0.04 = 2.92
        ({"frequency_penalty": 0.06}, 1),  # 3 - 2 * 0.06 = 2.88
        ({"presence_penalty": -2.0, "frequency_penalty": 0.06}, 0),
        ({"repetition_penalty": 4.0}, 0),  # 0.75 and 0.725: counts prompt and output
        ({"repetition_penalty": 4.0, "presence_penalty": 0.05}, 1),  # 0.7 and 0.725: repetition comes first
    ],
)
def test_penalties_as_computed_by_hand(penalties: dict[str, float], expected: int) -> None:
    history = [2, IN_PROMPT, 0, 0]
    assert greedy([3.0, 2.9, -1.0, -1.1], history=history, features=PENALTIES, **penalties) == expected
    # Without PENALTIES the history does not count.
    assert greedy([3.0, 2.9, -1.0, -1.1], history=history, **penalties) == 0


def test_a_repetition_penalty_multiplies_negative_logits() -> None:
    history = [IN_PROMPT + 3, 0, 0, 0]
    halved = {"history": history, "features": PENALTIES, "repetition_penalty": 2.0}
    assert greedy([-1.0, -1.9, -50.0, -50.0], **halved) == 1
    assert greedy([-1.0, -2.1, -50.0, -50.0], **halved) == 0


def test_bias_mask_and_bans_forbid_and_the_mask_has_the_last_word() -> None:
    logits = [5.0, 4.0, 3.0, 2.0]
    everything = [True] * 4
    assert greedy(logits, bias=[-2.0, 0.0, 0.0, 2.5], features=BIAS) == 3
    assert greedy(logits, bias=[-np.inf, 0.0, 0.0, 0.0], features=BIAS) == 1
    assert greedy(logits, bias=[-np.inf, 0.0, 0.0, 0.0]) == 0  # without BIAS the bias does not count
    assert greedy(logits, mask=[False, False, True, True], features=MASK) == 2
    assert greedy(logits, mask=[False, False, True, True]) == 0
    assert greedy(logits, banned=True, stop_ids=[[0, 1]]) == 2
    assert greedy(logits, stop_ids=[[0, 1]]) == 0
    # If nothing is left, only the mask counts, and without a mask nothing does.
    assert greedy(logits, bias=[-np.inf] * 4, features=BIAS, mask=everything) == 0
    forbidding = {"bias": [0.0, 0.0, -np.inf, -np.inf], "mask": [False, False, True, True]}
    assert greedy(logits, features=BIAS | MASK, **forbidding) == 2
    assert (
        greedy(logits, features=MASK, mask=[False, True, False, False], banned=True, stop_ids=[[1, 9]]) == 1
    )


def test_a_row_whose_logits_are_not_finite_has_no_token_and_spoils_no_other() -> None:
    logits = np.tile(LOGITS, (5, 1))
    logits[1, 3], logits[2], logits[3, 0] = np.nan, -np.inf, np.inf
    drawn = sample(jnp.asarray(logits), rows(5, top_k=1), jnp.array(True))
    assert np.asarray(drawn).tolist() == [0, NON_FINITE, NON_FINITE, NON_FINITE, 0]


def test_the_draw_after_penalties_and_bias_has_the_right_distribution() -> None:
    """The weights are 4, 3, 2, 0.6 and 0.4. Token 0 was generated once, which divides its weight by e; a bias
    doubles token 2 and forbids token 4.
    """
    n = 20_000
    history, bias = np.zeros((n, 5)), np.zeros((n, 5))
    history[:, 0], bias[:, 2], bias[:, 4] = 1, np.log(2.0), -np.inf
    drawn = sample(
        jnp.broadcast_to(jnp.asarray(LOGITS), (n, 5)),
        rows(n, features=PENALTIES | BIAS, frequency_penalty=1.0),
        jnp.array(True),
        history,
        bias,
    )
    weights = np.array([4 / np.e, 3, 4, 0.6])
    counts = np.bincount(np.asarray(drawn), minlength=5)
    assert counts[4] == 0
    assert chi_square(counts[:4], weights / weights.sum()) < 26.0  # 3 degrees of freedom, p = 1e-5
