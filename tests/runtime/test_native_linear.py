"""The native linear layers against numpy in float64, on every instruction set this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from penstock.runtime.native import library
from penstock.runtime.native.library import Isa
from penstock.runtime.native.linear import Packed, linear, pack, packed_shape, quantize, unpack

BF16 = ml_dtypes.bfloat16

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")


KERNELS = {
    "avx2": (Isa.AVX2, None),
    "avx512": (Isa.AVX512, None),
    "avx512_bf16": (Isa.AVX512_BF16, False),
    "avx512_bf16_pairs": (Isa.AVX512_BF16, True),
    "amx": (Isa.AMX, None),
}
"""Instruction set and `use_pairs`."""


@pytest.fixture(params=KERNELS)
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    wanted, pairs = KERNELS[request.param]
    if library.limit_isa(wanted) is not wanted:
        library.limit_isa(Isa.AMX)
        pytest.skip(f"this processor has no {wanted.name}")
    library.use_pairs(pairs)
    yield wanted
    library.use_pairs(None)
    library.limit_isa(Isa.AMX)


def draw(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(BF16)


def packed(weight: np.ndarray, int8: bool, bias: np.ndarray | None = None) -> Packed:
    added = None if bias is None else jnp.asarray(bias)
    if not int8:
        return Packed(jnp.asarray(pack(weight)), None, added)
    values, scale = quantize(weight)
    return Packed(jnp.asarray(pack(values)), jnp.asarray(scale), added)


def wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def close(got: Any, expected: np.ndarray, tolerance: float) -> None:
    assert np.abs(wide(got) - expected).max() <= tolerance * expected.std()


# Rows below, at and beyond a block of 16 and a pair of blocks; with padding rows behind them.
SIZES = [
    (1, 4, 64, 32),
    (3, 4, 192, 48),
    (16, 16, 1024, 96),
    (17, 32, 128, 64),
    (33, 48, 64, 16),
    (70, 80, 320, 80),
]


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize(("rows", "padded", "inner", "out"), SIZES)
def test_products_norm_residual_and_gate(
    isa: Isa, int8: bool, rows: int, padded: int, inner: int, out: int
) -> None:
    rng = np.random.default_rng(rows * inner + out)
    x, residual = draw(rng, padded, inner), draw(rng, padded, out)
    x[rows:] = np.nan  # padding may hold anything
    first, second, third = (draw(rng, out, inner, scale=0.05) for _ in range(3))
    bias, norm = draw(rng, out), draw(rng, inner) + BF16(1)
    count = jnp.int32(rows)
    real = wide(x[:rows])
    # int8 rounds twice to about 1/254 of each row's peak; bf16 rounds norm and result to 2^-9.
    loose, gated = (0.08, 0.35) if int8 else (0.03, 0.06)

    both = linear(
        jnp.asarray(x),
        (packed(first, int8, bias), packed(second, int8), packed(third, int8)),
        num_rows=count,
        norm=jnp.asarray(norm),
        eps=1e-5,
        out_dtype=np.float32,
    )
    normed = real / np.sqrt((real**2).mean(axis=1, keepdims=True) + 1e-5) * wide(norm)
    parts = [normed @ wide(first).T + wide(bias), normed @ wide(second).T, normed @ wide(third).T]
    close(both[:rows], np.concatenate(parts, axis=1), loose)

    added = linear(jnp.asarray(x), (packed(first, int8),), num_rows=count, residual=jnp.asarray(residual))
    close(added[:rows], real @ wide(first).T + wide(residual[:rows]), loose)

    mixed = linear(
        jnp.asarray(x), (packed(first, int8, bias), packed(second, int8)), num_rows=count, gate=True
    )
    gate = real @ wide(first).T + wide(bias)
    close(mixed[:rows], gate / (1 + np.exp(-gate)) * (real @ wide(second).T), gated)


def test_exact_small_integers(isa: Isa) -> None:
    """Products of small integers are exact in bf16, so every digit counts: a wrong layout cannot hide."""
    rng = np.random.default_rng(5)
    x, weight = rng.integers(-4, 5, (40, 256)), rng.integers(-4, 5, (48, 256))
    got = linear(
        jnp.asarray(x.astype(BF16)),
        (packed(weight.astype(BF16), False),),
        num_rows=jnp.int32(40),
        out_dtype=np.float32,
    )
    np.testing.assert_array_equal(np.asarray(got), (x @ weight.T).astype(np.float32))


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize("inner", [128, 16512])  # x of the latter takes several passes
def test_a_row_does_not_depend_on_the_others(isa: Isa, int8: bool, inner: int) -> None:
    """A row's bits are the same whatever is beside it; on AMX, which sums few rows in two parts, nearly."""
    rng = np.random.default_rng(6)
    first, second = (packed(draw(rng, 48, inner, scale=0.05), int8) for _ in range(2))
    x, residual, norm = draw(rng, 100, inner), draw(rng, 100, 48), jnp.asarray(draw(rng, inner))

    def run(begin: int, end: int) -> list[np.ndarray]:
        rows, count = jnp.asarray(np.roll(x, -begin, 0)), jnp.int32(end - begin)
        added = jnp.asarray(np.roll(residual, -begin, 0))
        results = [
            linear(rows, (first, second), num_rows=count, norm=norm, eps=1e-5, out_dtype=np.float32),
            linear(rows, (first,), num_rows=count, residual=added),
            linear(rows, (first, second), num_rows=count, norm=norm, eps=1e-5, gate=True),
        ]
        return [np.asarray(result)[: end - begin] for result in results]

    together = run(0, 100)
    for begin, end in [(0, 1), (2, 4), (7, 12), (20, 27), (16, 31), (5, 21), (30, 47), (60, 93), (35, 99)]:
        for alone, whole in zip(run(begin, end), together, strict=True):
            if isa is Isa.AMX and not int8:
                last_digit = 2**-7 if alone.dtype == BF16 else 0.0
                expected = wide(whole[begin:end])
                np.testing.assert_allclose(wide(alone), expected, last_digit, 1e-4 * expected.std())
            else:
                np.testing.assert_array_equal(alone.view(np.uint8), whole[begin:end].view(np.uint8))


def test_int8_sums_are_exact(isa: Isa) -> None:
    """Rows whose peak is 127 are quantized to themselves, so the sums are whole numbers known exactly."""
    rng = np.random.default_rng(8)
    x = rng.integers(-126, 127, (37, 192))
    x[:, 5], x[3] = 127, -127
    values = rng.integers(-127, 128, (32, 192)).astype(np.int8)
    sums = values.astype(np.int64).sum(axis=1) * 128
    scale = np.stack([np.ones(32), sums]).astype(np.float32)
    weight = Packed(jnp.asarray(pack(values)), jnp.asarray(scale))
    got = linear(jnp.asarray(x.astype(BF16)), (weight,), num_rows=jnp.int32(37), out_dtype=np.float32)
    np.testing.assert_array_equal(np.asarray(got), (x @ values.T.astype(np.int64)).astype(np.float32))


@pytest.mark.parametrize("dtype", [BF16, np.int8])
def test_packing_is_a_permutation(dtype: type) -> None:
    weight = (
        np.arange(32 * 128)
        .reshape(32, 128)
        .astype(np.int8 if dtype is np.int8 else np.int16)
        .view(np.int8 if dtype is np.int8 else BF16)
    )
    tiles = pack(weight)
    assert tiles.shape == packed_shape(32, 128, int8=dtype is np.int8)
    np.testing.assert_array_equal(unpack(tiles), weight)
    group = 4 if dtype is np.int8 else 2
    # Output 17, input 70: block, tile, group of inputs, output within the block, input within the group.
    per_tile = 16 * group
    assert tiles[1, 70 // per_tile, 70 % per_tile // group, 1, 70 % group] == weight[17, 70]


def test_quantized_weights_are_within_half_a_step() -> None:
    weight = draw(np.random.default_rng(7), 16, 64)
    values, scale = quantize(weight)
    assert np.abs(values * scale[0][:, None] - wide(weight)).max() <= scale[0].max() / 2 * 1.0001
    np.testing.assert_array_equal(scale[1], values.astype(np.int64).sum(axis=1) * 128)
    zero, scale = quantize(np.zeros((16, 64), BF16))
    assert not zero.any()
    assert np.isfinite(scale).all()
