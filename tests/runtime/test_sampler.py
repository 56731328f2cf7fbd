"""The sampler against hand-computed filters and, for the draw, chi-square tests on known distributions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime import sampler
from penstock.runtime.sampler import SamplingRows

filter_logits = jax.jit(sampler.filter_logits)  # op by op it would compile every op on its own
sample = jax.jit(sampler.sample)
token_logprobs = jax.jit(sampler.token_logprobs, static_argnums=2)

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04], np.float32))


def rows(
    n: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: np.ndarray | None = None,
    positions: np.ndarray | None = None,
) -> SamplingRows:
    seed = np.zeros((n, 2), np.uint32)
    seed[:, 1] = np.arange(n) if seeds is None else seeds
    return SamplingRows(
        jnp.full(n, temperature, jnp.float32),
        jnp.full(n, top_k, jnp.int32),
        jnp.full(n, top_p, jnp.float32),
        jnp.full(n, min_p, jnp.float32),
        jnp.asarray(seed),
        jnp.zeros(n, jnp.int32) if positions is None else jnp.asarray(positions, jnp.int32),
    )


def kept(logits: np.ndarray, **params: float) -> list[int]:
    out = filter_logits(jnp.asarray(logits)[None], rows(1, **params))  # type: ignore[arg-type]
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
def test_filters_keep_the_hand_computed_set(params: dict[str, float], expected: list[int]) -> None:
    assert kept(LOGITS, **params) == expected
    order = np.array([3, 1, 4, 0, 2])  # the same, wherever the tokens stand
    assert kept(LOGITS[order], **params) == sorted(np.flatnonzero(np.isin(order, expected)).tolist())


def test_top_k_keeps_ties_and_handles_negative_and_impossible_logits() -> None:
    assert kept(np.array([-1.0, -2.0, -2.0, -3.0], np.float32), top_k=2) == [0, 1, 2]
    assert kept(np.array([-np.inf, 0.0, -1e30, 50.0], np.float32), top_p=0.999999) == [3]
    assert kept(np.array([-np.inf, 0.0, -0.0, -np.inf], np.float32), top_k=4) == [1, 2]


def test_values_too_small_for_float32_act_as_their_limit() -> None:
    """Accepted values near 0: the likeliest token alone, not none and not the first of several infinities."""
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
def test_the_draw_has_the_right_distribution(params: dict[str, float], probs: list[float], by: str) -> None:
    """20,000 draws over seeds, or over positions of one seed; the critical value is that of p = 1e-5 (4
    degrees: 28.5).
    """
    n = 20_000
    seeds = None if by == "seed" else np.full(n, 1234)
    positions = None if by == "seed" else np.arange(n)
    drawn = sample(
        jnp.broadcast_to(jnp.asarray(LOGITS), (n, 5)),
        rows(n, seeds=seeds, positions=positions, **params),  # type: ignore[arg-type]
        jnp.array(True),
    )
    counts = np.bincount(np.asarray(drawn), minlength=5)
    expected = np.array(probs)
    assert counts[expected == 0].sum() == 0
    assert chi_square(counts[expected > 0], expected[expected > 0]) < 28.5


def test_a_wide_vocabulary_is_drawn_evenly_over_its_chunks() -> None:
    """1,300 equally likely tokens span three chunks of the two-stage draw, the last one partly filled."""
    n, vocab = 26_000, 1300
    drawn = np.asarray(sample(jnp.zeros((n, vocab), jnp.float32), rows(n), jnp.array(True)))
    counts = np.bincount(drawn, minlength=vocab)
    assert len(counts) == vocab
    # 1,299 degrees of freedom: mean 1,299, standard deviation 51; six of them either way
    assert 993 < chi_square(counts, np.full(vocab, 1 / vocab)) < 1605


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
    logits = jnp.zeros((3, 512), jnp.float32)
    base = rows(3, seeds=np.zeros(3))
    seed = np.zeros((3, 2), np.uint32)
    seed[1, 0] = 1
    drawn = sample(
        logits, base._replace(seed=jnp.asarray(seed), positions=jnp.array([0, 0, 1])), jnp.array(True)
    )
    assert len(set(np.asarray(drawn).tolist())) == 3


def test_greedy_rows_take_the_argmax_in_a_mixed_batch_and_alone() -> None:
    logits = jnp.asarray(np.stack([LOGITS[::-1], LOGITS]))
    mixed = rows(2, top_k=1)._replace(temperature=jnp.array([0.0, 1.0], jnp.float32))
    assert np.asarray(sample(logits, mixed, jnp.array(True))).tolist() == [4, 0]
    assert np.asarray(sample(logits, rows(2, temperature=0.0), jnp.array(False))).tolist() == [4, 0]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    sampled, ids, values = token_logprobs(jnp.asarray(LOGITS + np.float32(3.0))[None], jnp.array([2]), 3)
    np.testing.assert_allclose(np.asarray(sampled), [np.log(0.2)], rtol=1e-5)
    assert np.asarray(ids).tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(np.asarray(values)[0], np.log([0.4, 0.3, 0.2]), rtol=1e-5)
