"""Attention of patches within spans, in blocks, so that memory grows with the patches and not with their
square (the online softmax of Milakov and Gimelshein 2018, as in FlashAttention).

So an image of 16,384 patches needs memory for its patches and not for their square, windows and whole
images are one function, and images that share a call cost what they cost alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from penstock.runtime.models import rope

_FAR_BELOW = np.float32(-1e30)
"""A score of what is not attended to; finite, so that differences of such scores are numbers."""


def attend(
    qkv: jax.Array,
    spans: jax.Array,
    *,
    num_heads: int,
    block: int,
    turns: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Compute `attend_spans` of queries, keys and values that lie side by side, [N, 3 * size] -> [N, size].
    turns: those that `rope.rotate` gives queries and keys; None: they have none.
    """
    q, k, v = jnp.moveaxis(qkv.reshape(qkv.shape[0], 3, num_heads, -1), 1, 0)
    if turns is not None:
        q, k = rope.rotate(q, *turns), rope.rotate(k, *turns)
    out = attend_spans(q, k, v, spans, scale=q.shape[-1] ** -0.5, block=block)
    return out.reshape(qkv.shape[0], -1)


def attend_spans(
    q: jax.Array, k: jax.Array, v: jax.Array, spans: jax.Array, *, scale: float, block: int
) -> jax.Array:
    """Compute attention of each of N patches to the patches of its span: q, k, v [N, heads, D] ->
    [N, heads, D].

    spans: begin and end for each patch, int32 [2, N], at least one patch long and close together for patches
    that are. block: how many patches are computed with how many at a time; only blocks that a span touches
    are. A patch whose span has a value that is no number gets NaN, and no other patch does.
    """
    num, heads, dim = q.shape
    # A share of zero does not make a NaN harmless, so values that are no numbers are told apart.
    is_number = jnp.isfinite(v)
    spoils = ~is_number.all(axis=(1, 2))
    v = jnp.where(is_number, v, 0)
    size = min(block, num)
    blocks = -(-num // size)
    extra = blocks * size - num
    q, k, v = (jnp.pad(x, ((0, extra), (0, 0), (0, 0))).transpose(1, 0, 2) for x in (q, k, v))
    spans = jnp.pad(spans, ((0, 0), (0, extra)), mode="edge")
    spoils = jnp.pad(spoils, (0, extra))
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT

    def product(equation: str, one: jax.Array, other: jax.Array) -> jax.Array:
        scores: jax.Array = jnp.einsum(
            equation, one, other, precision=precision, preferred_element_type=jnp.float32
        )
        return scores

    def of_block(number: jax.Array) -> jax.Array:
        queries = jax.lax.dynamic_slice_in_dim(q, number * size, size, axis=1)
        begin, end = jax.lax.dynamic_slice_in_dim(spans, number * size, size, axis=1)

        def take(at: jax.Array, so_far: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, out, spoiled = so_far
            keys = jax.lax.dynamic_slice_in_dim(k, at * size, size, axis=1)
            values = jax.lax.dynamic_slice_in_dim(v, at * size, size, axis=1)
            where = at * size + jnp.arange(size, dtype=jnp.int32)
            seen = (where[None] >= begin[:, None]) & (where[None] < end[:, None])
            scores = product("hqd,hkd->hqk", queries, keys) * np.float32(scale)
            scores = jnp.where(seen[None], scores, _FAR_BELOW)
            new_top = jnp.maximum(top, scores.max(axis=2))
            shares = jnp.where(seen[None], jnp.exp(scores - new_top[..., None]), np.float32(0))
            kept = jnp.exp(top - new_top)
            out = out * kept[..., None] + product("hqk,hkd->hqd", shares.astype(v.dtype), values)
            spoiled |= (seen & jax.lax.dynamic_slice_in_dim(spoils, at * size, size)[None]).any(axis=1)
            return new_top, total * kept + shares.sum(axis=2), out, spoiled

        start = (
            jnp.full((heads, size), _FAR_BELOW),
            jnp.zeros((heads, size), jnp.float32),
            jnp.zeros((heads, size, dim), jnp.float32),
            jnp.zeros((size,), jnp.bool_),
        )
        first, last = begin.min() // size, (end.max() + size - 1) // size
        _, total, out, spoiled = jax.lax.fori_loop(first, last, take, start)
        out = jnp.where(spoiled[None, :, None], np.float32(np.nan), out / total[..., None])
        return jnp.asarray(out, q.dtype)

    out: jax.Array = jax.lax.map(of_block, jnp.arange(blocks, dtype=jnp.int32))  # [blocks, heads, size, D]
    return out.transpose(0, 2, 1, 3).reshape(blocks * size, heads, dim)[:num]
