"""What the native linear layers do beside multiplying, for families that need more than Llama: norms with
an offset, other activations, scale and soft cap. It is compared with numpy in float64, on every instruction
set of this machine and on emulated ones, and a row's bits must depend on the row alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.activations import ACTIVATIONS, Activation
from penstock.runtime.ops.native.linear import Packed, linear, pack, quantize
from tests.support.native.kernels import kernel_params, running

BF16 = ml_dtypes.bfloat16
EPS = 1e-5
HALF_STEP = 2.0**-8
"""How much one rounding to bfloat16 changes a value at most, as a part of it."""

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")

SIZES = [(1, 4, 64, 32), (17, 32, 192, 48), (40, 48, 64, 16)]
"""Rows, rows with padding, inputs and outputs: below and beyond a block of rows, odd numbers of blocks."""


@pytest.fixture(params=kernel_params(), autouse=True)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param):
        yield request.param


def whole_numbers(rng: np.random.Generator, most: int, *shape: int) -> np.ndarray:
    """Products of these are exact, so that what is tested is what comes after them."""
    return rng.integers(-most, most + 1, shape).astype(BF16)


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(BF16)


def wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def packed(weight: np.ndarray, bias: np.ndarray | None = None, *, int8: bool = False) -> Packed:
    added = None if bias is None else jnp.asarray(bias)
    if not int8:
        return Packed(jnp.asarray(pack(weight)), None, added)
    values, scale = quantize(weight)
    return Packed(jnp.asarray(pack(values)), jnp.asarray(scale), added)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    bent: np.ndarray = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return bent


def silu(x: np.ndarray) -> np.ndarray:
    bent: np.ndarray = x / (1 + np.exp(-x))
    return bent


def gpt_oss(gate: np.ndarray, up: np.ndarray, limit: float) -> np.ndarray:
    bounded = np.minimum(gate, limit)
    bent: np.ndarray = bounded / (1 + np.exp(-1.702 * bounded)) * (np.clip(up, -limit, limit) + 1)
    return bent


GATED: dict[Activation, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "silu": lambda gate, up: silu(gate) * up,
    "gelu_tanh": lambda gate, up: gelu_tanh(gate) * up,
    "gpt_oss": lambda gate, up: gpt_oss(gate, up, 3.0),
    "sigmoid": lambda gate, up: up / (1 + np.exp(-gate)),
}


def test_every_activation_has_a_witness() -> None:
    assert GATED.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("gate", GATED)
@pytest.mark.parametrize(("rows", "padded", "inner", "out"), SIZES)
def test_activations(gate: Activation, rows: int, padded: int, inner: int, out: int) -> None:
    """Gates from about -40 to 40: where activations are flat, bent and straight, and both sides of limits."""
    rng = np.random.default_rng(inner + rows)
    x, first, second = (
        whole_numbers(rng, 2, *shape) for shape in ((padded, inner), (out, inner), (out, inner))
    )
    x[rows:] = np.nan  # padding may hold anything
    x[:rows] = x[:rows] / 4
    bias, others = whole_numbers(rng, 5, out), draw(rng, padded, out)
    count = jnp.int32(rows)
    options: dict[str, Any] = {"num_rows": count, "gate": gate, "limit": 3.0}
    gates, ups = wide(x[:rows]) @ wide(first).T + wide(bias), wide(x[:rows]) @ wide(second).T

    two = linear(jnp.asarray(x), (packed(first, bias), packed(second)), **options)[:rows]
    np.testing.assert_allclose(wide(two), GATED[gate](gates, ups), rtol=HALF_STEP * 1.001, atol=1e-5)

    one = linear(jnp.asarray(x), (packed(first, bias),), up=jnp.asarray(others), **options)
    assert one.shape == (padded, out)
    expected = GATED[gate](gates, wide(others[:rows]))
    np.testing.assert_allclose(wide(one[:rows]), expected, rtol=HALF_STEP * 1.001, atol=1e-5)


@pytest.mark.parametrize(("rows", "padded", "inner", "out"), SIZES)
def test_scale_softcap_and_residual(rows: int, padded: int, inner: int, out: int) -> None:
    rng = np.random.default_rng(inner + out)
    x, weight, other = (
        whole_numbers(rng, 2, *shape) for shape in ((padded, inner), (out, inner), (16, inner))
    )
    x[rows:] = np.nan
    bias, residual = draw(rng, out), draw(rng, padded, out)
    count = jnp.int32(rows)
    y = wide(x[:rows]) @ wide(weight).T + wide(bias)
    both = np.concatenate([y, wide(x[:rows]) @ wide(other).T], axis=1)

    capped = linear(
        jnp.asarray(x),
        (packed(weight, bias), packed(other)),
        num_rows=count,
        scale=0.5,
        softcap=30.0,
        out_dtype=np.float32,
    )
    np.testing.assert_allclose(wide(capped[:rows]), 30 * np.tanh(0.5 * both / 30), rtol=2e-6, atol=1e-6)
    scaled = linear(jnp.asarray(x), (packed(weight, bias),), num_rows=count, scale=0.22, out_dtype=np.float32)
    np.testing.assert_allclose(wide(scaled[:rows]), np.float32(0.22) * y, rtol=1e-6, atol=1e-6)
    added = linear(
        jnp.asarray(x), (packed(weight, bias),), num_rows=count, scale=0.22, residual=jnp.asarray(residual)
    )
    expected = wide(residual[:rows]) + np.float32(0.22) * y
    np.testing.assert_allclose(wide(added[:rows]), expected, rtol=HALF_STEP * 1.001, atol=1e-5)


def test_a_norm_with_an_offset() -> None:
    """Gemma's: the weights are small, so without the offset everything would be."""
    rng = np.random.default_rng(7)
    x, norm, weight = draw(rng, 20, 320), (0.1 * draw(rng, 352)).astype(BF16), draw(rng, 48, 320)
    got = linear(
        jnp.asarray(x),
        (packed(weight),),
        num_rows=jnp.int32(20),
        norm=jnp.asarray(norm),
        norm_at=32,
        eps=EPS,
        offset=1.0,
        out_dtype=np.float32,
    )
    real = wide(x)
    normed = real / np.sqrt((real**2).mean(axis=1, keepdims=True) + EPS) * (1 + wide(norm[32:]))
    # Rows are rounded to bfloat16 before the product: a sum of 320 such errors.
    assert np.abs(wide(got) - normed @ wide(weight).T).max() <= 0.02 * np.sqrt(320)
    # The product with the rounded rows is exact to float32.
    rounded = normed.astype(np.float32).astype(BF16)
    np.testing.assert_allclose(wide(got), wide(rounded) @ wide(weight).T, atol=0.02)


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
def test_a_row_does_not_depend_on_the_others(int8: bool) -> None:
    """A row has the same bits alone and at any place beside any number of other rows."""
    rng = np.random.default_rng(8)
    inner, out, most = 192, 48, 70
    first, second = (packed(draw(rng, out, inner), draw(rng, out), int8=int8) for _ in range(2))
    x, beside, norm = draw(rng, most, inner), draw(rng, most, out), jnp.asarray(draw(rng, inner))

    @functools.cache
    def programs(padded: int) -> Any:
        def run(rows: jax.Array, others: jax.Array, count: jax.Array) -> list[jax.Array]:
            normed: dict[str, Any] = {"norm": norm, "eps": EPS, "offset": 1.0}
            return [
                linear(rows, (first, second), num_rows=count, gate="gelu_tanh", **normed),
                linear(rows, (first, second), num_rows=count, gate="gpt_oss"),
                linear(rows, (first,), num_rows=count, gate="gelu_tanh", up=others),
                linear(rows, (first,), num_rows=count, scale=0.3, residual=others),
                linear(rows, (first,), num_rows=count, softcap=5.0, out_dtype=np.float32, **normed),
            ]

        return jax.jit(run)

    def run(rows: np.ndarray) -> list[np.ndarray]:
        padded = -(-len(rows) // 16) * 16
        filled = np.resize(rows, padded)
        results = programs(padded)(x[filled], beside[filled], jnp.int32(len(rows)))
        return [np.asarray(result)[: len(rows)].view(np.uint8) for result in results]

    alone = [
        np.concatenate(results)
        for results in zip(*(run(np.array([row])) for row in range(most)), strict=True)
    ]
    for count in (2, 7, 16, 17, 33, most):
        rows = rng.permutation(most)[:count]
        for together, one_by_one in zip(run(rows), alone, strict=True):
            np.testing.assert_array_equal(together, one_by_one[rows], err_msg=f"{count} rows")


def test_a_row_with_nan_is_nan_and_the_others_keep_their_bits() -> None:
    """Limits and the tanh must not turn NaN into a number, which would be served as an answer."""
    rng = np.random.default_rng(9)
    first, second = (packed(draw(rng, 32, 64)) for _ in range(2))
    clean = draw(rng, 20, 64)
    x = clean.copy()
    x[3, 9], x[18, 60] = np.nan, -np.nan

    def run(rows: np.ndarray) -> list[np.ndarray]:
        given, count = jnp.asarray(rows), jnp.int32(20)
        up = jnp.asarray(clean[:, :32])
        results = [linear(given, (first, second), num_rows=count, gate=gate) for gate in GATED]
        results += [linear(given, (first,), num_rows=count, gate=gate, up=up) for gate in GATED]
        results.append(linear(given, (first,), num_rows=count, softcap=4.0, out_dtype=np.float32))
        return [wide(result) for result in results]

    others = np.delete(np.arange(20), [3, 18])
    for dirty, whole in zip(run(x), run(clean), strict=True):
        assert np.isnan(dirty[[3, 18]]).all()
        np.testing.assert_array_equal(dirty[others], whole[others])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"up": jnp.zeros((2, 16), jnp.bfloat16)}, "up"),
        ({"gate": "silu", "residual": jnp.zeros((2, 16), jnp.bfloat16)}, "gate"),
        ({"gate": "silu", "scale": 2.0}, "gate"),
        ({"gate": "silu", "softcap": 2.0}, "gate"),
        ({"gate": "silu", "out_dtype": np.float32}, "out_dtype"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    weight = packed(np.zeros((16, 64), BF16))
    with pytest.raises(ValueError, match=message):
        linear(jnp.zeros((2, 64), jnp.bfloat16), (weight, weight), num_rows=jnp.int32(2), **options)
