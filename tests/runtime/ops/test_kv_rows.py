"""Where KV rows are written, and rows in int8: numbers by hand, float64's, and what no row may lose."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.runtime.ops.kv_rows import (
    by_rows,
    by_tokens,
    dequantize_rows,
    kv_layer_shape,
    quantize_rows,
    spread,
    write_kv,
)
from tests.support.native.attention import dequantized, spreading

pytestmark = pytest.mark.ci

DIM = 8


def scale_of(rows: np.ndarray) -> np.ndarray:
    """Return the scales of rows int8 [..., D + 4]."""
    return np.ascontiguousarray(rows[..., -4:]).view(np.float32)[..., 0]


def test_hand_computed_rows() -> None:
    """The largest magnitude is 127; what lies halfway between two numbers goes to the even one."""
    x = jnp.array([[254.0, -254.0, 1.0, 3.0, 5.0, 0.9, -3.1, 0.0], [0.0] * 8, [-12.7, 0.1] + [0.0] * 6])
    rows = np.asarray(quantize_rows(x))
    assert rows.dtype == np.int8
    assert rows[0, :DIM].tolist() == [127, -127, 0, 2, 2, 0, -2, 0]
    assert rows[1].tolist() == [0] * 12
    assert rows[2, :DIM].tolist() == [-127, 1] + [0] * 6
    np.testing.assert_allclose(scale_of(rows), [2.0, 0.0, 0.1], rtol=1e-6)
    back = np.asarray(dequantize_rows(jnp.asarray(rows)))
    np.testing.assert_allclose(back[0], [254.0, -254.0, 0.0, 4.0, 4.0, 0.0, -4.0, 0.0], rtol=1e-6)


floats = st.sampled_from([2.0**20, 2.0**-10]).flatmap(
    lambda most: st.floats(-most, most, width=32, allow_subnormal=False)
)


@settings(deadline=None)
@given(arrays.arrays(np.float32, (3, DIM), elements=floats))
def test_no_value_is_farther_off_than_half_a_scale(x: np.ndarray) -> None:
    """The little more is float32's own rounding, of numbers up to 127. What is read back is the number times
    the scale, as float64 says.
    """
    rows = np.asarray(quantize_rows(jnp.asarray(x)))
    scale = scale_of(rows).astype(np.float64)
    back = dequantized(rows)
    peaks = np.abs(x).max(axis=1).astype(np.float64)
    assert (np.abs(back - x) <= np.maximum(scale[:, None] * (0.5 + 1e-4), 1e-30)).all()
    np.testing.assert_allclose(scale, np.where(peaks < 1e-30, 0, peaks / 127), rtol=1e-6)
    assert (np.abs(rows[:, :DIM]).max(axis=1) == np.where(peaks < 1e-30, 0, 127)).all()
    np.testing.assert_allclose(np.asarray(dequantize_rows(jnp.asarray(rows))), back, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_read_as_nan(bad: float) -> None:
    """What attends to it must show that something is wrong. Rows beside it are as they would be alone."""
    x = np.arange(2 * DIM, dtype=np.float32).reshape(2, DIM) - 3
    alone = np.asarray(quantize_rows(jnp.asarray(x)))
    x[0, 5] = bad
    rows = np.asarray(quantize_rows(jnp.asarray(x)))
    assert not np.isfinite(scale_of(rows)[0])
    assert np.isnan(np.asarray(dequantize_rows(jnp.asarray(rows)))[0]).all()
    np.testing.assert_array_equal(rows[1], alone[1])


@pytest.mark.parametrize("peak", [1e-38, 9e-31, 1.1e-30, 1e30, 3.4e38])
def test_the_ends_of_the_range_stay_finite(peak: float) -> None:
    """Tiny rows become zeros, because 127 / peak must be a float32."""
    rows = quantize_rows(jnp.full((DIM,), peak, jnp.float32))
    back = np.asarray(dequantize_rows(rows))
    np.testing.assert_allclose(back, 0.0 if peak < 1e-30 else peak, rtol=1e-6)


def test_hand_computed_channels_that_are_spread() -> None:
    """Three channels are blocks of two and one; of four, the last changes its sign."""
    root = 2**0.5
    np.testing.assert_allclose(
        jax.jit(spread)(jnp.array([5.0, 1.0, 7.0])), [6 / root, 4 / root, 7.0], rtol=1e-6
    )
    np.testing.assert_array_equal(jax.jit(spread)(jnp.array([1.0, 2.0, 3.0, 4.0])), [1.0, 3.0, 2.0, -4.0])


@pytest.mark.parametrize("dim", [1, 8, 48, 80, 256])
def test_spread_channels_are_products_with_an_orthogonal_matrix(dim: int) -> None:
    """So the product of a key and a query that are both spread is that of themselves."""
    x = np.random.default_rng(dim).standard_normal((3, 2, dim)).astype(np.float32)
    np.testing.assert_allclose(spreading(dim) @ spreading(dim).T, np.eye(dim), atol=1e-14)
    np.testing.assert_allclose(jax.jit(spread)(jnp.asarray(x)), x @ spreading(dim).T, atol=2e-6)


def test_channels_of_unlike_sizes_cost_the_products_less() -> None:
    """Two channels are a hundred times as large as the others. Their own products are left out, because they
    would hide what is rounded off the others'.
    """
    rng = np.random.default_rng(0)
    key, query = rng.standard_normal((2, 64, 128))
    key[:, [5, 70]] *= 100
    query[:, [5, 70]] = 0
    exact = (key * query).sum(axis=1)
    both = spreading(128)
    plain = dequantized(np.asarray(quantize_rows(jnp.asarray(key, jnp.float32))))
    kept = dequantized(np.asarray(quantize_rows(jax.jit(spread)(jnp.asarray(key, jnp.float32)))))
    lost = [np.abs((rows * query).sum(axis=1) - exact).mean() for rows in (plain, kept @ both)]
    assert lost[1] < 0.3 * lost[0]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_keys_and_values_are_written_to_their_slots(dtype: jnp.dtype) -> None:
    """Each is quantized by itself, keys after they are spread, and slots past the end are dropped."""
    kv = jnp.zeros(kv_layer_shape(3, 4, 2, DIM, is_int8=True), jnp.int8)
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((3, 2, DIM)), dtype) for _ in range(2))
    after = np.asarray(jax.jit(write_kv)(kv, k, v, jnp.array([6, 11, 12])))
    expected = np.zeros((*kv.shape[:4], DIM))
    for token, (page, offset) in enumerate([(1, 2), (2, 3)]):
        for which, values in enumerate((k, v)):
            wide = np.asarray(values[token], np.float64)
            wide = wide if which else wide @ spreading(DIM).T
            scale = np.abs(wide).max(axis=1, keepdims=True) / 127
            expected[page, which, :, offset] = np.rint(wide / scale) * scale
    np.testing.assert_allclose(dequantized(after), expected, rtol=1e-6)


@pytest.mark.parametrize("write", [by_tokens, by_rows])
@pytest.mark.parametrize("planes_heads", [(2, 3), (2, 1), (1, 1)])
def test_each_row_lies_at_its_slot_and_no_other_changes(
    write: Callable[..., jax.Array], planes_heads: tuple[int, int]
) -> None:
    """Both forms, of which TPUs have the second. Slots that follow the last page by little and by much are
    dropped.
    """
    planes, heads = planes_heads
    rng = np.random.default_rng(1)
    kv = rng.standard_normal((3, planes, heads, 4, DIM)).astype(np.float32)
    new = rng.standard_normal((6, planes, heads, DIM)).astype(np.float32)
    slots = [7, 0, 12, 4, 4 * 3 * 50, 11]
    after = np.asarray(jax.jit(write)(jnp.asarray(kv), jnp.asarray(new), jnp.array(slots, jnp.int32)))
    expected = kv.copy()
    for token, (page, offset) in {0: (1, 3), 1: (0, 0), 3: (1, 0), 5: (2, 3)}.items():
        for plane in range(planes):
            for head in range(heads):
                expected[page, plane, head, offset] = new[token, plane, head]
    np.testing.assert_array_equal(after, expected)
