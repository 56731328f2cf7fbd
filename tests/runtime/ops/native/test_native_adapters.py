"""What adapters add to native linear layers, compared with numpy in float64, on every instruction set of this
machine and on emulated ones. A row's bits must depend on the row and its adapter alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from penstock.runtime.ops.adapters import AdapterPlace, AdapterRows
from penstock.runtime.ops.adapters import delta as xla_delta
from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.adapters import delta
from penstock.runtime.ops.native.linear import More, Packed, linear, pack, quantize
from tests.support.native.codes import code_leaf
from tests.support.native.kernels import kernel_params, running

BF16 = ml_dtypes.bfloat16
PLACE = AdapterPlace(3, 64, (48, 16, 560))
"""It does not begin where the pool does; its parts are whole and broken lines, and more than a unit of work.
"""
SLOTS = np.array([2, 0, 1, 2, 2, 3, 2, 2, 0, 1, 2, 3], np.int32)
"""More rows of one slot than are computed together, and rows without an adapter. The last is padding."""

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")


@pytest.fixture(params=kernel_params(), autouse=True)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param):
        yield request.param


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(BF16)


def rows_of(rank: int, slots: np.ndarray) -> AdapterRows:
    pool = draw(rank, 4, (PLACE.begin + PLACE.size) * rank)
    return AdapterRows(jnp.asarray(pool), jnp.asarray(slots), rank)


def expected(x: np.ndarray, rows: AdapterRows) -> np.ndarray:
    """Numpy's sums, from the layout that `ops.adapters` describes."""
    pool = np.asarray(rows.pool).astype(np.float64)
    out = np.zeros((len(x), sum(PLACE.parts)))
    for row, slot in enumerate(np.asarray(rows.slots)):
        at, column = PLACE.begin * rows.rank, 0
        smalls = []
        for _ in PLACE.parts:
            a = pool[slot, at : at + PLACE.in_size * rows.rank].reshape(PLACE.in_size, rows.rank)
            smalls.append(x[row].astype(np.float64) @ a)
            at += a.size
        for small, size in zip(smalls, PLACE.parts, strict=True):
            b = pool[slot, at : at + rows.rank * size].reshape(rows.rank, size)
            out[row, column : column + size] = small @ b
            at, column = at + b.size, column + size
    return out


def run(x: np.ndarray, rows: AdapterRows, num_rows: int) -> np.ndarray:
    made = jax.jit(lambda x, n: delta(x, rows, PLACE, num_rows=n))(jnp.asarray(x), jnp.int32(num_rows))
    return np.asarray(made)


@pytest.mark.parametrize("rank", [16, 64])
def test_products_are_those_of_numpy(rank: int) -> None:
    x, rows = draw(1, len(SLOTS), PLACE.in_size), rows_of(rank, SLOTS)
    wanted, got = expected(x, rows), run(x, rows, len(SLOTS) - 1)
    has = np.flatnonzero(SLOTS[:-1])
    assert np.abs(got[has] - wanted[has]).max() <= 1e-5 * wanted.std()
    by_xla = np.asarray(xla_delta(jnp.asarray(x), rows, PLACE))
    assert np.abs(by_xla[has] - wanted[has]).max() <= 1e-5 * wanted.std()


def test_a_row_has_the_same_bits_in_any_company_and_in_any_slot() -> None:
    x, rows = draw(1, len(SLOTS), PLACE.in_size), rows_of(16, SLOTS)
    together = run(x, rows, len(SLOTS))
    moved = np.asarray(rows.pool)[[0, 3, 1, 2]]
    for row in np.flatnonzero(SLOTS):
        slot = np.array([SLOTS[row] % 3 + 1], np.int32)
        alone = run(x[row : row + 1], AdapterRows(jnp.asarray(moved), jnp.asarray(slot), 16), 1)
        np.testing.assert_array_equal(alone[0], together[row])


def test_many_rows_have_the_bits_of_few() -> None:
    """With many groups of rows a thread computes a group to its end."""
    slots = np.arange(600, dtype=np.int32) % 4
    x, rows = draw(2, len(slots), PLACE.in_size), rows_of(16, slots)
    together, has = run(x, rows, len(slots)), np.flatnonzero(slots)
    wanted = expected(x, rows)
    assert np.abs(together[has] - wanted[has]).max() <= 1e-5 * wanted.std()
    few = run(x[:12], rows_of(16, slots[:12]), 12)
    has = np.flatnonzero(slots[:12])
    np.testing.assert_array_equal(few[has], together[has])


KINDS = ("bf16", "int8", "int4")


def packed(kind: str) -> Packed:
    weight = draw(5, 64, 64)
    if kind == "int4":
        return Packed(jnp.asarray(code_leaf(weight)))
    if kind == "int8":
        values, scale = quantize(weight)
        return Packed(jnp.asarray(pack(values)), jnp.asarray(scale))
    return Packed(jnp.asarray(pack(weight)))


EPILOGUES: dict[str, dict[str, Any]] = {
    "plain": {"out_dtype": np.float32},
    "residual": {"residual": draw(6, 40, 64), "scale": 0.5},
    "gated": {"gate": "silu"},
    "up": {"gate": "sigmoid", "up": draw(7, 40, 64)},
}


CASES = [
    (kind, epilogue, (3, 40)[(i + j) % 2])
    for i, kind in enumerate(KINDS)
    for j, epilogue in enumerate(EPILOGUES)
]
"""Each kind of weights and each epilogue, with few rows or with many."""


@pytest.mark.parametrize(("kind", "epilogue", "num_rows"), CASES)
def test_what_is_added_joins_the_product_of_its_row_alone(kind: str, epilogue: str, num_rows: int) -> None:
    """It is as if the layer had a bias of its own for the row, and every other row is as if it had none."""
    x, options, weight = jnp.asarray(draw(8, 40, 64)), EPILOGUES[epilogue], packed(kind)
    slots = (np.arange(40) % 3 == 1).astype(np.int32)
    values = np.where(slots[:, None] > 0, draw(9, 1, 64).astype(np.float32), np.nan)
    plain = linear(x, (weight,), num_rows=jnp.int32(num_rows), **options)
    biased = weight._replace(bias=jnp.asarray(draw(9, 1, 64)[0]))
    with_bias = linear(x, (biased,), num_rows=jnp.int32(num_rows), **options)
    more = More(jnp.asarray(values, jnp.float32), jnp.asarray(slots))
    got = linear(x, (weight,), num_rows=jnp.int32(num_rows), more=more, **options)
    wanted = np.where(slots[:, None] > 0, np.asarray(with_bias), np.asarray(plain))[:num_rows]
    np.testing.assert_array_equal(np.asarray(got)[:num_rows].view(np.uint8), wanted.view(np.uint8))


def test_sizes_that_the_kernel_cannot_have_are_refused() -> None:
    x = jnp.asarray(draw(1, 1, 64))
    rows = AdapterRows(jnp.zeros((2, 8 * 100), jnp.bfloat16), jnp.ones((1,), jnp.int32), 8)
    with pytest.raises(ValueError, match="multiples of 16"):
        delta(x, rows, AdapterPlace(0, 64, (16,)), num_rows=jnp.int32(1))
    rows = AdapterRows(jnp.zeros((2, 16 * 40), jnp.bfloat16), jnp.ones((1,), jnp.int32), 16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="fit each other"):
        jax.block_until_ready(delta(x, rows, AdapterPlace(0, 64, (16,)), num_rows=jnp.int32(1)))
