"""The native sampler, compared with numpy in float64, with hand-computed values and by chi-square tests, on
every instruction set of this machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.ops import sampler
from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.sample import native_sample, sample
from penstock.runtime.ops.sampling_codes import (
    BANNED,
    BIAS,
    IN_PROMPT,
    LOGPROBS,
    MASK,
    NON_FINITE,
    PENALTIES,
    SAMPLING,
)
from penstock.runtime.ops.sampling_rows import SamplingRows
from tests.support.native.kernels import kernel_params, running
from tests.support.native.sample_reference import (
    NUM_TOP,
    Row,
    arrays,
    check_logprobs,
    check_token,
    random_row,
)

INF = float("inf")

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")

_sample = jax.jit(partial(sample, num_top=NUM_TOP))


@pytest.fixture(params=kernel_params("avx2", "avx512", "avx512_emulated"), autouse=True, scope="module")
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    jax.clear_caches()  # `_sample` was compiled for the kernels of one library
    with running(request.param):
        yield request.param
    jax.clear_caches()


def run(rows: list[Row], *, order: Any = None, padding: int = 0) -> list[np.ndarray]:
    """(tokens, logprobs, top_ids, top_logprobs) of these rows and `padding` more."""
    slots = np.arange(len(rows)) if order is None else np.asarray(order)
    positional, named = arrays(rows, order=slots, padding=padding)
    return [np.asarray(out) for out in _sample(*positional, **named)]


def tokens(*rows: Row) -> list[int]:
    out: list[int] = run(list(rows))[0].tolist()
    return out


def logits(*values: float) -> np.ndarray:
    return np.asarray(values, np.float32)


def check(rows: list[Row], got: list[np.ndarray]) -> int:
    """Check all rows. Returns the number of rows for which rounding could have changed nothing."""
    certain = 0
    for r, row in enumerate(rows):
        token = int(got[0][r])
        certain += check_token(row, token)
        check_logprobs(row, token, got[1][r], got[2][r], got[3][r])
    return certain


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), vocab=st.sampled_from([1, 5, 33, 513, 5000, 8193]))
def test_any_combination_of_features(seed: int, vocab: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [random_row(rng, vocab) for _ in range(6)]
    got = run(rows, order=rng.permutation(6), padding=2)
    check(rows, got)
    assert all(not out[6:].any() for out in got)


@pytest.mark.parametrize("seed", range(3))
def test_a_real_vocabulary(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [random_row(rng, 151_936) for _ in range(9)]
    check(rows, run(rows))


@pytest.mark.ci
@pytest.mark.parametrize("shift", [-2.0, 0.0, 2.0])
def test_filters_that_cut_among_very_many(shift: float) -> None:
    """The sampler guesses a threshold from the first tokens of each chunk. Here these are shifted against the
    others, so that the guess is wrong.
    """
    rng = np.random.default_rng(9)
    vocab = 50_000
    x = rng.standard_normal(vocab) + np.where(np.arange(vocab) % 512 < 16, shift, 0.0)
    cuts: list[dict[str, Any]] = [{"top_p": p} for p in (0.02, 0.3, 0.6, 0.9, 0.99)] + [
        {"top_k": k} for k in (2000, 9000, 40_000)
    ]
    cuts += [{"top_p": 0.7, "top_k": 20_000}, {"top_p": 0.7, "top_k": 20_000, "min_p": 0.2}]
    rows = [
        Row(x.astype(np.float32), temperature=t, uniforms=(u, u), **cut)
        for cut in cuts
        for t in (0.7, 1.0)
        for u in (0.0, 0.4, 0.99999)
    ]
    got = run(rows)
    check(rows, got)


def test_rounding_decides_little() -> None:
    rng = np.random.default_rng(0)
    rows = [replace(random_row(rng, 513), temperature=0.7) for _ in range(200)]
    assert check(rows, run(rows)) > 150  # so the tests above compare exact tokens in most cases


@pytest.mark.parametrize(
    ("x", "history", "options", "expected"),  # of the first token; the others have 1.5 and 0
    [
        (2.0, IN_PROMPT, {"repetition_penalty": 2.0}, 1.0),
        (2.0, 3, {"repetition_penalty": 2.0}, 1.0),
        (-2.0, 1, {"repetition_penalty": 2.0}, -4.0),
        (-2.0, 1, {"repetition_penalty": 0.5}, -1.0),
        (
            2.0,
            IN_PROMPT,
            {"presence_penalty": 2.0, "frequency_penalty": 2.0},
            2.0,
        ),  # neither penalty counts the prompt
        (2.0, 2, {"presence_penalty": 0.4}, 1.6),
        (2.0, 2, {"frequency_penalty": 0.2}, 1.6),
        (2.0, 2, {"frequency_penalty": -1.0}, 4.0),
        (
            2.0,
            3 | IN_PROMPT,
            {"repetition_penalty": 0.5, "frequency_penalty": 0.75, "presence_penalty": 0.25},
            1.5,
        ),
        (2.0, 0, {"repetition_penalty": 4.0, "frequency_penalty": 1.0, "presence_penalty": 1.0}, 2.0),
    ],
)
def test_penalties_by_hand(x: float, history: int, options: dict[str, Any], expected: float) -> None:
    """The first token's weight is found from the draw: because it is the first, its share is the largest
    uniform that still draws it.
    """
    seen = np.asarray([history, 0, 0], np.int32)
    share = np.exp(expected) / (np.exp(expected) + np.exp(1.5) + 1.0)
    row = Row(logits(x, 1.5, 0.0), history=seen, temperature=1.0, **options)
    below, above = (replace(row, uniforms=(0.5, share * by)) for by in (1 - 1e-5, 1 + 1e-5))
    assert tokens(below) == [0]
    assert tokens(above) == [1]
    assert tokens(replace(row, temperature=0.0)) == [0 if expected >= 1.5 else 1]


def test_forbidden_tokens_and_rows_in_which_everything_is_forbidden() -> None:
    x = logits(3.0, 2.0, 1.0, 0.0)
    nothing = logits(-INF, -INF, -INF, -INF)
    last_two = np.asarray([False, False, True, True])
    none = np.asarray([False] * 4)
    assert tokens(
        Row(x, bias=logits(-INF, 0, 0, 0)),
        Row(x, bias=logits(0, 0, 2.5, 0)),
        Row(x, stop_ids=(0, 1, 4), banned=True),
        Row(x, stop_ids=(0, 1), banned=False),
        Row(x, allowed=last_two),
        Row(x, allowed=last_two, stop_ids=(2,), banned=True),
        Row(x, bias=nothing),
        Row(x, bias=nothing, allowed=last_two),
        Row(x, bias=logits(9, 0, -INF, -INF), allowed=last_two),
        Row(x, allowed=last_two, stop_ids=(2, 3), banned=True, temperature=1.0, top_k=1),
        Row(logits(3.0, 2.0, -INF, -INF), allowed=last_two),
        Row(x, allowed=none),
    ) == [1, 2, 2, 0, 2, 3, 0, 2, 2, 2, 2, 0]


def test_rows_that_are_not_finite() -> None:
    vocab = 1000
    fine = np.zeros(vocab, np.float32)
    bad = [fine.copy() for _ in range(3)]
    bad[0][999], bad[1][3], bad[2][:] = np.nan, INF, -INF
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "top_p": 0.5},
        {"allowed": np.arange(vocab) == 5, "bias": np.full(vocab, -INF, np.float32), "temperature": 1.0},
    ]
    rows = [Row(x, num_logprobs=3, **o) for x in (*bad, fine) for o in options]
    got = run(rows)
    assert got[0][:9].tolist() == [NON_FINITE] * 9
    assert all(np.isfinite(out).all() for out in got)
    assert (got[0][9:] >= 0).all()


def test_extreme_numbers() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal(700).astype(np.float32)
    huge = x.copy()
    huge[[5, 650]] = 3e38, -3e38
    seen = np.full(700, IN_PROMPT + 5, np.int32)
    best = int(np.argmax(x))
    got = tokens(
        Row(x, temperature=1e-38, uniforms=(0.999, 0.999)),
        Row(huge, temperature=100.0),
        Row(huge, temperature=1.0, top_p=0.3, history=seen, repetition_penalty=1e-30),
        Row(x, temperature=1.0, top_p=1e-40),
        Row(x, temperature=1.0, top_k=1),
        Row(x, temperature=1.0, min_p=1.0),
        Row(np.zeros(700, np.float32), temperature=1.0, top_k=3, uniforms=(0.99, 0.99)),  # all ties are kept
    )
    assert got[:2] == [best, 5]
    assert 0 <= got[2] < 700
    assert got[3:6] == [best] * 3
    assert got[6] >= 690
    assert tokens(Row(logits(0.0, -0.0, -1.0), temperature=1.0, top_k=1, uniforms=(0.0, 0.9))) == [1]


# Probabilities of ten tokens in two chunks; all other tokens are impossible, or nearly so.
IDS = [0, 7, 100, 255, 256, 511, 512, 513, 700, 701]
SHARES = [0.3, 0.2, 0.1, 0.1, 0.08, 0.07, 0.06, 0.04, 0.03, 0.02]


@pytest.mark.parametrize(
    ("options", "left", "critical"),  # chi-square's 1 - 1e-4 quantile for len(left) - 1 degrees of freedom
    [
        ({}, 10, 33.72),
        ({"top_k": 5}, 5, 23.51),
        ({"top_k": 3}, 4, 21.11),  # the third and the fourth are tied
        ({"top_p": 0.75}, 5, 23.51),
        ({"min_p": 0.25}, 5, 23.51),
        ({"top_k": 5, "top_p": 0.8}, 4, 21.11),  # top_p of the 0.78 that top_k leaves
    ],
)
def test_frequencies_are_the_probabilities(options: dict[str, Any], left: int, critical: float) -> None:
    vocab, num_rows = 702, 20_000
    x = np.full(vocab, -200.0, np.float32)
    x[IDS] = np.log(SHARES)
    rng = np.random.default_rng(11)
    rows = [
        Row(x, temperature=1.0, uniforms=tuple(u), **options) for u in rng.random((num_rows, 2), np.float32)
    ]
    # Nothing of a slot is read, so they have one in common, whose memory need not be filled for each row.
    counts = np.bincount(run(rows, order=np.zeros(num_rows, int))[0], minlength=vocab)
    assert counts.sum() == counts[IDS[:left]].sum()
    expected = np.asarray(SHARES[:left]) / sum(SHARES[:left]) * num_rows
    assert float(((counts[IDS[:left]] - expected) ** 2 / expected).sum()) < critical


def test_a_row_depends_on_itself_alone() -> None:
    rng = np.random.default_rng(5)
    rows = [random_row(rng, 30_001) for _ in range(24)]
    together = run(rows)
    backwards = run(rows[::-1], order=rng.permutation(24), padding=3)
    for r, row in enumerate(rows):
        alone = run([row])  # a single row's blocks are spread over all threads
        for many, other, one in zip(together, backwards, alone, strict=True):
            assert many[r].tobytes() == one[0].tobytes() == other[23 - r].tobytes()


@pytest.mark.ci
def test_it_agrees_with_the_sampler_in_xla() -> None:
    """Rows with any features give the same results in both implementations of `SamplerOp`."""
    rng = np.random.default_rng(2)
    num_rows, num_top = 60, 5
    picked = [replace(random_row(rng, 5000), num_logprobs=num_top) for _ in range(num_rows)]
    positional, named = arrays(picked, order=rng.permutation(num_rows))
    logits, history, bias, mask, _ = map(jnp.asarray, positional)
    state = sampler.RowState(
        jnp.zeros(num_rows, jnp.int32),
        (jnp.zeros((num_rows, 1), jnp.int32),),
        history,
        jnp.nan_to_num(bias, neginf=-jnp.inf),
    )
    seeds = np.stack([np.zeros(num_rows), np.arange(num_rows)], axis=1).astype(np.uint32)
    rows = SamplingRows(
        feature_slots=jnp.asarray(named["slots"]),
        seed=jnp.asarray(seeds),
        positions=jnp.arange(num_rows, dtype=jnp.int32),
        **{name: jnp.asarray(value) for name, value in named.items() if name != "banned"},
        banned=jnp.asarray(named["banned"]) != 0,
    )
    flags = jnp.int32(PENALTIES | BIAS | MASK | SAMPLING | LOGPROBS | BANNED)
    one, other = (
        jax.tree.map(
            np.asarray,
            jax.jit(op, static_argnames="num_top")(logits, state, rows, flags, mask, num_top=num_top),
        )
        for op in (sampler.sample, native_sample)
    )
    same = one.tokens == other.tokens
    assert same.sum() >= num_rows - 1  # rounding may change one of them
    finite = one.tokens >= 0
    assert finite.any()
    np.testing.assert_allclose(
        one.logprobs[same & finite], other.logprobs[same & finite], rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(one.top_ids[finite], other.top_ids[finite])
    np.testing.assert_allclose(one.top_logprobs[finite], other.top_logprobs[finite], rtol=1e-5, atol=1e-5)


def test_shapes_that_do_not_fit_are_refused() -> None:
    positional, named = arrays([Row(np.zeros(64, np.float32))], order=np.arange(1))
    positional[3] = np.zeros((1, 1), np.int32)
    as_jax = {name: jnp.asarray(value) for name, value in named.items()}
    with pytest.raises(jax.errors.JaxRuntimeError, match="shapes do not fit"):
        jax.block_until_ready(_sample(*map(jnp.asarray, positional), **as_jax))
