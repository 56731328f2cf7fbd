"""Paged attention on GPUs: rows of one token have the kernel of `decode_attention`, rows of several tokens
that of `chunk_attention`, and both that of `latent_attention` where all heads share a latent. What these
cannot do, XLA computes. Which of them a program calls is decided when it is traced.
"""

from __future__ import annotations

from functools import partial

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
from penstock.runtime.ops.gpu.latent_attention import latent_attention
from penstock.runtime.ops.gpu.latent_attention import takes as takes_latents
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
    if value_dim is not None:
        in_bfloat16 = q.dtype == kv.dtype == jnp.bfloat16
        return in_bfloat16 and kv.shape[2] == 1 and takes_latents(page_size, width, value_dim, form=form)
    dim = q.shape[2] if is_int8 else width
    return (
        q.dtype == jnp.bfloat16
        and (width == GPU_LANES if is_int8 else kv.dtype == jnp.bfloat16)
        and planes == 2
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


def latents_supported(form: GpuForm) -> str:
    """Say the same of latent attention."""
    if form.by_warps:
        return "nothing"
    return "keys of up to 576 channels in multiples of 64, of which 128, 256, 384 or 512 are the values"


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
    if options.value_dim is not None:  # no model has the other options beside latents
        cannot |= options != AttentionOptions(options.scale, value_dim=options.value_dim)
    elif is_int8 and has_chunks:  # XLA computes all rows of a step whose chunks have no kernel
        cannot |= not takes_int8(kv.shape[3], q.shape[2], form=form)
    if cannot or not supports(q, kv, options.value_dim, form=form):
        return paged_attention(q, k_new, v_new, kv, meta, options, span=LONG_SPAN)
    kv = write_kv(kv, k_new, v_new, meta.write_slots)
    if options.value_dim is not None:
        return _attend_to_latents(q, kv, meta, options, form=form, interpreted=interpreted), kv
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


def _attend_to_latents(
    q: Array, kv: Array, meta: AttentionMeta, options: AttentionOptions, *, form: GpuForm, interpreted: bool
) -> Array:
    """Compute `gpu_paged_attention` with a cache of latents, [T, H, value_dim], 0 for padding. Rows of one
    token are a launch of their own, because each of them may have several blocks.
    """
    attend = partial(
        latent_attention,
        value_dim=options.value_dim,
        scale=options.scale,
        form=form,
        interpreted=interpreted,
    )
    q_lens, table, order = meta.q_lens, meta.page_table, jnp.arange(q.shape[0], dtype=jnp.int32)
    if meta.block_tokens.shape[1] == 1:
        out: Array = attend(q, kv, order, meta.starts, q_lens, table, single=True)
        return jnp.where((q_lens > 0)[:, None, None], out, 0)
    firsts, rows = jnp.cumsum(q_lens) - q_lens, jnp.arange(len(q_lens), dtype=jnp.int32)
    one = (q_lens == 1).astype(jnp.int32)
    asked = q[jnp.minimum(firsts, q.shape[0] - 1)]
    of_rows = attend(asked, kv, rows, meta.starts, one, table, single=True)
    of_chunks = attend(q, kv, firsts, meta.starts, jnp.where(q_lens > 1, q_lens, 0), table, single=False)
    is_chunk, real = q_lens[meta.token_rows] > 1, order < meta.num_tokens
    out = jnp.where(is_chunk[:, None, None], of_chunks, of_rows[meta.token_rows])
    return jnp.where(real[:, None, None], out, 0)
