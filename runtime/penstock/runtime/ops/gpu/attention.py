"""Paged attention on GPUs: decode programs call the kernel of `decode_attention`, and what it cannot do, XLA
computes. Which of the two is decided when a program is traced.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from penstock.runtime.ops.attention import (
    LONG_SPAN,
    AttentionMeta,
    AttentionOptions,
    check_cache,
    oldest_visible,
    paged_attention,
)
from penstock.runtime.ops.gpu.decode_attention import decode_attention, takes
from penstock.runtime.ops.kv_rows import write_kv


def supports(
    q: Array | jax.ShapeDtypeStruct, kv: Array | jax.ShapeDtypeStruct, value_dim: int | None = None
) -> bool:
    """Say whether the kernel can handle the queries [R, H, D] of a decode step against such a cache, with
    this `value_dim`.
    """
    _, planes, kv_heads, page_size, dim = kv.shape
    return (
        q.dtype == kv.dtype == jnp.bfloat16
        and planes == 2
        and value_dim is None
        and takes(page_size, dim, q.shape[1] // kv_heads)
    )


def gpu_paged_attention(
    q: Array,
    k_new: Array,
    v_new: Array | None,
    kv: Array,
    meta: AttentionMeta,
    options: AttentionOptions,
    *,
    interpreted: bool = False,
) -> tuple[Array, Array]:
    """Compute `paged_attention` by the kernel in programs for rows of one token and shapes that it supports,
    else in XLA. `interpreted`: as Pallas' interpreter wants it, for tests.
    """
    check_cache(q, v_new, kv, options.value_dim)
    is_decode = meta.block_tokens.shape[1] == 1 and options.slopes is None
    if not is_decode or not supports(q, kv, options.value_dim):
        return paged_attention(q, k_new, v_new, kv, meta, options, span=LONG_SPAN)
    kv = write_kv(kv, k_new, v_new, meta.write_slots)
    ends = jnp.where(meta.q_lens > 0, meta.kv_lens, 0)
    oldest = oldest_visible(ends - 1, options.sliding_window, options.chunk)
    out = decode_attention(
        q,
        kv,
        oldest,
        ends,
        meta.page_table,
        options.sinks,
        scale=options.scale,
        softcap=options.softcap,
        interpreted=interpreted,
    )
    return out, kv
