"""Paged attention on TPUs: programs for rows of one token call the kernel of `decode_attention`, others that
of `chunk_attention` or, where all heads share a latent, of `latent_attention`. What these cannot do, XLA
computes. Which of them it is is decided when a program is traced.
"""

from __future__ import annotations

from functools import partial
from typing import Any

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
from penstock.runtime.ops.kv_rows import num_heads_of, spread, widened, write_kv
from penstock.runtime.ops.tpu.chunk_attention import LEAST_BLOCK, block_for, chunk_attention
from penstock.runtime.ops.tpu.decode_attention import LANES, decode_attention, takes
from penstock.runtime.ops.tpu.latent_attention import latent_attention


def supports(
    q: Array | jax.ShapeDtypeStruct, kv: Array | jax.ShapeDtypeStruct, value_dim: int | None = None
) -> bool:
    """Say whether the kernel can handle the queries [R, H, D] of a decode step against such a cache, with
    this `value_dim`.
    """
    _, planes, _, _, _ = kv.shape
    return (
        q.dtype == jnp.bfloat16
        and kv.dtype in (jnp.bfloat16, jnp.int8)
        and (planes == 2 or num_heads_of(kv, q.shape[2]) == 1)
        and (planes == 1) == (value_dim is not None)
        and takes(kv)
    )


def tpu_paged_attention(
    q: Array,
    k_new: Array,
    v_new: Array | None,
    kv: Array,
    meta: AttentionMeta,
    options: AttentionOptions,
    *,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Compute `paged_attention` by the kernels for causal attention and shapes that they support, else in
    XLA. `interpret`: as `pallas_call` takes it, for tests.
    """
    check_cache(q, v_new, kv, options.value_dim, may_be_wider=True)
    is_decode = meta.block_tokens.shape[1] == 1
    is_latent = options.value_dim is not None
    dim = q.shape[2]
    wide = -(-dim // LANES) * LANES
    fits = is_decode or is_latent or block_for(q.shape[1], wide) >= LEAST_BLOCK
    cannot = options.slopes is not None or meta.reach is not None
    if cannot or not fits or not supports(q, kv, options.value_dim):
        return paged_attention(q, k_new, v_new, kv, meta, options, span=LONG_SPAN)
    kv = write_kv(kv, k_new, v_new, meta.write_slots)
    asked = spread(q).astype(q.dtype) if kv.dtype == jnp.int8 and not is_latent else q
    asked = widened(asked, wide)  # the zeros of queries and keys add nothing
    if not is_decode:
        attend = partial(latent_attention, value_dim=options.value_dim) if is_latent else chunk_attention
        chunks = attend(
            asked,
            kv,
            meta.starts,
            meta.q_lens,
            meta.page_table,
            options.sinks,
            scale=options.scale,
            window=options.sliding_window,
            chunk=options.chunk,
            softcap=options.softcap,
            interpret=interpret,
        )
        return chunks[..., :dim], kv
    ends = jnp.where(meta.q_lens > 0, meta.kv_lens, 0)
    oldest = jnp.maximum(oldest_visible(ends - 1, options.sliding_window, options.chunk), 0)
    out = decode_attention(
        asked,
        kv,
        oldest,
        ends,
        meta.page_table,
        options.sinks,
        scale=options.scale,
        softcap=options.softcap,
        value_dim=options.value_dim,
        interpret=interpret,
    )
    return out[..., :dim], kv
