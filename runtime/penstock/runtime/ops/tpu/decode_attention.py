"""Attention of decode steps on TPUs: a kernel in Pallas that reads only the pages in use.

A program of the grid takes one row. It brings the row's pages to the chip's memory, a few ahead, multiplies,
and keeps an online softmax for each head of keys, as `penstock.runtime.ops.attention` does. Lengths and page
tables are read at run time; padding rows cost nothing, and their output is 0. Weights are rounded to bfloat16
before they multiply values; everything else is float32.

JAX has a kernel of its own for TPUs (`jax.experimental.pallas.ops.tpu.ragged_paged_attention`). It wants
another layout of pages, knows no sinks and no chunks, reads a window's layers from their first position on,
and Pallas' interpreters of JAX 0.10 cannot run it, so nothing could be said of it without a TPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
from jax import Array, lax

from penstock.runtime.ops.kv_rows import num_heads_of
from penstock.runtime.ops.tpu.online_softmax import OnlineSoftmax
from penstock.runtime.ops.tpu.paging import KVRows, Pages

LANES = 128
"""Channels of a head come in whole multiples of so many."""
SUBLANES = 16
"""Positions of a page and heads of queries come in whole multiples of so many, in bfloat16."""
_MOST_STAGES = 4
_PAGES_BYTES = 8 * 2**20
"""What the pages that are on their way may take of the chip's memory, which has 16 MiB for a kernel."""
LATENT_SPAN = 256
"""Positions of latents that are multiplied at a time: as many as the chips' units for products have columns.
With a page of 64, three quarters of these would be idle, and many heads ask for each position.
"""


def span_for(page_size: int, planes: int) -> int:
    """Tell how many pages are multiplied at a time."""
    return max(1, LATENT_SPAN // page_size) if planes == 1 else 1


def stages_for(kv: Array | jax.ShapeDtypeStruct) -> int:
    """Tell for how many pages of such a cache, or spans of pages, the chip has places; less than 2 do not
    do.
    """
    of_page = math.prod(kv.shape[1:]) * kv.dtype.itemsize
    return min(_MOST_STAGES, _PAGES_BYTES // (of_page * span_for(kv.shape[3], kv.shape[1])))


def takes(kv: Array | jax.ShapeDtypeStruct) -> bool:
    """Say whether the kernel can read such a cache, in bfloat16 or int8."""
    _, _, _, page_size, width = kv.shape
    is_wide = width == LANES if kv.dtype == jnp.int8 else width % LANES == 0
    of_tile = SUBLANES * 2 // kv.dtype.itemsize
    return is_wide and page_size % of_tile == 0 and stages_for(kv) >= 2


@functools.partial(jax.jit, static_argnames=("scale", "softcap", "value_dim", "interpret"))
def decode_attention(
    q: Array,
    kv: Array,
    oldest: Array,
    ends: Array,
    page_table: Array,
    sinks: Array | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    value_dim: int | None = None,
    interpret: Any = False,
) -> Array:
    """Compute attention of one query a row: q bfloat16 [R, H, D], kv bfloat16 [page, 2, KH, page size, D] ->
    bfloat16 [R, H, D]. With `value_dim` kv has one plane, and the result that many channels. kv may also be
    int8 in columns (`kv_rows`); queries must then be spread if there are two planes.

    Row r attends to its positions from oldest[r] up to ends[r], which is exclusive, and 0 for a padding row;
    page_table int32[R, P] has the page of each position. What lies elsewhere may be NaN. `sinks` float32[H],
    `scale`, `softcap` and `value_dim` are as in `AttentionOptions`. `interpret`: as `pallas_call` takes it.
    """
    num_rows, num_heads, dim = q.shape
    _, planes, _, page_size, _ = kv.shape
    kv_heads = num_heads_of(kv, dim)
    group = num_heads // kv_heads
    spare = -group % SUBLANES
    stages, span = stages_for(kv), span_for(page_size, planes) * page_size
    wide = dim if value_dim is None else -(-value_dim // LANES) * LANES
    by_head = (kv_heads, group + spare)

    def kernel(oldest_ref: Any, ends_ref: Any, table_ref: Any, q_ref: Any, *others: Any) -> None:
        *sink_ref, kv_ref, out_ref, pages, peaks, totals, sums, arrived = others
        row = pl.program_id(0)
        seen_from, seen_to = oldest_ref[row], ends_ref[row]
        first = seen_from // page_size
        count = (seen_to + page_size - 1) // page_size - first
        softmax = OnlineSoftmax(peaks, totals, sums)
        softmax.begin()

        fetched = Pages(kv_ref, lambda i: table_ref[0, 0, i], pages, arrived, first, count)
        fetched.begin()

        def step(i: Any, carry: None) -> None:
            stage, begin = fetched.take(i)
            at = begin + lax.broadcasted_iota(jnp.int32, (by_head[1], span), 1)
            seen = (at >= seen_from) & (at < seen_to)
            held = begin + lax.broadcasted_iota(jnp.int32, (span, wide), 0)
            held = (held >= seen_from) & (held < seen_to)
            rows = KVRows.of(pages, stage, kv_heads)
            for head in range(kv_heads):
                # What the row does not attend to may be NaN, so it must not even be multiplied by zero.
                values = rows.read(planes - 1, head, wide).astype(jnp.float32)
                softmax.take(
                    head,
                    q_ref[0, head],
                    rows.read(0, head, dim).astype(jnp.bfloat16),
                    jnp.where(held, values, 0.0).astype(jnp.bfloat16),
                    seen,
                    scale=scale,
                    softcap=softcap,
                )

        lax.fori_loop(0, fetched.num_steps, step, None)
        for head in range(kv_heads):
            sink = sink_ref[0][head, :, :1] if sink_ref else None
            out_ref[0, head] = softmax.result(head, sink).astype(jnp.bfloat16)

    def of_row(*size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *size), lambda row, *_: (row, *(0 for _ in size)))

    width = page_table.shape[1]
    asked = q.reshape(num_rows, kv_heads, group, dim)
    asked = jnp.pad(asked, ((0, 0), (0, 0), (0, spare), (0, 0)))
    given, specs = [], []
    if sinks is not None:
        by_lane = jnp.pad(sinks.astype(jnp.float32).reshape(kv_heads, group), ((0, 0), (0, spare)))
        given.append(jnp.broadcast_to(by_lane[:, :, None], (*by_head, LANES)))
        specs.append(pl.BlockSpec((*by_head, LANES), lambda row, *_: (0, 0, 0)))
    out: Array = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((num_rows, *by_head, wide), jnp.bfloat16),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_rows,),
            in_specs=[
                pl.BlockSpec((1, 1, width), lambda row, *_: (row, 0, 0), memory_space=pltpu.SMEM),
                of_row(*by_head, dim),
                *specs,
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=of_row(*by_head, wide),
            scratch_shapes=[
                pltpu.VMEM((stages, *kv.shape[1:3], span, kv.shape[4]), kv.dtype),
                pltpu.VMEM((*by_head, LANES), jnp.float32),
                pltpu.VMEM((*by_head, LANES), jnp.float32),
                pltpu.VMEM((*by_head, wide), jnp.float32),
                pltpu.SemaphoreType.DMA((stages,)),
            ],
        ),
        name="decode_attention",
        interpret=interpret,
    )(oldest, ends, page_table.reshape(num_rows, 1, width), asked, *given, kv)
    return out[:, :, :group].reshape(num_rows, num_heads, wide)[..., :value_dim]
