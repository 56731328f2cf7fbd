"""Paged attention on GPUs: rows of one token have the kernel of `decode_attention`, rows of several tokens
that of `chunk_attention`, and what these cannot do, XLA computes. Which of them a program calls is decided
when it is traced.
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
from penstock.runtime.ops.gpu.chunk_attention import chunk_attention, takes_int8
from penstock.runtime.ops.gpu.decode_attention import decode_attention, takes
from penstock.runtime.ops.gpu.forms import ON_HOPPER, GpuForm
from penstock.runtime.ops.gpu.tiles import SWIZZLE, TILE
from penstock.runtime.ops.kv_rows import GPU_LANES, num_heads_of, spread, write_kv


def supports(
    q: Array | jax.ShapeDtypeStruct,
    kv: Array | jax.ShapeDtypeStruct,
    value_dim: int | None = None,
    *,
    form: GpuForm = ON_HOPPER,
) -> bool:
    """Say whether the kernels can handle queries [T, H, D] against such a cache, with this `value_dim`.
    `form`: as `decode_attention` takes it.
    """
    _, planes, _, page_size, width = kv.shape
    is_int8 = kv.dtype == jnp.int8
    dim = q.shape[2] if is_int8 else width
    return (
        q.dtype == jnp.bfloat16
        and (width == GPU_LANES if is_int8 else kv.dtype == jnp.bfloat16)
        and planes == 2
        and value_dim is None
        and takes(page_size, dim, q.shape[1] // num_heads_of(kv, dim), form=form, is_int8=is_int8)
    )


def sizes_supported(form: GpuForm) -> str:
    """Name the sizes of pages and heads that `supports` accepts, for messages."""
    heads = {
        page: [str(dim) for dim in range(SWIZZLE, 4 * SWIZZLE + 1, SWIZZLE) if takes(page, dim, 1, form=form)]
        for page in (TILE, 2 * TILE)
    }
    return " or ".join(
        f"a page_size of {page} with heads of {', '.join(dims)}" for page, dims in heads.items() if dims
    )


def gpu_paged_attention(
    q: Array,
    k_new: Array,
    v_new: Array | None,
    kv: Array,
    meta: AttentionMeta,
    options: AttentionOptions,
    *,
    form: GpuForm = ON_HOPPER,
    interpreted: bool = False,
) -> tuple[Array, Array]:
    """Compute `paged_attention` by the kernels for causal attention and shapes that they support, else in
    XLA. `form`: as `decode_attention` takes it. `interpreted`: as Pallas' interpreter wants it, for
    tests.
    """
    has_chunks, is_int8 = meta.block_tokens.shape[1] > 1, kv.dtype == jnp.int8
    check_cache(q, v_new, kv, options.value_dim, may_be_wider=is_int8)
    cannot = options.slopes is not None or meta.reach is not None
    if is_int8 and has_chunks:  # XLA computes all rows of a step whose chunks have no kernel
        cannot = cannot or not takes_int8(kv.shape[3], q.shape[2], form=form)
    if cannot or not supports(q, kv, options.value_dim, form=form):
        return paged_attention(q, k_new, v_new, kv, meta, options, span=LONG_SPAN)
    kv = write_kv(kv, k_new, v_new, meta.write_slots)
    if is_int8:
        q = spread(q).astype(q.dtype)

    def of_single(q: Array, kv_lens: Array) -> Array:
        """Attend with one query of each row, [R, H, D], after so many tokens, int32[R]; 0 for others."""
        oldest = oldest_visible(kv_lens - 1, options.sliding_window, options.chunk)
        out: Array = decode_attention(
            q,
            kv,
            oldest,
            kv_lens,
            meta.page_table,
            options.sinks,
            scale=options.scale,
            softcap=options.softcap,
            form=form,
            interpreted=interpreted,
        )
        return out

    q_lens = meta.q_lens
    if not has_chunks:
        return of_single(q, jnp.where(q_lens > 0, meta.kv_lens, 0)), kv
    firsts = jnp.cumsum(q_lens) - q_lens
    of_rows = of_single(q[jnp.minimum(firsts, q.shape[0] - 1)], jnp.where(q_lens == 1, meta.kv_lens, 0))
    of_chunks = chunk_attention(
        q,
        kv,
        firsts,
        meta.starts,
        jnp.where(q_lens > 1, q_lens, 0),
        meta.page_table,
        options.sinks,
        scale=options.scale,
        window=options.sliding_window,
        chunk=options.chunk,
        softcap=options.softcap,
        form=form,
        interpreted=interpreted,
    )
    in_chunk = (q_lens[meta.token_rows] > 1) & (jnp.arange(q.shape[0]) < meta.num_tokens)
    return jnp.where(in_chunk[:, None, None], of_chunks, of_rows[meta.token_rows]), kv
