"""Paged attention against a plain numpy softmax over contiguous keys, on random ragged batches."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.attention import (
    allocate_kv,
    kv_layer_shape,
    kv_storage_dtype,
    make_meta,
    paged_attention,
)

PAGE, NUM_PAGES, ROWS, WIDTH, DIM = 4, 64, 4, 24, 8


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: `past` tokens already in the cache, then `new` ones in this step."""

    past: int
    new: int


def reference(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, past: int, scale: float, window: int | None
) -> np.ndarray:
    """Causal attention of len(q) new tokens after `past`, in float64: q [n, H, D], k and v [past + n, KH,
    D].
    """
    out = np.zeros(q.shape)
    group = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        position = past + i
        first = 0 if window is None else max(0, position - window + 1)
        for h in range(q.shape[1]):
            keys, values = k[first : position + 1, h // group], v[first : position + 1, h // group]
            scores = keys @ q[i, h] * scale
            weights = np.exp(scores - scores.max())
            out[i, h] = weights @ values / weights.sum()
    return out


@functools.partial(jax.jit, static_argnames=("decode", "window"))
def step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv: jax.Array,
    starts: jax.Array,
    q_lens: jax.Array,
    table: jax.Array,
    *,
    decode: bool,
    window: int | None,
) -> tuple[jax.Array, jax.Array]:
    meta, _ = make_meta(
        starts=starts,
        q_lens=q_lens,
        page_table=table,
        num_tokens=q.shape[0],
        decode_only=decode,
        page_size=PAGE,
        num_pages=NUM_PAGES,
    )
    return paged_attention(q, k, v, kv, meta, scale=0.3, sliding_window=window)


def run(
    cases: list[Case], tokens: int, *, decode: bool, heads: int, kv_heads: int, window: int | None, seed: int
) -> None:
    """Fill a cache poisoned with NaN, run one step, compare every token and check that nothing else was
    written.
    """
    rng = np.random.default_rng(seed)
    shape = kv_layer_shape(NUM_PAGES, PAGE, kv_heads, DIM)
    cache = np.full(shape, np.nan, np.float32)
    free = list(rng.permutation(NUM_PAGES))
    table = rng.integers(0, NUM_PAGES, (ROWS, WIDTH)).astype(np.int32)  # stale entries point anywhere
    q = rng.standard_normal((tokens, heads, DIM)).astype(np.float32)
    new_k, new_v = (rng.standard_normal((tokens, kv_heads, DIM)).astype(np.float32) for _ in range(2))
    starts, q_lens = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32)
    expected, at, written = np.zeros((tokens, heads, DIM)), 0, set()
    for row, case in enumerate(cases):
        total = case.past + case.new
        pages = [free.pop() for _ in range(-(-total // PAGE))]
        table[row, : len(pages)] = pages
        starts[row], q_lens[row] = case.past, case.new
        past = rng.standard_normal((2, case.past, kv_heads, DIM)).astype(np.float32)
        for position in range(case.past):
            cache[pages[position // PAGE], position % PAGE] = past[:, position]
        span = slice(at, at + case.new)
        expected[span] = reference(
            q[span],
            np.concatenate([past[0], new_k[span]]),
            np.concatenate([past[1], new_v[span]]),
            case.past,
            0.3,
            window,
        )
        written |= {(pages[p // PAGE], p % PAGE) for p in range(case.past, total)}
        at += case.new

    out, after = step(q, new_k, new_v, cache, starts, q_lens, table, decode=decode, window=window)
    np.testing.assert_allclose(np.asarray(out)[:at], expected[:at], rtol=2e-5, atol=2e-5)
    after = np.asarray(after)
    for page in range(NUM_PAGES):
        for offset in range(PAGE):
            if (page, offset) not in written:
                np.testing.assert_array_equal(after[page, offset], cache[page, offset])
            else:
                assert np.isfinite(after[page, offset]).all()


rows = st.lists(st.builds(Case, past=st.integers(0, 30), new=st.integers(1, 20)), min_size=1, max_size=ROWS)


@settings(max_examples=40, deadline=None)
@given(rows, st.sampled_from([(4, 2), (3, 1)]), st.sampled_from([None, 1, 5]), st.integers(0, 2**31))
def test_mixed_batches(cases: list[Case], heads: tuple[int, int], window: int | None, seed: int) -> None:
    """Prefill chunks and decode rows of different lengths together."""
    run(cases, 96, decode=False, heads=heads[0], kv_heads=heads[1], window=window, seed=seed)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=ROWS),
    st.sampled_from([None, 1, 7]),
    st.integers(0, 2**31),
)
def test_decode_batches(pasts: list[int], window: int | None, seed: int) -> None:
    """One token a row, as decode programs have it; fewer rows than the bucket holds."""
    run([Case(p, 1) for p in pasts], ROWS, decode=True, heads=4, kv_heads=2, window=window, seed=seed)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bit_cache_keeps_exact_values(dtype: jnp.dtype) -> None:
    """A 16-bit cache is stored as raw uint16 and read back as what was written: one position attends to
    itself alone.
    """
    kv = allocate_kv(
        1,
        kv_layer_shape(2, PAGE, 1, DIM),
        np.dtype(dtype),
        jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    )[0]
    assert kv.dtype == kv_storage_dtype(np.dtype(dtype)) == np.uint16
    value = jnp.arange(1, 1 + DIM, dtype=dtype).reshape(1, 1, DIM) / jnp.asarray(3, dtype)
    value = jnp.concatenate([value] + [jnp.zeros_like(value)] * 3)
    meta, _ = make_meta(
        starts=jnp.zeros(4, jnp.int32),
        q_lens=jnp.array([1, 0, 0, 0], jnp.int32),
        page_table=jnp.ones((4, 2), jnp.int32),
        num_tokens=4,
        decode_only=True,
        page_size=PAGE,
        num_pages=2,
    )
    out, _ = paged_attention(value, value, value, kv, meta, scale=1.0)
    assert out.dtype == dtype
    np.testing.assert_array_equal(np.asarray(out[0]), np.asarray(value[0]))
