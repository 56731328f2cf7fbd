"""Attention of encoders: each token attends to all tokens of its text, before it and behind it. There is no
cache, because a text is computed in one step: in plain XLA, or by the native kernels of paged attention, to
which the keys and values of a layer are a cache of their own.

The texts of a step lie flat, one behind the other, and no text is padded to the length of another. Queries
are cut into the blocks of `AttentionMeta`. A loop walks over the keys of all blocks' texts together, with an
online softmax (Milakov and Gimelshein 2018), so that memory grows with the tokens and not with their square.
With a window, a block begins at the first key that one of its queries sees, so the work is that of the
window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from penstock.runtime.ops.attention import AttentionMeta, AttentionOptions
from penstock.runtime.ops.kv_rows import kv_storage_dtype
from penstock.runtime.ops.native.attention import native_paged_attention, supports

WIDTH = 64
"""How many keys one iteration handles."""
PAGE_SIZE = 16
"""Positions of a page of what the native kernels read. Pages are small, because each text fills its own."""
_MASKED = float(np.finfo(np.float32).min)


class DistanceScores(NamedTuple):
    """What is added to the score of a query and a key for the distance between them."""

    entries: Array  # int32[2 * N - 1] the entry of each distance, query's position minus key's, from 1 - N on
    by_queries: Array | None  # float32[T, H, entries] what it is for each query
    by_keys: Array | None  # float32[T, H, entries] what it is for each key


def attend_both_ways(
    q: Array,
    k_new: Array,
    v_new: Array | None,
    kv: Any,
    meta: AttentionMeta,
    options: AttentionOptions,
    *,
    distances: DistanceScores | None = None,
) -> tuple[Array, Any]:
    """Compute attention as `AttentionOp` has it, to all tokens of a row, which is a whole text.

    q [T, H, D], k_new and v_new [T, KH, D] -> [T, H, D] in q's dtype. There is no cache, so `kv` is returned
    as it is. With a window w, a token attends to those that are fewer than w positions away on either side.
    Padding tokens hold finite values.
    """
    assert v_new is not None, "encoders have values"
    k, v = k_new, v_new
    num_tokens, num_heads, dim = q.shape
    kv_heads = k.shape[1]
    group = num_heads // kv_heads
    num_blocks, block_q = meta.block_tokens.shape
    firsts = (jnp.cumsum(meta.q_lens) - meta.q_lens)[meta.block_rows]
    lengths = meta.q_lens[meta.block_rows]
    q_pos = meta.block_positions
    window = options.sliding_window
    begin, count = jnp.zeros_like(firsts), lengths
    if window is not None:
        begin = jnp.maximum(jnp.where(q_pos[:, 0] >= 0, q_pos[:, 0], 0) - (window - 1), 0)
        count = jnp.minimum(lengths - begin, block_q + 2 * (window - 1))
    queries = q.astype(jnp.float32)[meta.block_tokens]
    queries = queries.reshape(num_blocks, block_q, kv_heads, group, dim) * np.float32(options.scale)
    lanes = (num_blocks, kv_heads, group, block_q)

    def body(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, acc = carry
        k_pos = begin[:, None] + i * WIDTH + jnp.arange(WIDTH, dtype=jnp.int32)[None]
        held = k_pos < lengths[:, None]
        at = jnp.clip(firsts[:, None] + k_pos, 0, num_tokens - 1)
        keys, values = k[at].astype(jnp.float32), v[at].astype(jnp.float32)
        # What is no number must not be multiplied by zero: another text may have it.
        values = jnp.where(held[:, :, None, None], values, 0.0)
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", queries, keys, precision=lax.Precision.HIGHEST)
        apart = q_pos[:, :, None] - k_pos[:, None, :]
        if distances is not None:
            added = _of_distances(distances, apart, meta.block_tokens, at)
            scores = scores + added.reshape(*lanes, WIDTH)
        seen = held[:, None, :] & (q_pos[:, :, None] >= 0)
        if window is not None:
            seen = seen & (jnp.abs(apart) < window)
        seen = seen[:, None, None]
        scores = jnp.where(seen, scores, _MASKED)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0.0)
        fade = jnp.exp(peak - new_peak)
        product = jnp.einsum("bhgqk,bkhd->bhgqd", weights, values, precision=lax.Precision.HIGHEST)
        return new_peak, total * fade + weights.sum(axis=-1), acc * fade[..., None] + product

    init = (
        jnp.full(lanes, _MASKED, jnp.float32),
        jnp.zeros(lanes, jnp.float32),
        jnp.zeros((*lanes, dim), jnp.float32),
    )
    used = jnp.where(q_pos[:, 0] >= 0, count, 0)
    _, total, acc = lax.fori_loop(0, (used.max() + WIDTH - 1) // WIDTH, body, init)
    out = (acc / jnp.maximum(total, 1e-30)[..., None]).transpose(0, 3, 1, 2, 4)
    out = out.reshape(num_blocks * block_q, num_heads, dim)
    return out[meta.token_places].astype(q.dtype), kv


def pages_of_texts(num_tokens: int, num_rows: int, kv_heads: int, dim: int, dtype: np.dtype[Any]) -> Array:
    """Make the pages that `attend_natively` writes keys and values into, which layers may hand to each other:
    enough for `num_tokens` tokens in `num_rows` texts of a model in `dtype`, filled with zeros.
    """
    num_pages = min(num_tokens, num_tokens // PAGE_SIZE + num_rows)
    return jnp.zeros((num_pages, 2, kv_heads, PAGE_SIZE, dim), kv_storage_dtype(dtype))


def attend_natively(
    q: Array, k_new: Array, v_new: Array | None, kv: Array, meta: AttentionMeta, options: AttentionOptions
) -> tuple[Array, Array]:
    """Compute `attend_both_ways` by the native kernels of a CPU. `kv`: `pages_of_texts`, of which the pages
    of a text lie one behind the other.
    """
    counts = (meta.q_lens + PAGE_SIZE - 1) // PAGE_SIZE
    width = (q.shape[0] + PAGE_SIZE - 1) // PAGE_SIZE
    table = (jnp.cumsum(counts) - counts)[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    reach = (meta.q_lens - 1)[meta.token_rows]
    if options.sliding_window is not None:
        reach = jnp.minimum(reach, meta.positions + (options.sliding_window - 1))
    of_texts = meta._replace(
        starts=jnp.zeros_like(meta.starts),
        page_table=jnp.minimum(table, kv.shape[0] - 1).astype(jnp.int32),
        reach=reach.astype(jnp.int32),
    )
    return native_paged_attention(q, k_new, v_new, kv, of_texts, options)


def can_attend_natively(num_heads: int, dim: int, dtype: np.dtype[Any]) -> bool:
    """Say whether the native kernels can attend with so many heads of `dim` channels in `dtype`."""
    cache = jax.ShapeDtypeStruct((1, 2, 1, PAGE_SIZE, dim), kv_storage_dtype(dtype))
    return supports(jax.ShapeDtypeStruct((1, num_heads, dim), dtype), cache)


def _of_distances(scores: DistanceScores, apart: Array, q_at: Array, k_at: Array) -> Array:
    """Compute what is added to the scores of the queries of tokens `q_at` int32[B, Q] and the keys of tokens
    `k_at` int32[B, K], `apart` int32[B, Q, K] positions: float32[B, H, Q, K].
    """
    longest = (scores.entries.shape[0] - 1) // 2
    entry = scores.entries[jnp.clip(apart + longest, 0, 2 * longest)]
    added = jnp.zeros((), jnp.float32)
    if scores.by_queries is not None:
        of_queries = scores.by_queries[q_at].transpose(0, 2, 1, 3)  # [B, H, Q, entries]
        added = added + jnp.take_along_axis(of_queries, entry[:, None], axis=3)
    if scores.by_keys is not None:
        of_keys = scores.by_keys[k_at].transpose(0, 2, 3, 1)  # [B, H, entries, K]
        added = added + jnp.take_along_axis(of_keys, entry[:, None], axis=2)
    return added
