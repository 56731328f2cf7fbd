"""Attention of encoders, in XLA and by the native kernels, compared with its definition in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.ops.attention import AttentionOptions, make_meta
from penstock.runtime.ops.both_ways import (
    attend_both_ways,
    attend_natively,
    can_attend_natively,
    pages_of_texts,
)

TOKENS, ROWS, HEADS, KV_HEADS, DIM = 96, 6, 4, 2, 16


def defined(q: Any, k: Any, v: Any, lengths: list[int], window: int | None) -> np.ndarray:
    """Compute the definition, text by text, in float64 [T, HEADS, DIM]; 0 for padding."""
    out, begin = np.zeros((TOKENS, HEADS, DIM)), 0
    for length in lengths:
        of_text = slice(begin, begin + length)
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = q[of_text, head] @ k[of_text, kv_head].T / 4
            apart = np.abs(np.arange(length)[:, None] - np.arange(length)[None])
            scores[apart >= (window or length)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[of_text, head] = weights @ v[of_text, kv_head] / weights.sum(axis=1, keepdims=True)
        begin += length
    return out


@pytest.mark.parametrize(
    ("natively", "dtype", "error"),
    [(False, "float32", 2e-6), (True, "float32", 2e-6), (True, "bfloat16", 0.03)],
)
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=ROWS).filter(lambda some: sum(some) <= TOKENS),
    window=st.sampled_from([None, 1, 9, 17]),
    seed=st.integers(0, 99),
)
def test_is_what_it_is_defined_as(
    natively: bool, dtype: str, error: float, lengths: list[int], window: int | None, seed: int
) -> None:
    """In bfloat16 the weights of values, which are below 4, and the result are rounded by up to 2^-9."""
    rng = np.random.default_rng(seed)
    drawn = (rng.standard_normal((TOKENS, n, DIM)) for n in (HEADS, KV_HEADS, KV_HEADS))
    q, k, v = (np.asarray(jnp.asarray(x, dtype), np.float64) for x in drawn)
    k[sum(lengths) :] = v[sum(lengths) :] = np.nan  # what stands in padding is not read
    padded = np.array(lengths + [0] * (ROWS - len(lengths)), np.int32)
    made = attend(*(jnp.asarray(x, dtype) for x in (q, k, v)), padded, window, natively)
    used = slice(0, sum(lengths))
    np.testing.assert_allclose(
        np.asarray(made, np.float64)[used], defined(q, k, v, lengths, window)[used], atol=error
    )


@pytest.mark.parametrize(
    ("dim", "dtype", "can"),
    [(16, "float32", True), (32, "bfloat16", True), (32, "float16", False), (12, "float32", False)],
)
def test_what_the_native_kernels_can_attend_with(dim: int, dtype: str, can: bool) -> None:
    assert can_attend_natively(HEADS, dim, np.dtype(jnp.dtype(dtype))) == can


@partial(jax.jit, static_argnums=(4, 5))
def attend(q: Any, k: Any, v: Any, lengths: Any, window: int | None, natively: bool) -> Any:
    meta = make_meta(
        starts=jnp.zeros(ROWS, jnp.int32),
        q_lens=lengths,
        page_table=jnp.zeros((ROWS, 1), jnp.int32),
        num_tokens=TOKENS,
        decode_only=False,
        page_size=TOKENS,
        num_pages=1,
    )
    options = AttentionOptions(scale=0.25, sliding_window=window)
    if not natively:
        return attend_both_ways(q, k, v, None, meta, options)[0]
    pages = pages_of_texts(TOKENS, ROWS, KV_HEADS, DIM, q.dtype)
    return attend_natively(q, k, v, pages, meta, options)[0]
