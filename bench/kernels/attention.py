"""Runs attention over pages of a cache, in as many layers as no cache of the processor holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from bench.kernels.lines import CHUNK, SHAPES, Line
from bench.kernels.stacks import calls_per_run, layers_kept, windows
from bench.measures.limits import Format
from penstock.runtime.ops.attention import AttentionOptions
from penstock.runtime.ops.native import attention, huge_pages

PAGE_SIZE = 64
"""As an engine's without options."""


def runner(line: Line, least_bytes: int) -> Callable[[], float]:
    """Make a function that runs the attention of some layers and returns the seconds of one."""
    shape = SHAPES[line.shape]
    new = CHUNK if line.kind == "prefill" else 1
    tokens, pages = line.rows * new, line.rows * -(-line.context // PAGE_SIZE)
    rng = np.random.default_rng(0)
    values = _cache(rng, (pages, 2, shape.kv_heads, PAGE_SIZE, shape.head_dim), line.format)
    caches = [jnp.array(values, copy=True) for _ in range(layers_kept(values.nbytes, least_bytes))]
    huge_pages.advise(caches)
    calls = calls_per_run(len(caches), line.work.operations)
    q, k, v = (
        jnp.asarray(
            rng.standard_normal((tokens, heads, shape.head_dim), np.float32).astype(ml_dtypes.bfloat16)
        )
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    starts = jnp.full(line.rows, line.context - new, jnp.int32)
    lengths = jnp.full(line.rows, new, jnp.int32)
    # A server's pages lie anywhere.
    table = jnp.asarray(rng.permutation(pages).reshape(line.rows, -1).astype(np.int32))
    run = jax.jit(partial(_run, scale=shape.head_dim**-0.5), donate_argnums=0)
    turns = windows(caches, calls)

    def seconds() -> float:
        chosen = next(turns)
        given = [caches[number] for number in chosen]
        began = time.perf_counter()
        _, left = jax.block_until_ready(run(given, q, k, v, starts, lengths, table))
        taken = (time.perf_counter() - began) / calls
        for number, cache in zip(chosen, left, strict=True):
            caches[number] = cache
        return taken

    seconds()  # compiles
    return seconds


def _cache(rng: np.random.Generator, shape: tuple[int, ...], format: Format) -> NDArray[np.generic]:
    """Return keys and values as the cache holds them: the bits of bfloat16, or int8 with a scale behind each
    row.
    """
    one = rng.standard_normal((1, *shape[1:]), np.float32)
    if format == "bfloat16":
        return np.broadcast_to(one.astype(ml_dtypes.bfloat16).view(np.uint16), shape)
    scales = np.full((*one.shape[:-1], 1), 1 / 32, np.float32).view(np.int8)
    rows = np.concatenate([(32 * one).clip(-127, 127).astype(np.int8), scales], axis=-1)
    return np.broadcast_to(rows, (*shape[:-1], rows.shape[-1]))


def _run(
    caches: list[jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    table: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, list[jax.Array]]:
    """Run layer after layer: each takes the output of the one before as its queries."""
    options = AttentionOptions(scale)
    plan = attention.plan(
        starts,
        lengths,
        table,
        num_tokens=q.shape[0],
        num_heads=q.shape[1],
        kv_shape=caches[0].shape,
        options=options,
    )
    left = []
    for cache in caches:
        q, written = attention.attend(q, k, v, cache, plan, table, options)
        left.append(written)
    return q, left
