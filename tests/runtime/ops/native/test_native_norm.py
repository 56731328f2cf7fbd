"""The native norm, compared with numpy in float64, on every instruction set of this machine. A row's bits
must depend on the row alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.norm import can_normalize, normalize
from tests.support.native.kernels import kernel_params, running

BF16 = ml_dtypes.bfloat16
EPS = 1e-5

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")


@pytest.fixture(
    params=kernel_params("avx2", "avx512", "avx512_bf16", "avx512_emulated", "avx512_bf16_emulated"),
    autouse=True,
)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param):
        yield request.param


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(BF16)


def wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def normed(x: np.ndarray, size: int) -> np.ndarray:
    runs = wide(x).reshape(len(x), -1, size)
    result: np.ndarray = runs / np.sqrt((runs**2).mean(axis=-1, keepdims=True) + EPS)
    return result.reshape(x.shape)


def close(got: Any, expected: np.ndarray) -> None:
    """One rounding to bfloat16 is at most 2^-8 of a value; the float32 sums before it err by far less."""
    np.testing.assert_allclose(wide(got), expected, rtol=2**-8 * 1.001, atol=1e-5)


# Numbers of rows around those of one call of the kernel, runs of odd numbers of registers, and padding rows.
SIZES = [(1, 4, 64, 64), (3, 4, 48, 16), (37, 48, 1008, 336), (70, 80, 320, 160), (17, 32, 2560, 2560)]


@pytest.mark.parametrize(("rows", "padded", "channels", "size"), SIZES)
def test_every_part_of_the_formula(rows: int, padded: int, channels: int, size: int) -> None:
    rng = np.random.default_rng(channels + rows)
    x, residual = draw(rng, padded, channels), draw(rng, padded, channels)
    x[rows:] = np.nan  # padding may hold anything
    weights = draw(rng, size + 32)
    weight = wide(weights[16 : 16 + size])
    factors = jnp.asarray([9.0, 0.3, 9.0], jnp.float32)
    count = jnp.int32(rows)
    real, added = wide(x[:rows]), wide(residual[:rows])

    def run(**options: Any) -> Any:
        return normalize(jnp.asarray(x), num_rows=count, **options)[:rows]

    whole = jnp.asarray(weights)
    tiled = np.tile(weight, channels // size)
    close(run(eps=EPS, size=size), normed(x[:rows], size))
    close(run(eps=EPS, size=size, norm=whole, norm_at=16), normed(x[:rows], size) * tiled)
    close(
        run(eps=EPS, size=size, norm=whole, norm_at=16, offset=1.0, scale=0.25),
        0.25 * normed(x[:rows], size) * (1 + tiled),
    )
    last = run(
        eps=EPS,
        size=size,
        norm=whole,
        norm_at=16,
        residual=jnp.asarray(residual),
        factor=factors,
        factor_at=1,
    )
    expected = (added + normed(x[:rows], size) * tiled) * 0.3
    # The sum may cancel, and is then as exact as what was added.
    np.testing.assert_allclose(wide(last), expected, rtol=2**-8 * 1.001, atol=1e-5)
    close(run(eps=None, residual=jnp.asarray(residual), scale=0.22), added + np.float32(0.22) * real)


@pytest.mark.parametrize(("rows", "padded", "channels", "size"), SIZES)
def test_layer_norms(rows: int, padded: int, channels: int, size: int) -> None:
    rng = np.random.default_rng(channels + rows + 1)
    x = (wide(draw(rng, padded, channels)) + 3).astype(BF16)  # far from a mean of zero
    x[rows:] = np.nan
    pool = draw(rng, 2 * size + 32)
    weight, bias = (wide(pool[begin : begin + size]) for begin in (16, 32 + size))
    runs = wide(x[:rows]).reshape(rows, -1, size)
    runs = runs - runs.mean(axis=-1, keepdims=True)
    expected = runs / np.sqrt((runs**2).mean(axis=-1, keepdims=True) + EPS)
    shared: dict[str, Any] = {"num_rows": jnp.int32(rows), "eps": EPS, "size": size, "centred": True}
    bare = normalize(jnp.asarray(x), **shared)[:rows]
    np.testing.assert_allclose(wide(bare), expected.reshape(rows, -1), rtol=2**-8 * 1.001, atol=1e-5)
    whole = jnp.asarray(pool)
    norms: dict[str, Any] = {"norm": whole, "norm_at": 16, "bias": whole, "bias_at": 32 + size}
    full = normalize(jnp.asarray(x), offset=1.0, **norms, **shared)[:rows]
    expected = (expected * (1 + weight) + bias).reshape(rows, -1)
    np.testing.assert_allclose(wide(full), expected, rtol=2**-8 * 1.001, atol=1e-5)


def test_gelu() -> None:
    """Every bfloat16 from -40 to 40, also where GELU is as small as a float32 can be."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    x = bits[(bits & 0x7FFF) < np.array(40, BF16).view(np.uint16)].view(BF16).reshape(-1, 16)
    exact = np.array([value * math.erfc(-value / math.sqrt(2)) / 2 for value in wide(x).ravel()])
    shared: dict[str, Any] = {"num_rows": jnp.int32(len(x)), "eps": None}
    got = wide(normalize(jnp.asarray(x), plain="gelu", **shared)).ravel()
    np.testing.assert_allclose(got, exact, rtol=2**-8 * 1.01, atol=1e-37)
    flat = wide(x).ravel()
    inner = np.sqrt(2 / np.pi) * (flat + 0.044715 * flat**3)
    got = wide(normalize(jnp.asarray(x), plain="gelu_tanh", **shared)).ravel()
    np.testing.assert_allclose(
        got, flat / (1 + np.exp(np.minimum(-2 * inner, 700))), rtol=2**-8 * 1.01, atol=1e-35
    )
    nan = normalize(jnp.full((1, 16), jnp.nan, jnp.bfloat16), num_rows=jnp.int32(1), eps=None, plain="gelu")
    assert np.isnan(wide(nan)).all()


def test_runs_of_a_row_of_heads() -> None:
    """Rows may have any number of dimensions; without `size` a run is all of them."""
    rng = np.random.default_rng(2)
    x = draw(rng, 5, 3, 32)
    by_head = normalize(jnp.asarray(x), num_rows=jnp.int32(5), eps=EPS, size=32)
    assert by_head.shape == x.shape
    close(by_head, normed(x.reshape(5, 96), 32).reshape(x.shape))
    together = normalize(jnp.asarray(x), num_rows=jnp.int32(5), eps=EPS)
    close(together, normed(x.reshape(5, 96), 96).reshape(x.shape))


@pytest.mark.parametrize("others", [{}, {"centred": True, "plain": "gelu"}])
def test_a_row_does_not_depend_on_the_others(others: dict[str, Any]) -> None:
    """A row has the same bits alone and at any place beside any number of other rows."""
    rng = np.random.default_rng(3)
    most, channels = 200, 336
    x, residual, norm = draw(rng, most, channels), draw(rng, most, channels), jnp.asarray(draw(rng, 48))

    @jax.jit
    def program(rows: jax.Array, added: jax.Array, count: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"norm": norm, "offset": 1.0, "size": 48, "scale": 0.7, **others}
        return normalize(rows, num_rows=count, eps=EPS, residual=added, **options)

    def run(rows: np.ndarray) -> np.ndarray:
        filled = np.resize(rows, most)
        result = program(x[filled], residual[filled], jnp.int32(len(rows)))
        return np.asarray(result)[: len(rows)].view(np.uint16)

    alone = np.concatenate([run(np.array([row])) for row in range(most)])
    for count in (2, 15, 48, 49, 97, most):
        rows = rng.permutation(most)[:count]
        np.testing.assert_array_equal(run(rows), alone[rows], err_msg=f"{count} rows")


def test_nan_and_infinity_stay_in_their_run_and_spoil_it() -> None:
    rng = np.random.default_rng(4)
    clean = draw(rng, 6, 64)
    x = clean.copy()
    x[1, 3], x[4, 40] = np.nan, np.inf

    def run(rows: np.ndarray) -> np.ndarray:
        return wide(normalize(jnp.asarray(rows), num_rows=jnp.int32(6), eps=EPS, size=32))

    dirty, whole = run(x), run(clean)
    assert np.isnan(dirty[1, :32]).all()
    assert np.isnan(dirty[4, 40])
    dirty[1, :32], dirty[4, 32:] = whole[1, :32], whole[4, 32:]
    np.testing.assert_array_equal(dirty, whole)


def test_sizes_and_operands_that_do_not_fit_are_refused() -> None:
    x = jnp.zeros((2, 96), jnp.bfloat16)
    rows = jnp.int32(2)
    assert can_normalize(16)
    assert not can_normalize(24)
    assert not can_normalize(0)
    for size in (24, 64):
        with pytest.raises(ValueError, match="size"):
            normalize(x, num_rows=rows, eps=EPS, size=size)
    with pytest.raises(ValueError, match="eps"):
        normalize(x, num_rows=rows, eps=None, norm=x[0])
    with pytest.raises(ValueError, match="residual"):
        normalize(x, num_rows=rows, eps=None, residual=x[:1])
