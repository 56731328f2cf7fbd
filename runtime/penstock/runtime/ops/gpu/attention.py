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
from penstock.runtime.ops.gpu.tiles import SWIZZLE, TILE, WIDEST
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
    """Name the sizes of pages and heads that `supports` accepts, for messages. They are the same in int8."""
    heads = {
        page: [str(dim) for dim in range(SWIZZLE, WIDEST + 1, SWIZZLE) if takes(page, dim, 1, form=form)]
        for page in (TILE, 2 * TILE)
    }
    return " or ".join(
        f"a page_size of {page} with heads of {', '.join(dims)}" for page, dims in heads.items() if dims
    )


def latents_supported(form: GpuForm) -> str:
    """Say the same of latent attention."""
    sizes = range(SWIZZLE, 16 * SWIZZLE, SWIZZLE)
    most = max(dim for dim in sizes if takes_latents(TILE, dim, 2 * SWIZZLE, form=form))
    *narrower, widest = (str(dim) for dim in sizes if takes_latents(TILE, most, dim, form=form))
    values = f"{', '.join(narrower)} or {widest}" if narrower else widest
    return f"keys of up to {most} channels in multiples of {SWIZZLE}, of which {values} are the values"


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
    q_lens, table = meta.q_lens, meta.page_table

    def of_single(q: Array, has_token: Array) -> Array:
        """Attend with one query of each row, [R, H, D], where bool[R] says that it has one; 0 for others."""
        if options.value_dim is not None:
            rows = jnp.arange(len(q_lens), dtype=jnp.int32)
            found = to_latents(q, kv, rows, meta.starts, has_token.astype(jnp.int32), table, single=True)
            return jnp.where(has_token[:, None, None], found, 0)
        ends = jnp.where(has_token, meta.kv_lens, 0)
        out: Array = decode_attention(
            q,
            kv,
            oldest_visible(ends - 1, options.sliding_window, options.chunk),
            ends,
            table,
            options.sinks,
            scale=options.scale,
            softcap=options.softcap,
            form=form,
            interpreted=interpreted,
        )
        return out

    to_latents = partial(
        latent_attention,
        value_dim=options.value_dim,
        scale=options.scale,
        form=form,
        interpreted=interpreted,
    )
    to_heads = partial(
        chunk_attention,
        sinks=options.sinks,
        scale=options.scale,
        window=options.sliding_window,
        chunk=options.chunk,
        softcap=options.softcap,
        form=form,
        interpreted=interpreted,
    )
    if is_int8:
        q = spread(q).astype(q.dtype)
    if not has_chunks:
        return of_single(q, q_lens > 0), kv
    firsts = jnp.cumsum(q_lens) - q_lens
    # Rows of one token are a launch of their own, because each of them may have several blocks.
    of_rows = of_single(q[jnp.minimum(firsts, q.shape[0] - 1)], q_lens == 1)
    attend = to_heads if options.value_dim is None else partial(to_latents, single=False)
    of_chunks = attend(q, kv, firsts, meta.starts, jnp.where(q_lens > 1, q_lens, 0), table)
    in_chunk = (q_lens[meta.token_rows] > 1) & (jnp.arange(q.shape[0]) < meta.num_tokens)
    return jnp.where(in_chunk[:, None, None], of_chunks, of_rows[meta.token_rows]), kv
