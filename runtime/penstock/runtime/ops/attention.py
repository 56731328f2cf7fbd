"""Paged attention over a ragged batch: the metadata of a step, and the operation in plain XLA, which runs on
any backend and is the reference for the native kernels. How the cache lies in memory is in `kv_rows`.

A step's tokens lie flat, row after row: row r holds q_lens[r] consecutive query tokens (a prefill chunk, or
one decode token), the last of which is at position kv_lens[r] - 1 of its request. Keys and values of earlier
positions are read through the row's page table. The operation writes this step's keys and values first, so a
chunk attends to itself through the cache.

Method: queries are cut into blocks of `block_q` tokens of one row each. A loop walks over the key pages of
all blocks together with an online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao 2022). The work
depends on the longest row of the batch, not on the page table's width, so no program is compiled per context
length.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from penstock.runtime.ops.cache_spec import TPU_LANES
from penstock.runtime.ops.kv_rows import GPU_LANES, SCALE_BYTES, num_heads_of, read_kv, spread, write_kv


class KVSpan(NamedTuple):
    """How many key positions one iteration of the loop handles: at least a page of them."""

    decode: int
    """In programs for rows of one token."""
    prefill: int
    """In programs for prefill chunks, which have more queries for the same memory."""


SHORT_SPAN = KVSpan(64, 64)
"""What stays in a CPU's cache."""
LONG_SPAN = KVSpan(256, 128)
"""For accelerators, where an iteration costs several launches of kernels however little it reads."""
PREFILL_BLOCK_Q = 16
"""Query tokens per block in programs for prefill chunks."""
_MASKED = float(np.finfo(np.float32).min)
LEAST_TOTAL = 1e-30
"""What the sum of a softmax is at least, so that queries without a key become zeros."""


class AttentionMeta(NamedTuple):
    """Where every token of a step belongs. T tokens, R rows, P pages per row, B query blocks of Q tokens.

    Padding rows have q_lens 0. Padding tokens have a write slot past the cache's end, so nothing is written
    for them.
    """

    positions: Array  # int32[T] absolute position of each token in its request
    write_slots: Array  # int32[T] page * page_size + offset; num_pages * page_size for padding
    starts: Array  # int32[R] position of the row's first token of the step
    q_lens: Array  # int32[R] the row's tokens of the step
    kv_lens: Array  # int32[R] tokens of the row in the cache once this step is written
    page_table: Array  # int32[R, P]
    block_rows: Array  # int32[B] row of each query block
    block_tokens: Array  # int32[B, Q] index into the T tokens; any valid index where padded
    block_positions: Array  # int32[B, Q] position of that query; -1 where padded
    token_places: Array  # int32[T] where the token stands in the flattened [B * Q] blocks
    num_tokens: Array  # int32[] how many tokens are not padding; these come first
    token_rows: Array  # int32[T] row of each token; the last row for padding
    # These are None where no layer keeps state by slot, and the last two also where there are no snapshots.
    state_from: Array | None = None  # int32[R] entries that the rows go on from; past the end: zeros
    state_to: Array | None = None  # int32[R] entries that they write; past the end: padding
    state_cut: Array | None = None  # int32[R] after how many tokens a row's state is kept too; 0: not
    state_cut_to: Array | None = None  # int32[R] the entries that keep it; past the end: none
    # None where each token sees nothing behind it; else tokens of an image see those of the same image.
    reach: Array | None = None  # int32[T] the last position that each token sees, in this step; no smaller
    # than its own, nor than that of the token before it in its row


class AttentionOptions(NamedTuple):
    """What differs between the layers of models."""

    scale: float
    """Queries are multiplied by it."""
    sliding_window: int | None = None
    """With w, a token attends to itself and the w - 1 tokens before it."""
    softcap: float | None = None
    """With c, a score s becomes c * tanh(s / c) (Gemma 2)."""
    sinks: Array | None = None
    """float32 [H]: one more score without a value in each softmax (gpt-oss)."""
    chunk: int | None = None
    """With c, a token attends only to positions of its own chunk, position // c (Llama 4)."""
    slopes: Array | None = None
    """float32 [H]: a score is lowered by the head's slope for each position that the key is before the query
    (ALiBi)."""
    value_dim: int | None = None
    """With d, the cache holds keys only, there are no new values, and the value of a position is the first d
    channels of its key (latent attention)."""


class AttentionOp(Protocol):
    """`paged_attention` as models call it; kv is the layer's cache, which models do not look into."""

    def __call__(
        self,
        q: Array,
        k_new: Array,
        v_new: Array | None,
        kv: Array,
        meta: AttentionMeta,
        options: AttentionOptions,
    ) -> tuple[Array, Array]: ...


def make_meta(
    *,
    starts: Array,
    q_lens: Array,
    page_table: Array,
    num_tokens: int,
    decode_only: bool,
    page_size: int,
    num_pages: int,
    state_from: Array | None = None,
    state_to: Array | None = None,
    state_cut: Array | None = None,
    state_cut_to: Array | None = None,
) -> AttentionMeta:
    """Expand per-row lengths to per-token and per-block indices, on the device.

    starts int32[R]: position of each row's first token of the step; q_lens int32[R]: number of its tokens (0:
    padding row); page_table int32[R, P]; num_tokens: T, static. `decode_only` promises that T == R and that
    row i has token i, or none. The others are as in `AttentionMeta`.
    """
    num_rows = q_lens.shape[0]
    block_q = 1 if decode_only else PREFILL_BLOCK_Q
    ends = jnp.cumsum(q_lens)
    firsts = ends - q_lens
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    token_rows = _rows_of(token, ends, decode_only=decode_only)
    real = token < ends[-1]
    positions = jnp.where(real, starts[token_rows] + token - firsts[token_rows], 0)
    page = page_table[token_rows, positions // page_size]
    write_slots = jnp.where(real, page * page_size + positions % page_size, num_pages * page_size)

    row_blocks = (q_lens + block_q - 1) // block_q
    block_ends = jnp.cumsum(row_blocks)
    block_firsts = block_ends - row_blocks
    # A block holds at least one token, and only a row's last block is not full.
    num_blocks = num_rows if decode_only else min(num_tokens, num_tokens // block_q + num_rows)
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    block_rows = _rows_of(block, block_ends, decode_only=decode_only)
    lane = jnp.arange(block_q, dtype=jnp.int32)
    offsets = ((block - block_firsts[block_rows]) * block_q)[:, None] + lane[None, :]
    used = (block < block_ends[-1])[:, None] & (offsets < q_lens[block_rows][:, None])
    block_tokens = jnp.where(used, firsts[block_rows][:, None] + offsets, 0)
    block_positions = jnp.where(used, starts[block_rows][:, None] + offsets, -1)
    token_offsets = token - firsts[token_rows]
    token_places = jnp.where(
        real, (block_firsts[token_rows] + token_offsets // block_q) * block_q + token_offsets % block_q, 0
    )
    return AttentionMeta(
        positions,
        write_slots,
        starts,
        q_lens,
        starts + q_lens,
        page_table,
        block_rows,
        block_tokens,
        block_positions,
        token_places,
        ends[-1],
        token_rows,
        state_from,
        state_to,
        state_cut,
        state_cut_to,
    )


def _rows_of(index: Array, ends: Array, *, decode_only: bool) -> Array:
    """Find the row of each token, or block, of these indices, where row r has those before ends[r]; the last
    row for padding.
    """
    last = ends.shape[0] - 1
    if decode_only:  # a search is a loop of launches on a GPU
        return jnp.where(index < ends[-1], index, last)
    return jnp.minimum(jnp.searchsorted(ends, index, side="right"), last).astype(jnp.int32)


def blocks_of(q_lens: Array, num_tokens: int, block: int) -> tuple[Array, Array, Array]:
    """Tell how a step of `num_tokens` tokens, with q_lens int32[R] of each row, is cut into blocks: of each
    block int32[B] its row, how many tokens of the row are before it, and how many it has; 0 for padding.
    """
    num_rows = q_lens.shape[0]
    of_row = (q_lens + (block - 1)) // block
    ends = jnp.cumsum(of_row)
    number = jnp.arange(min(num_tokens, num_tokens // block + num_rows), dtype=jnp.int32)
    rows = jnp.minimum((number[:, None] >= ends[None, :]).sum(axis=1, dtype=jnp.int32), num_rows - 1)
    before = (number - (ends - of_row)[rows]) * block
    counts = jnp.clip(q_lens[rows] - before, 0, block)
    return rows, before, counts


def with_pages(meta: AttentionMeta, page_table: Array, page_size: int, num_pages: int) -> AttentionMeta:
    """Return the metadata of the same step for layers of another group, whose cache has `num_pages` pages."""
    real = jnp.arange(meta.positions.shape[0], dtype=jnp.int32) < meta.num_tokens
    page = page_table[meta.token_rows, meta.positions // page_size]
    slots = jnp.where(real, page * page_size + meta.positions % page_size, num_pages * page_size)
    return meta._replace(page_table=page_table, write_slots=slots)


def oldest_visible(positions: Array, sliding_window: int | None, chunk: int | None) -> Array:
    """Return the first position that each of `positions` attends to; same shape and dtype."""
    oldest = jnp.zeros_like(positions)
    if sliding_window is not None:
        oldest = jnp.maximum(oldest, positions - (sliding_window - 1))
    if chunk is not None:
        oldest = jnp.maximum(oldest, positions - positions % chunk)
    return oldest


def paged_attention(
    q: Array,
    k_new: Array,
    v_new: Array | None,
    kv: Array,
    meta: AttentionMeta,
    options: AttentionOptions,
    *,
    span: KVSpan = SHORT_SPAN,
) -> tuple[Array, Array]:
    """Compute attention of a ragged batch against its paged cache, in XLA: causal, or as far ahead as
    `meta.reach` says. Also write the cache.

    q [T, H, D], k_new and v_new [T, KH, D] in the model's dtype, after RoPE; v_new is None where
    `options.value_dim` is set. kv as in `kv_layer_shape`, in the model's dtype, as `kv_storage_dtype` stores
    that, or in int8. In a cache of int8 a token
    attends to the quantized keys and values, also to its own, so it does not matter in which step they were
    written. H is a multiple of KH. Returns out [T, H, D], or [T, H, value_dim], in q's dtype (padding tokens
    hold finite values) and the updated cache.
    """
    check_cache(q, v_new, kv, options.value_dim, may_be_wider=True)
    kv = write_kv(kv, k_new, v_new, meta.write_slots)
    peak, total, acc = sums_over_keys(q, kv, meta, options, span=span)
    if options.sinks is not None:
        sink = options.sinks.reshape(1, peak.shape[1], -1, 1)
        top = jnp.maximum(peak, sink)
        fade = jnp.exp(peak - top)
        total = total * fade + jnp.exp(sink - top)
        acc = acc * fade[..., None]
    return by_token(acc / jnp.maximum(total, LEAST_TOTAL)[..., None], meta).astype(q.dtype), kv


class Sums(NamedTuple):
    """What a softmax has added up over some keys: of B blocks of Q queries, and of KH heads of keys with G
    heads of queries each. Those over other keys can be joined with it.
    """

    peak: Array  # float32[B, KH, G, Q] the largest score; the least float32 where no key was seen
    total: Array  # float32[B, KH, G, Q] the sum of exp(score - peak)
    acc: Array  # float32[B, KH, G, Q, V] the sum of the values, each times its exp(score - peak)


class SomePages(NamedTuple):
    """Those of each row's pages that attention looks at, where it does not look at all."""

    table: Array  # int32[R, P] the pages; behind `num_pages` of them any valid ones
    places: Array  # int32[R, P] which of the row's pages each is, in rising order; P behind them
    num_pages: Array  # int32[R] how many there are


def sums_over_keys(
    q: Array,
    kv: Array,
    meta: AttentionMeta,
    options: AttentionOptions,
    *,
    span: KVSpan,
    some: SomePages | None = None,
) -> Sums:
    """Add up scores and values over the keys of a cache that has this step's already, without the sinks. The
    arguments are those of `paged_attention`. some: the pages to look at; None: all.
    """
    scale, sliding_window, softcap, _, chunk, slopes, value_dim = options
    _, num_heads, dim = q.shape
    page_size, kv_heads = kv.shape[3], num_heads_of(kv, dim)
    out_dim = dim if value_dim is None else value_dim
    group = num_heads // kv_heads

    num_blocks, block_q = meta.block_tokens.shape
    pages_per_iteration = max(1, (span.decode if block_q == 1 else span.prefill) // page_size)
    width = pages_per_iteration * page_size
    tables = (meta.page_table if some is None else some.table)[meta.block_rows]
    padding = ((0, 0), (0, -tables.shape[1] % pages_per_iteration))
    places = None
    if some is not None:
        places = jnp.pad(some.places[meta.block_rows], padding, constant_values=tables.shape[1])
    tables = jnp.pad(tables, padding)
    wide = spread(q) if kv.dtype == jnp.int8 and value_dim is None else q.astype(jnp.float32)
    queries = wide[meta.block_tokens].reshape(num_blocks, block_q, kv_heads, group, dim) * scale
    q_pos = meta.block_positions
    newest = q_pos if meta.reach is None else jnp.where(q_pos >= 0, meta.reach[meta.block_tokens], -1)
    kv_lens = meta.kv_lens[meta.block_rows]
    oldest = oldest_visible(q_pos, sliding_window, chunk)
    lanes = (num_blocks, kv_heads, group, block_q)

    def body(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, acc = carry
        pages = lax.dynamic_slice_in_dim(tables, i * pages_per_iteration, pages_per_iteration, axis=1)
        block = read_kv(kv[pages], q.dtype, dim)  # [B, pages, 1 or 2, KH, page_size, D]
        if places is None:
            k_pos = (i * width + jnp.arange(width, dtype=jnp.int32))[None]
        else:
            which = lax.dynamic_slice_in_dim(places, i * pages_per_iteration, pages_per_iteration, axis=1)
            k_pos = which[:, :, None] * page_size + jnp.arange(page_size, dtype=jnp.int32)[None, None]
            k_pos = k_pos.reshape(num_blocks, width)
        # Values past a row's end, or before everything that a block attends to, may belong to another
        # request, or be NaN, so they must not even be multiplied by zero.
        held = (k_pos < kv_lens[:, None]) & (k_pos >= oldest[:, :1])
        held = held.reshape(num_blocks, pages_per_iteration, 1, 1, page_size, 1)
        block = jnp.where(held, block, 0.0)
        keys, values = block[:, :, 0], block[:, :, -1, ..., :out_dim]
        scores = jnp.einsum("bqhgd,bphkd->bhgqpk", queries, keys, precision=lax.Precision.HIGHEST)
        scores = scores.reshape(*lanes, width)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        if slopes is not None:
            back = (k_pos[:, None, :] - q_pos[:, :, None]).astype(jnp.float32)[:, None, None]
            scores = scores + slopes.reshape(1, kv_heads, group, 1, 1) * back
        seen = (k_pos[:, None, :] <= newest[:, :, None]) & (k_pos[:, None, :] >= oldest[:, :, None])
        seen = seen[:, None, None, :, :]
        scores = jnp.where(seen, scores, _MASKED)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0.0)
        fade = jnp.exp(peak - new_peak)
        acc = acc * fade[..., None] + jnp.einsum(
            "bhgqpk,bphkd->bhgqd",
            weights.reshape(*lanes, pages_per_iteration, page_size),
            values,
            precision=lax.Precision.HIGHEST,
        )
        return new_peak, total * fade + weights.sum(axis=-1), acc

    init = (
        jnp.full(lanes, _MASKED, jnp.float32),
        jnp.zeros(lanes, jnp.float32),
        jnp.zeros((*lanes, out_dim), jnp.float32),
    )
    if some is None:
        first = jnp.where(q_pos >= 0, oldest, jnp.int32(2**30)).min() // width
        end = (newest.max() + width) // width
    else:
        first = jnp.int32(0)
        end = (some.num_pages.max() + pages_per_iteration - 1) // pages_per_iteration
    return Sums(*lax.fori_loop(first, end, body, init))


def by_token(of_blocks: Array, meta: AttentionMeta) -> Array:
    """Return values of queries in their blocks [B, KH, G, Q, ...] by token and head [T, H, ...]."""
    num_blocks, kv_heads, group, block_q, *rest = of_blocks.shape
    flat = jnp.moveaxis(of_blocks, 3, 1).reshape(num_blocks * block_q, kv_heads * group, *rest)
    return flat[meta.token_places]


def check_cache(
    q: Array, v_new: Array | None, kv: Array, value_dim: int | None, *, may_be_wider: bool = False
) -> None:
    """Raise ValueError unless arguments and cache agree on how wide KV rows are, and on where values are.
    may_be_wider: whether rows of floats may have zeros behind the channels of a head, and those of int8 may
    lie in columns (`CacheSpec.laid_out`).
    """
    is_int8 = kv.dtype == jnp.int8
    width = q.shape[2] + (SCALE_BYTES if is_int8 else 0)
    columns = {TPU_LANES} if q.shape[2] % GPU_LANES else {TPU_LANES, GPU_LANES}
    is_laid_out = kv.shape[4] in columns if is_int8 else kv.shape[4] > width
    if kv.shape[4] != width and not (may_be_wider and is_laid_out):
        raise ValueError(
            f"the KV rows of a cache of {kv.dtype} must be {width} wide for heads of {q.shape[2]}, "
            f"not {kv.shape[4]}"
        )
    keys_only = kv.shape[1] == 1
    if keys_only != (v_new is None) or keys_only != (value_dim is not None):
        raise ValueError(
            f"a cache of shape {kv.shape} needs value_dim and no v_new if it holds keys only, else only v_new"
        )
