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
from penstock.runtime.ops.both_ways import attend_both_ways, attend_natively, pages_of_texts

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


@pytest.mark.parametrize("natively", [False, True])
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=ROWS).filter(lambda some: sum(some) <= TOKENS),
    window=st.sampled_from([None, 1, 9, 17]),
    seed=st.integers(0, 99),
)
def test_is_what_it_is_defined_as(natively: bool, lengths: list[int], window: int | None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((TOKENS, n, DIM)) for n in (HEADS, KV_HEADS, KV_HEADS))
    k[sum(lengths) :] = v[sum(lengths) :] = np.nan  # what stands in padding is not read
    made = attend(q, k, v, np.array(lengths + [0] * (ROWS - len(lengths)), np.int32), window, natively)
    used = slice(0, sum(lengths))
    np.testing.assert_allclose(made[used], defined(q, k, v, lengths, window)[used], atol=2e-6)


def attend(q: Any, k: Any, v: Any, lengths: np.ndarray, window: int | None, natively: bool) -> np.ndarray:
    wide = (x.astype(np.float32) for x in (q, k, v))
    return np.asarray(attend_in_jax(*wide, lengths, window, natively))


@partial(jax.jit, static_argnums=(4, 5))
def attend_in_jax(q: Any, k: Any, v: Any, lengths: Any, window: int | None, natively: bool) -> Any:
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
    pages = pages_of_texts(TOKENS, ROWS, KV_HEADS, DIM, np.dtype(np.float32))
    return attend_natively(q, k, v, pages, meta, options)[0]
