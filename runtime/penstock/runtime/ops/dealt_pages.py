"""Paged attention where the pages of a cache are dealt over the N devices of a mesh: page p lies on device
p % N, and is page p // N there (`LatentKV.pieces`).

Keys of latent attention are the same for all heads. So where heads are cut, each device would have all of
them. Dealt, each device has a part of every row's pages, attends to them with the queries of all heads, and
gets back what the other devices have added up for its own heads. What is joined are the sums of a softmax, so
the result is that of all keys. Which pages a row has decides in which order they are added.

The queries are joined by a gather, and the sums are exchanged by an all-to-all.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from penstock.runtime.ops.attention import (
    LEAST_TOTAL,
    AttentionMeta,
    AttentionOptions,
    KVSpan,
    SomePages,
    by_token,
    check_cache,
    sums_over_keys,
)
from penstock.runtime.ops.collectives import gathered
from penstock.runtime.ops.kv_rows import write_kv


def dealt_attention(
    q: Array,
    k_new: Array,
    v_new: Array | None,
    kv: Array,
    meta: AttentionMeta,
    options: AttentionOptions,
    *,
    axis: str,
    pieces: int,
    span: KVSpan,
) -> tuple[Array, Array]:
    """Compute `paged_attention` inside a mesh with so many devices along `axis`. q has the device's own
    heads, k_new is the same on all devices, kv has the device's own pages, and the pages of `meta` are those
    of all.
    """
    check_cache(q, v_new, kv, options.value_dim, may_be_wider=True)
    if options.sinks is not None or options.slopes is not None:
        raise ValueError("sinks and slopes are cut by heads, and dealt pages need those of all heads")
    device, page_size = lax.axis_index(axis), kv.shape[3]
    page, offset = meta.write_slots // page_size, meta.write_slots % page_size
    own_slots = jnp.where(
        page % pieces == device, page // pieces * page_size + offset, kv.shape[0] * page_size
    )
    kv = write_kv(kv, k_new, v_new, own_slots)
    of_all_heads = gathered(q, axis)
    some = own_pages(meta, device, pieces, page_size)
    sums = sums_over_keys(of_all_heads, kv, meta, options, span=span, some=some)
    found = by_token(jnp.concatenate([sums.acc, sums.total[..., None], sums.peak[..., None]], axis=-1), meta)
    num_tokens, own_heads = q.shape[:2]
    by_device = found.reshape(num_tokens, pieces, own_heads, found.shape[-1])
    parts = lax.all_to_all(by_device, axis, split_axis=1, concat_axis=0)  # [N, T, own heads, V + 2]
    acc, total, peak = parts[..., :-2], parts[..., -2], parts[..., -1]
    fade = jnp.exp(peak - peak.max(axis=0, keepdims=True))
    total = (total * fade).sum(axis=0)
    out = (acc * fade[..., None]).sum(axis=0) / jnp.maximum(total, LEAST_TOTAL)[..., None]
    return out.astype(q.dtype), kv


def own_pages(meta: AttentionMeta, device: Array, pieces: int, page_size: int) -> SomePages:
    """Return those of each row's pages that lie on the device int32[], with the numbers that they have
    there.
    """
    table = meta.page_table
    num_rows, width = table.shape
    place = jnp.arange(width, dtype=jnp.int32)[None]
    # Entries past a row's end are stale.
    held = (place * page_size < meta.kv_lens[:, None]) & (meta.q_lens > 0)[:, None]
    is_own = held & (table % pieces == device)
    at = (
        jnp.arange(num_rows, dtype=jnp.int32)[:, None],
        jnp.where(is_own, jnp.cumsum(is_own, axis=1, dtype=jnp.int32) - 1, width),
    )
    places = jnp.broadcast_to(place, table.shape)
    return SomePages(
        table=jnp.zeros_like(table).at[at].set(table // pieces, mode="drop"),
        places=jnp.full_like(table, width).at[at].set(places, mode="drop"),
        num_pages=is_own.sum(axis=1, dtype=jnp.int32),
    )
