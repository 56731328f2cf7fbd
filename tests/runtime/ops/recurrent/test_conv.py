"""The causal convolution on ragged batches, compared with a loop over each row's own inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.ops.recurrent.conv import (
    causal_conv,
    entries_by_inputs,
    entries_of,
    put_by_entries,
    put_by_inputs,
)
from tests.support.recurrent.rows import Row, Step, rows_of

CHANNELS, TOKENS, ROWS, ENTRIES = 5, 40, 4, 19


@functools.cache
def compiled(activation: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(causal_conv, activation=activation))


def expected(
    step: Step, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, state: np.ndarray, silu: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the same in float64, row by row and tap by tap."""
    kept = len(weight) - 1
    y, state = np.zeros(x.shape), state.astype(np.float64)
    before = [np.zeros((kept, CHANNELS)) if read is None else state[read] for read in step.reads]
    for row, span in enumerate(step.spans):
        inputs = np.concatenate([before[row], x[span]])
        for at in range(span.stop - span.start):
            y[span.start + at] = sum(weight[tap] * inputs[at + tap] for tap in range(kept + 1))
        state[step.writes[row]] = inputs[len(inputs) - kept :]
        if cut := step.rows[row].cut:
            state[step.keeps[row]] = inputs[cut : cut + kept]
    if bias is not None:
        y += bias
    return y / (1 + np.exp(-y)) if silu else y, state


def draw(step: Step, taps: int, *, biased: bool) -> tuple[Any, ...]:
    rng = np.random.default_rng(step.seed)
    bias = rng.standard_normal(CHANNELS).astype(np.float32) if biased else None
    shapes = ((step.tokens, CHANNELS), (taps, CHANNELS), (step.entries, taps - 1, CHANNELS))
    x, weight, state = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return x, weight, bias, state


KINDS = [(2, True, None), (3, False, "silu"), (4, True, "silu"), (4, False, None)]
"""Taps, whether there is a bias, and the activation; each is a program."""


@settings(max_examples=40, deadline=None)
@given(st.lists(rows_of(9), min_size=1, max_size=ROWS), st.sampled_from(KINDS), st.integers(0, 2**31))
def test_every_row_goes_on_from_its_own_inputs(
    rows: list[Row], kind: tuple[int, bool, Any], seed: int
) -> None:
    taps, biased, activation = kind
    step = Step(tuple(rows), TOKENS, ROWS, ENTRIES, decode=False, seed=seed)
    x, weight, bias, state = draw(step, taps, biased=biased)
    y, after = compiled(activation)(x, weight, bias, state, step.meta)
    wanted, wanted_state = expected(step, x, weight, bias, state, activation == "silu")
    real = step.spans[-1].stop
    np.testing.assert_allclose(np.asarray(y)[:real], wanted[:real], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(after), wanted_state.astype(np.float32))


@settings(max_examples=20, deadline=None)
@given(st.lists(rows_of(1), min_size=1, max_size=ROWS), st.integers(0, 2**31))
def test_decode_steps(rows: list[Row], seed: int) -> None:
    """One token for each row, and fewer rows than the program has."""
    step = Step(tuple(rows), ROWS, ROWS, ENTRIES, decode=True, seed=seed)
    x, weight, bias, state = draw(step, 3, biased=False)
    y, after = compiled(None)(x, weight, bias, state, step.meta)
    wanted, wanted_state = expected(step, x, weight, bias, state, False)
    np.testing.assert_allclose(np.asarray(y)[: len(rows)], wanted[: len(rows)], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(after), wanted_state.astype(np.float32))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_nan_stays_in_its_row(at: int) -> None:
    step = Step(
        (Row(3), Row(1, cut=1), Row(6, fresh=True, cut=4)), TOKENS, ROWS, ENTRIES, decode=False, seed=1
    )
    x, weight, _, state = draw(step, 4, biased=False)
    clean, after = map(np.asarray, compiled("silu")(x, weight, None, state, step.meta))
    x[step.spans[at]] = np.nan
    x[step.spans[-1].stop :] = np.nan  # padding
    tried, tried_after = map(np.asarray, compiled("silu")(x, weight, None, state, step.meta))
    for row, span in enumerate(step.spans):
        assert np.isnan(tried[span]).any() == (row == at)
        if row != at:
            np.testing.assert_array_equal(tried[span], clean[span])
            np.testing.assert_array_equal(tried_after[step.writes[row]], after[step.writes[row]])
            np.testing.assert_array_equal(tried_after[step.keeps[row]], after[step.keeps[row]])


def test_bfloat16_is_rounded_once() -> None:
    """Sums are float32, also of inputs in bfloat16, whose state keeps them exactly."""
    step = Step((Row(5), Row(2, fresh=True)), TOKENS, ROWS, ENTRIES, decode=False, seed=2)
    x, weight, _, state = draw(step, 3, biased=False)
    rounded = jnp.asarray(x, jnp.bfloat16)
    y, after = compiled(None)(rounded, jnp.asarray(weight, jnp.bfloat16), None, state, step.meta)
    assert (y.dtype, after.dtype) == (jnp.bfloat16, jnp.float32)
    wide = np.asarray(rounded, np.float32), np.asarray(jnp.asarray(weight, jnp.bfloat16), np.float32)
    wanted, wanted_state = expected(step, *wide, None, state, False)
    np.testing.assert_allclose(np.asarray(y, np.float32)[:7], wanted[:7], rtol=2**-8, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(after), wanted_state.astype(np.float32))


@pytest.mark.parametrize("put", [put_by_entries, put_by_inputs])
def test_entries_are_replaced_and_no_other_changes(put: Callable[..., jax.Array]) -> None:
    """Both forms, of which TPUs have the second; entries past the end are dropped."""
    rng = np.random.default_rng(2)
    state = rng.standard_normal((ENTRIES, 3, CHANNELS)).astype(np.float32)
    new = rng.standard_normal((4, 3, CHANNELS)).astype(np.float32)
    after = jax.jit(put)(jnp.asarray(state), jnp.array([4, ENTRIES, 0, ENTRIES + 7]), jnp.asarray(new))
    expected = state.copy()
    expected[4], expected[0] = new[0], new[2]
    np.testing.assert_array_equal(np.asarray(after), expected)


@pytest.mark.parametrize("read", [entries_of, entries_by_inputs])
def test_entries_past_the_end_are_read_as_zeros(read: Callable[..., jax.Array]) -> None:
    state = np.random.default_rng(3).standard_normal((ENTRIES, 3, CHANNELS)).astype(np.float32)
    found = jax.jit(read)(jnp.asarray(state), jnp.array([4, ENTRIES, 0, ENTRIES + 7]))
    zeros = np.zeros((3, CHANNELS), np.float32)
    np.testing.assert_array_equal(np.asarray(found), [state[4], zeros, state[0], zeros])
