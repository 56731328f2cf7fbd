"""Fused weights and pools of small parameters give the same bits in the native kernels as separate arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.activations import Activation
from penstock.runtime.ops.native.linear import Packed, linear, pack, quantize, rotate_qkv
from tests.support.native.codes import code_leaf
from tests.support.native.kernels import EMULATED_AVX512, NATIVE, kernel_params, running

BF16 = ml_dtypes.bfloat16
ROWS, INNER = 37, 192
SIZES = (96, 48, 48)

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")


@pytest.fixture(params=kernel_params(*NATIVE, *EMULATED_AVX512), autouse=True)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param):
        yield request.param


def draw(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape).astype(BF16)


def same_bits(one: Any, other: Any) -> None:
    np.testing.assert_array_equal(np.asarray(one).view(np.uint16), np.asarray(other).view(np.uint16))


def packed(weight: Any, bias: Any, kind: str) -> Packed:
    """Make a packed weight with scale and bias in arrays of their own."""
    if kind == "int4":
        return Packed(jnp.asarray(code_leaf(weight)), None, jnp.asarray(bias))
    if kind == "bf16":
        return Packed(jnp.asarray(pack(weight)), None, jnp.asarray(bias))
    values, scale = quantize(weight)
    return Packed(jnp.asarray(pack(values)), jnp.asarray(scale), jnp.asarray(bias))


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("gate", [None, "silu"], ids=["side by side", "gate"])
def test_one_weight_of_several_with_its_small_parameters_in_pools(kind: str, gate: Activation | None) -> None:
    rng = np.random.default_rng(3)
    sizes = SIZES[1:] if gate else SIZES
    x, norm = jnp.asarray(draw(rng, ROWS, INNER)), draw(rng, INNER)
    weights, biases = [draw(rng, n, INNER) for n in sizes], [draw(rng, n) for n in sizes]
    rows = jnp.int32(ROWS)
    apart = linear(
        x,
        tuple(packed(w, b, kind) for w, b in zip(weights, biases, strict=True)),
        num_rows=rows,
        norm=jnp.asarray(norm),
        eps=1e-6,
        gate=gate,
    )
    whole = packed(np.concatenate(weights), np.concatenate(biases), kind)
    vectors = jnp.asarray(np.concatenate([draw(rng, 32), norm, *biases, draw(rng, 5)]))
    scales = None if whole.scale is None else jnp.pad(whole.scale, (64, 3), constant_values=7.0)
    fused = Packed(whole.tiles, scales, vectors, 64, 32 + INNER)
    together = linear(x, (fused,), num_rows=rows, norm=vectors, norm_at=32, eps=1e-6, gate=gate)
    same_bits(together, apart)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_an_output_of_a_weight_that_is_not_finite_is_nan(bad: float, kind: str) -> None:
    """Otherwise the value would be quantized to some number, and nobody would notice."""
    rng = np.random.default_rng(5)
    weight = draw(rng, 48, INNER)
    weight[17, 100] = bad
    ones = draw(rng, 4, INNER)
    out = linear(jnp.asarray(ones), (packed(weight, draw(rng, 48), kind),), num_rows=jnp.int32(4))
    is_nan = np.isnan(np.asarray(out).astype(np.float32))
    assert is_nan[:, 17].all()
    assert not np.delete(is_nan, 17, axis=1).any()


def test_norms_of_heads_in_a_pool() -> None:
    rng = np.random.default_rng(4)
    heads, kv_heads, dim = 4, 2, 64
    qkv = jnp.asarray(draw(rng, ROWS, (heads + 2 * kv_heads) * dim))
    angle = rng.uniform(0, 6, (2, ROWS, dim // 2)).astype(np.float32)
    q_norm, k_norm = draw(rng, dim), draw(rng, dim)
    vectors = jnp.asarray(np.concatenate([draw(rng, 32), k_norm, q_norm, draw(rng, 8)]))

    def rotated(**norms: Any) -> Any:
        return rotate_qkv(
            qkv,
            jnp.cos(angle[0]),
            jnp.sin(angle[1]),
            num_rows=jnp.int32(ROWS),
            num_heads=heads,
            num_kv_heads=kv_heads,
            eps=1e-6,
            **norms,
        )

    apart = rotated(q_norm=jnp.asarray(q_norm), k_norm=jnp.asarray(k_norm))
    together = rotated(q_norm=vectors, k_norm=vectors, q_norm_at=32 + dim, k_norm_at=32)
    for one, other in zip(together, apart, strict=True):
        same_bits(one, other)
