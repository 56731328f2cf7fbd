"""The native kernel that norms and rotates, compared with numpy in float64, on every instruction set of this
machine.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.linear import rotate_qkv
from tests.support.native.kernels import kernel_params, running

BF16 = ml_dtypes.bfloat16

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")


@pytest.fixture(
    params=kernel_params("avx2", "avx512", "avx512_bf16", "avx512_emulated", "avx512_bf16_emulated")
)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param):
        yield request.param


@pytest.mark.parametrize("normed", [True, False], ids=["norms", "plain"])
@pytest.mark.parametrize(
    ("rows", "padded", "heads", "kv_heads", "dim"),
    [(1, 4, 4, 2, 32), (13, 16, 6, 2, 64), (40, 40, 2, 1, 128)],
)
def test_queries_and_keys_are_normed_and_rotated(
    kernel: str, normed: bool, rows: int, padded: int, heads: int, kv_heads: int, dim: int
) -> None:
    rng = np.random.default_rng(rows + dim)
    qkv = rng.standard_normal((padded, (heads + 2 * kv_heads) * dim)).astype(BF16)
    qkv[rows:] = np.nan
    norms = [(1 + 0.2 * rng.standard_normal(dim)).astype(BF16) for _ in range(2)]
    angle = rng.uniform(0, 6, (padded, dim // 2))
    cos, sin = np.cos(angle), np.sin(angle)
    got = rotate_qkv(
        jnp.asarray(qkv),
        jnp.asarray(cos.astype(np.float32)),
        jnp.asarray(sin.astype(np.float32)),
        num_rows=jnp.int32(rows),
        num_heads=heads,
        num_kv_heads=kv_heads,
        q_norm=jnp.asarray(norms[0]) if normed else None,
        k_norm=jnp.asarray(norms[1]) if normed else None,
        eps=1e-5,
    )
    wide = qkv[:rows].astype(np.float64).reshape(rows, -1, dim)
    parts = np.split(wide, (heads, heads + kv_heads), axis=1)
    for out, x, norm in zip(got[:2], parts[:2], norms, strict=True):
        if normed:
            x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * norm.astype(np.float64)
        first, second = np.split(x, 2, axis=-1)
        c, s = cos[:rows, None], sin[:rows, None]
        expected = np.concatenate([first * c - second * s, second * c + first * s], axis=-1)
        np.testing.assert_allclose(np.asarray(out[:rows]).astype(np.float64), expected, rtol=2**-8, atol=1e-4)
    np.testing.assert_array_equal(
        np.asarray(got[2][:rows]), qkv[:rows].reshape(rows, -1, dim)[:, heads + kv_heads :]
    )
