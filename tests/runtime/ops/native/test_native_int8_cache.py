"""What the native attention writes to a cache of int8, by the definition, and rows that are not numbers.
test_native_attention.py tests the result, with that of other caches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.attention import native_paged_attention
from tests.support.native.attention import Batch, Case, Options, Shape, draw, runner, spreading
from tests.support.native.kernels import ATTENTION_KERNELS, kernel_params, running

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")

SHAPE = Shape(heads=4, kv_heads=2, dim=48, page=16, tokens=48, rows=2, width=4, pages=12, is_int8=True)


@pytest.fixture(params=kernel_params(*ATTENTION_KERNELS))
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param):
        yield request.param


def attend(batch: Batch, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Return the output in float32, and the rows of the cache's token `t` at [t, key or value, kv head]."""
    out, cache = runner(native_paged_attention, shape, Options())(batch)
    rows = [cache[batch.table[0, t // shape.page], :, :, t % shape.page] for t in range(batch.q_lens[0])]
    return out.astype(np.float32), np.stack(rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_are_quantized_as_their_definition_says(kernel: str, dtype: str) -> None:
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    batch = draw([Case(0, 40)], shape, Options(), 1)
    sizes = np.float32(10.0) ** np.arange(-20, 20)[:, None, None]
    assert batch.v is not None
    k, v = ((x[:40].astype(np.float32) * sizes).astype(jnp.dtype(dtype)) for x in (batch.k, batch.v))
    k[3], v[4, 1], v[5] = 0.0, 0.0, 1e-33
    padding = np.zeros((8, *k.shape[1:]), k.dtype)
    batch = dataclasses.replace(batch, k=np.concatenate([k, padding]), v=np.concatenate([v, padding]))
    _, rows = attend(batch, shape)
    spread = k.astype(np.float64) @ spreading(shape.dim).T
    x = np.stack([spread, v.astype(np.float64)], axis=1)
    numbers = rows[..., :-4].astype(np.float64)
    scale = np.ascontiguousarray(rows[..., -4:]).view(np.float32).astype(np.float64)
    peak = np.abs(x).max(axis=-1)
    zero = peak < 1e-30
    assert zero.sum() == 5
    np.testing.assert_array_equal(scale[..., 0] == 0, zero)
    np.testing.assert_array_equal(np.abs(numbers).max(axis=-1), np.where(zero, 0, 127))
    # A number is at most half a step away, but for three roundings to float32, and seven where a key is
    # spread, of sums that are at most six times as large.
    assert (np.abs(numbers * scale - x) <= scale * (0.5 + 127 * (3 + 7 * 6) * 2.0**-24) + 1e-32).all()


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("plane", ["k", "v"])
def test_what_attends_to_a_row_that_is_not_finite_is_nan(
    kernel: str, dtype: str, bad: float, plane: str
) -> None:
    """One key or value of the first of two requests; the other request's bits stay."""
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    batch = draw([Case(0, 20), Case(20, 20)], shape, Options(), 2)
    spoilt = np.array(getattr(batch, plane))
    spoilt[7, 1, 3] = bad
    usual, _ = attend(batch, shape)
    out, _ = attend(dataclasses.replace(batch, **{plane: spoilt}), shape)
    heads = slice(shape.heads // 2, None)  # those of the head of keys and values that was spoilt
    assert np.isnan(out[7:20, heads]).all()
    np.testing.assert_array_equal(out[:20, : heads.start], usual[:20, : heads.start])
    np.testing.assert_array_equal(out[20:], usual[20:])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_query_that_is_not_finite_gives_nan(kernel: str, bad: float) -> None:
    """With these keys infinity makes scores of infinity, not of -infinity, which attends to nothing."""
    shape = dataclasses.replace(SHAPE, dtype="bfloat16")
    batch = draw([Case(0, 20), Case(20, 20)], shape, Options(), 2)
    batch.k[..., 3] = 1.0
    spoilt = np.array(batch.q)
    spoilt[7, 1, 3] = bad
    out, _ = attend(dataclasses.replace(batch, q=spoilt), shape)
    expected, _ = attend(batch, shape)
    expected[7, 1] = np.nan
    np.testing.assert_array_equal(out, expected)


def test_the_largest_sums_of_products_do_not_overflow(kernel: str) -> None:
    """All numbers of keys and queries have the same size, so a score is 576 times the largest product."""
    shape = Shape(4, 1, 576, 16, 48, 2, 4, 12, dtype="bfloat16", value_dim=512, is_int8=True)
    batch = draw([Case(0, 40)], shape, Options(), 3)
    signs = np.where(np.random.default_rng(4).random(40) < 0.5, -1.0, 1.0)
    k, q = np.zeros_like(batch.k), np.full_like(batch.q, 3 * 576**-0.5)
    k[:40] = signs[:, None, None]
    out, _ = attend(dataclasses.replace(batch, k=k, q=q), shape)
    scores = signs * 576 * float(q[0, 0, 0]) * 576**-0.5
    weights = np.exp(scores)
    expected = np.cumsum(weights * signs) / np.cumsum(weights)
    np.testing.assert_allclose(out[:40], np.broadcast_to(expected[:, None, None], (40, 4, 512)), atol=0.01)


def test_the_largest_sums_of_values_do_not_overflow(kernel: str) -> None:
    """All keys are equal, so a part has 256 equal probabilities; values have the largest size."""
    shape = Shape(4, 1, 64, 16, 300, 1, 19, 19, dtype="bfloat16", is_int8=True)
    batch = draw([Case(0, 300)], shape, Options(), 3)
    out, _ = attend(dataclasses.replace(batch, k=np.ones_like(batch.k), v=np.full_like(batch.v, -2.0)), shape)
    np.testing.assert_allclose(out, np.full_like(out, -2.0), rtol=0.01)
