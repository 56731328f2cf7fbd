"""What adapters add to native linear layers, compared with numpy in float64, on every instruction set of this
machine and on emulated ones. A row's bits must depend on the row and its adapter alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from penstock.runtime.ops.adapters import AdapterPlace, AdapterRows, LinearAdapters
from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.linear import Packed, linear, pack, quantize
from tests.support.native.codes import code_leaf
from tests.support.native.kernels import kernel_params, running

BF16 = ml_dtypes.bfloat16
PLACE = AdapterPlace(3, 64, (48, 16, 560), packed=True)
"""It does not begin where the pool does; its parts have even and odd numbers of blocks."""
SLOTS = np.array([2, 0, 1, 2, *[3] * 11, 2, 2, 0, 1, 2, 3], np.int32)
"""Neighbours of one slot, more than are computed together, and rows without an adapter. The last is padding.
"""

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")


@pytest.fixture(params=kernel_params(), autouse=True)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param):
        yield request.param


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(BF16)


def adapters_of(rank: int, slots: np.ndarray, place: AdapterPlace = PLACE) -> LinearAdapters:
    pool = draw(rank, 4, (place.begin + place.size) * rank)
    return LinearAdapters(AdapterRows(jnp.asarray(pool), jnp.asarray(slots), rank), place)


def added(x: np.ndarray, adapters: LinearAdapters) -> np.ndarray:
    """Compute what adapters add: numpy's sums, from the layout that `ops.adapters` describes."""
    rows, place = adapters
    pool = np.asarray(rows.pool).astype(np.float64)
    out = np.zeros((len(x), sum(place.parts)))
    for row, slot in enumerate(np.asarray(rows.slots)[: len(x)]):
        at, column = place.begin * rows.rank, 0
        smalls = []
        for _ in place.parts:
            a = pool[slot, at : at + place.in_size * rows.rank].reshape(-1, rows.rank, 2)
            smalls.append(x[row].astype(np.float64) @ a.transpose(0, 2, 1).reshape(-1, rows.rank))
            at += a.size
        for small, size in zip(smalls, place.parts, strict=True):
            b = pool[slot, at : at + rows.rank * size].reshape(size // 16, rows.rank // 2, 16, 2)
            out[row, column : column + size] = small @ b.transpose(1, 3, 0, 2).reshape(rows.rank, size)
            at, column = at + b.size, column + size
    return np.where(np.asarray(rows.slots)[: len(x), None] > 0, out, 0)


WEIGHT = Packed(jnp.asarray(pack(draw(3, sum(PLACE.parts), PLACE.in_size))))


def run(x: np.ndarray, adapters: LinearAdapters | None, num_rows: int) -> np.ndarray:
    def made(x: jax.Array, n: jax.Array) -> jax.Array:
        return linear(x, (WEIGHT,), num_rows=n, adapters=adapters, out_dtype=np.float32)

    return np.asarray(jax.jit(made)(jnp.asarray(x), jnp.int32(num_rows)))


@pytest.mark.parametrize("rank", [16, 64])
def test_products_are_those_of_numpy(rank: int) -> None:
    x, adapters, real = draw(1, len(SLOTS), PLACE.in_size), adapters_of(rank, SLOTS), len(SLOTS) - 1
    of_layer = x.astype(np.float64) @ draw(3, sum(PLACE.parts), PLACE.in_size).astype(np.float64).T
    wanted, got = (of_layer + added(x, adapters))[:real], run(x, adapters, real)[:real]
    assert np.abs(got - wanted).max() <= 1e-5 * wanted.std()
    without = SLOTS[:real] == 0
    np.testing.assert_array_equal(got[without], run(x, None, real)[:real][without])


def test_adapters_add_to_weights_of_different_formats() -> None:
    """The outputs of the second and the third weight do not begin where their jobs do."""
    x, adapters, real = draw(1, len(SLOTS), PLACE.in_size), adapters_of(16, SLOTS), len(SLOTS) - 1
    matrices = [draw(seed, size, PLACE.in_size) for seed, size in enumerate(PLACE.parts)]
    weights = tuple(
        Packed(jnp.asarray(code_leaf(matrix) if number != 1 else pack(matrix)))
        for number, matrix in enumerate(matrices)
    )

    def product(adapters: LinearAdapters | None) -> np.ndarray:
        made = linear(
            jnp.asarray(x), weights, num_rows=jnp.int32(real), adapters=adapters, out_dtype=np.float32
        )
        return np.asarray(made)[:real].astype(np.float64)

    wanted = added(x, adapters)[:real]
    assert np.abs(product(adapters) - product(None) - wanted).max() <= 1e-4 * wanted.std()


def test_a_row_has_the_same_bits_in_any_company_and_in_any_slot() -> None:
    x, adapters = draw(1, len(SLOTS), PLACE.in_size), adapters_of(16, SLOTS)
    together = run(x, adapters, len(SLOTS))
    moved = jnp.asarray(np.asarray(adapters.rows.pool)[[0, 3, 1, 2]])
    for row in np.flatnonzero(SLOTS):
        slot = np.array([SLOTS[row] % 3 + 1], np.int32)
        alone = LinearAdapters(AdapterRows(moved, jnp.asarray(slot), 16), PLACE)
        np.testing.assert_array_equal(run(x[row : row + 1], alone, 1)[0], together[row])


def test_many_rows_have_the_bits_of_few() -> None:
    """With many groups of rows a thread makes all products of a group with A."""
    slots = np.arange(600, dtype=np.int32) % 4
    x, adapters = draw(2, len(slots), PLACE.in_size), adapters_of(16, slots)
    together, plain = run(x, adapters, len(slots)), run(x, None, len(slots))
    wanted = plain + added(x, adapters)
    assert np.abs(together - wanted).max() <= 1e-5 * wanted.std()
    few = run(x[:12], adapters_of(16, slots[:12]), 12)
    np.testing.assert_array_equal(few, together[:12])
    np.testing.assert_array_equal(together[slots == 0], plain[slots == 0])


KINDS = ("bf16", "int8", "int4")


def packed(kind: str) -> Packed:
    weight = draw(5, 64, 64)
    if kind == "int4":
        return Packed(jnp.asarray(code_leaf(weight)))
    if kind == "int8":
        values, scale = quantize(weight)
        return Packed(jnp.asarray(pack(values)), jnp.asarray(scale))
    return Packed(jnp.asarray(pack(weight)))


NORM, EPS = draw(4, 64), 1e-5
RESIDUAL, UP = draw(6, 40, 64), draw(7, 40, 64)
OTHERS = {"residual": jnp.asarray(RESIDUAL), "up": jnp.asarray(UP), "norm": jnp.asarray(NORM)}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


EPILOGUES: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], np.ndarray]]] = {
    "norm": ({"norm": OTHERS["norm"], "eps": EPS}, lambda sums: sums),
    "residual": (
        {"residual": OTHERS["residual"], "scale": 0.5},
        lambda sums: RESIDUAL[: len(sums)].astype(np.float64) + 0.5 * sums,
    ),
    "gated": ({"gate": "silu"}, lambda sums: sums[:, :32] * sigmoid(sums[:, :32]) * sums[:, 32:]),
    "up": (
        {"gate": "sigmoid", "up": OTHERS["up"]},
        lambda sums: sigmoid(sums) * UP[: len(sums)].astype(np.float64),
    ),
}
"""Options of a layer, and what it makes of the sums."""
CASES = [
    (kind, epilogue, (3, 40)[(i + j) % 2])
    for i, kind in enumerate(KINDS)
    for j, epilogue in enumerate(EPILOGUES)
]
"""Each kind of weights and each epilogue, with few rows or with many."""


@pytest.mark.parametrize(("kind", "epilogue", "num_rows"), CASES)
def test_what_is_added_joins_the_product_of_its_row_alone(kind: str, epilogue: str, num_rows: int) -> None:
    x, weight, (options, made_of) = draw(8, 40, 64), packed(kind), EPILOGUES[epilogue]
    slots = (np.arange(40) % 3 == 1).astype(np.int32)
    parts = (32, 32) if epilogue == "gated" else (16, 48)
    adapters = adapters_of(16, slots, AdapterPlace(1, 64, parts, packed=True))
    given = {"num_rows": jnp.int32(num_rows)}
    plain = np.asarray(linear(jnp.asarray(x), (weight,), **given, **options))[:num_rows]
    got = np.asarray(linear(jnp.asarray(x), (weight,), **given, **options, adapters=adapters))[:num_rows]
    read = x.astype(np.float64)
    norms = {name: value for name, value in options.items() if name in ("norm", "eps")}
    if norms:
        read = read / np.sqrt((read**2).mean(axis=1, keepdims=True) + EPS) * NORM.astype(np.float64)
    sums = np.asarray(linear(jnp.asarray(x), (weight,), **given, **norms, out_dtype=np.float32))
    wanted = made_of(sums[:num_rows] + added(read[:num_rows].astype(BF16), adapters))
    has = slots[:num_rows] > 0
    np.testing.assert_array_equal(got[~has].view(np.uint16), plain[~has].view(np.uint16))
    errors = np.abs(got.astype(np.float64) - wanted) / (np.abs(wanted) + 0.01 * wanted.std())
    assert errors.max() <= 2**-7


def test_sizes_that_the_kernel_cannot_have_are_refused() -> None:
    x, weight = jnp.asarray(draw(1, 1, 64)), Packed(jnp.asarray(pack(draw(3, 16, 64))))

    def product(rank: int, units: int, place: AdapterPlace) -> jax.Array:
        rows = AdapterRows(jnp.zeros((2, rank * units), jnp.bfloat16), jnp.ones((1,), jnp.int32), rank)
        return linear(x, (weight,), num_rows=jnp.int32(1), adapters=LinearAdapters(rows, place))

    place = AdapterPlace(0, 64, (16,), packed=True)
    jax.block_until_ready(product(16, 80, place))
    with pytest.raises(ValueError, match="multiples of 16"):
        product(8, 80, place)
    with pytest.raises(ValueError, match="must be packed"):
        product(16, 80, AdapterPlace(0, 64, (16,)))
    for units, parts in ((79, (16,)), (200, (32,)), (200, (16, 16))):
        with pytest.raises(jax.errors.JaxRuntimeError, match="do not fit the layer"):
            jax.block_until_ready(product(16, units, AdapterPlace(0, 64, parts, packed=True)))
