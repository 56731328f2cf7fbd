"""Everything that families vary between the qkv product and attention, in the native kernel: compared with
numpy in float64, on every instruction set of this machine. A row's bits must depend on the row alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.linear import HeadNorms, can_rotate, rotate, rotate_qkv
from tests.support.native.kernels import kernel_params, running

BF16 = ml_dtypes.bfloat16
EPS = 1e-5
BOUND: dict[str, Any] = {"rtol": 2.0**-8 * 1.001, "atol": 1e-5}
"""One rounding to bfloat16; the float32 operations before it err by far less."""

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")


@pytest.fixture(
    params=kernel_params("avx2", "avx512", "avx512_bf16", "avx512_emulated", "avx512_bf16_emulated"),
    autouse=True,
    scope="module",
)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param):
        yield request.param


def wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def over_rms(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    divided: np.ndarray = x / np.sqrt((x**2).mean(axis=axes, keepdims=True) + EPS)
    return divided


def turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [T, heads, D] with its first 2 * cos.shape[1] channels rotated."""
    half = cos.shape[1]
    first, second, kept = np.split(x, (half, 2 * half), axis=-1)
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([first * c - second * s, second * c + first * s, kept], axis=-1)


def expected_heads(
    x: np.ndarray,
    angles: tuple[np.ndarray, np.ndarray],
    norms: HeadNorms,
    weight: np.ndarray | None,
    offset: float,
) -> np.ndarray:
    """x [T, heads, D]; weight [D], or [heads, D] for "all"."""
    after = weight if norms == "after" else None
    if weight is not None and norms != "after":
        x = over_rms(x, (1, 2) if norms == "all" else (2,)) * (offset + weight)
    x = turned(x, *angles)
    return over_rms(x, (2,)) * (1.0 if after is None else offset + after) if norms == "after" else x


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 40),
    padded=st.sampled_from([1, 17, 40]),
    kv_heads=st.integers(1, 3),
    per_kv_head=st.integers(1, 3),
    dim=st.sampled_from([32, 64, 96, 160]),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    norms=st.sampled_from(["none", "head", "all", "after"]),
    offset=st.sampled_from([0.0, 1.0]),
    v_norm=st.booleans(),
    values_are_keys=st.booleans(),
    scaled=st.booleans(),
    bare=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_every_combination(
    rows: int,
    padded: int,
    kv_heads: int,
    per_kv_head: int,
    dim: int,
    share: float,
    norms: Any,
    offset: float,
    v_norm: bool,
    values_are_keys: bool,
    scaled: bool,
    bare: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    heads, rows = kv_heads * per_kv_head, min(rows, padded)
    rotary = int(dim * share) // 32 * 32
    parts = 1 if values_are_keys else 2
    qkv = rng.standard_normal((padded, (heads + parts * kv_heads) * dim)).astype(BF16)
    qkv[rows:] = np.nan  # padding may hold anything
    angle = rng.uniform(0, 6, (padded, rotary // 2)).astype(np.float32)
    cos, sin = np.cos(angle), np.sin(angle)
    factors = rng.uniform(0.5, 2, padded).astype(np.float32)
    weighted = norms in ("head", "all") or (norms == "after" and not bare)
    shapes = ((heads, dim), (kv_heads, dim)) if norms == "all" else ((1, dim), (1, dim))
    weights = [(rng.standard_normal(shape) * 0.3 + 1 - offset).astype(BF16) for shape in shapes]
    pool = np.concatenate([np.full(7, np.nan, BF16), *(weight.ravel() for weight in weights)])

    q, k, v = rotate_qkv(
        jnp.asarray(qkv),
        jnp.asarray(cos) if rotary else None,
        jnp.asarray(sin) if rotary else None,
        num_rows=jnp.int32(rows),
        num_heads=heads,
        num_kv_heads=kv_heads,
        norms="head" if norms == "none" else norms,
        q_norm=jnp.asarray(pool) if weighted else None,
        k_norm=jnp.asarray(pool) if weighted else None,
        q_norm_at=7,
        k_norm_at=7 + weights[0].size,
        eps=EPS,
        offset=offset,
        v_norm=v_norm,
        values_are_keys=values_are_keys,
        q_scale=jnp.asarray(factors) if scaled else None,
    )

    real = wide(qkv[:rows]).reshape(rows, -1, dim)
    angles = wide(cos[:rows]), wide(sin[:rows])
    given_q, given_k = real[:, :heads], real[:, heads : heads + kv_heads]
    given_v = given_k if values_are_keys else real[:, heads + kv_heads :]
    q_weight, k_weight = (wide(weight) if weighted else None for weight in weights)
    expected_q = expected_heads(given_q, angles, norms, q_weight, offset)
    if scaled:
        expected_q = expected_q * factors[:rows, None, None]
    np.testing.assert_allclose(wide(np.asarray(q)[:rows]), expected_q, **BOUND)
    np.testing.assert_allclose(
        wide(np.asarray(k)[:rows]), expected_heads(given_k, angles, norms, k_weight, offset), **BOUND
    )
    np.testing.assert_allclose(
        wide(np.asarray(v)[:rows]), over_rms(given_v, (2,)) if v_norm else given_v, **BOUND
    )


def test_queries_alone_have_the_bits_of_queries_with_keys_and_values() -> None:
    rng = np.random.default_rng(1)
    rows, heads, dim = 21, 3, 64
    x = jnp.asarray(rng.standard_normal((rows, heads, dim)).astype(BF16))
    angle = rng.uniform(0, 6, (rows, 16)).astype(np.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    norm, scale = jnp.asarray(rng.standard_normal(dim).astype(BF16)), jnp.asarray(angle[:, 0])
    shared: dict[str, Any] = {"num_rows": jnp.int32(rows), "eps": EPS, "offset": 1.0}
    alone = rotate(x, cos, sin, norm=norm, scale=scale, **shared)
    qkv = jnp.concatenate([x, x[:, :2]], axis=1).reshape(rows, -1)
    together, _, _ = rotate_qkv(
        qkv, cos, sin, num_heads=heads, num_kv_heads=1, q_norm=norm, q_scale=scale, **shared
    )
    assert alone.shape == x.shape
    np.testing.assert_array_equal(np.asarray(alone).view(np.uint16), np.asarray(together).view(np.uint16))


@pytest.mark.parametrize("norms", ["head", "all", "after"])
def test_a_row_does_not_depend_on_the_others(norms: HeadNorms) -> None:
    """A row has the same bits alone and at any place beside any number of other rows."""
    rng = np.random.default_rng(2)
    most, heads, dim = 60, 2, 64
    x = rng.standard_normal((most, (heads + 2) * dim)).astype(BF16)
    angle = rng.uniform(0, 6, (most, 16)).astype(np.float32)
    weight = jnp.asarray(rng.standard_normal(heads * dim).astype(BF16))

    @jax.jit
    def program(rows: jax.Array, angles: jax.Array, count: jax.Array) -> tuple[jax.Array, ...]:
        return rotate_qkv(
            rows,
            angles,
            angles,
            num_rows=count,
            num_heads=heads,
            num_kv_heads=1,
            norms=norms,
            q_norm=weight,
            k_norm=weight,
            eps=EPS,
            v_norm=True,
            q_scale=angles[:, 0],
        )

    def run(rows: np.ndarray) -> list[np.ndarray]:
        filled = np.resize(rows, most)
        results = program(x[filled], angle[filled], jnp.int32(len(rows)))
        return [np.asarray(result)[: len(rows)].view(np.uint16) for result in results]

    alone = [
        np.concatenate(results)
        for results in zip(*(run(np.array([row])) for row in range(most)), strict=True)
    ]
    for count in (2, 8, 9, 31, most):
        rows = rng.permutation(most)[:count]
        for together, one_by_one in zip(run(rows), alone, strict=True):
            np.testing.assert_array_equal(together, one_by_one[rows], err_msg=f"{count} rows")


@pytest.mark.parametrize("norms", ["head", "all", "after"])
def test_nan_stays_in_its_row(norms: HeadNorms) -> None:
    rng = np.random.default_rng(3)
    clean = rng.standard_normal((5, 4 * 32)).astype(BF16)
    x = clean.copy()
    x[2, 5], x[2, 70], x[2, 100] = np.nan, np.nan, np.nan  # in q, k and v
    weight = jnp.ones((64,), jnp.bfloat16)

    def run(rows: np.ndarray) -> list[np.ndarray]:
        results = rotate_qkv(
            jnp.asarray(rows),
            None,
            None,
            num_rows=jnp.int32(5),
            num_heads=2,
            num_kv_heads=1,
            norms=norms,
            q_norm=weight,
            k_norm=weight,
            eps=EPS,
            v_norm=True,
        )
        return [wide(result) for result in results]

    others = [0, 1, 3, 4]
    for dirty, whole in zip(run(x), run(clean), strict=True):
        assert np.isnan(dirty[2, 0]).all()
        np.testing.assert_array_equal(dirty[others], whole[others])


def test_what_does_not_fit_is_refused() -> None:
    assert can_rotate(96, 96)
    assert can_rotate(64, 0)
    assert not can_rotate(48, 32)
    assert not can_rotate(64, 16)
    assert not can_rotate(64, 96)
    rows = jnp.int32(2)
    qkv, angle = jnp.zeros((2, 192), BF16), jnp.zeros((2, 8))
    shared: dict[str, Any] = {"num_rows": rows, "num_heads": 1, "num_kv_heads": 1}
    with pytest.raises(ValueError, match="cos"):
        rotate_qkv(qkv, angle, angle, **shared)
    with pytest.raises(ValueError, match="qkv"):
        rotate_qkv(qkv[:, :160], None, None, **shared)
