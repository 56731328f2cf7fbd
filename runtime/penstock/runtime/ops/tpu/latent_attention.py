"""Latent attention of steps with chunks of prompts on TPUs: a kernel in Pallas that reads only the pages in
use. (Decode steps have that of `decode_attention`.)

All heads share one key, so the queries of all tokens and heads are rows of one product. A program of the
grid takes a block of consecutive tokens of one row, as in `chunk_attention`, and brings the row's pages to
the chip once for all of their heads. It goes over the block's queries in groups of some whole tokens, and
over no more groups than the block has tokens for, so a row of one token beside the chunks computes one group.
The values are channels of the keys, so each page is read once for both.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
from jax import Array, lax

from penstock.runtime.ops.attention import blocks_of
from penstock.runtime.ops.tpu.decode_attention import LANES, SUBLANES, span_for, stages_for
from penstock.runtime.ops.tpu.online_softmax import OnlineSoftmax
from penstock.runtime.ops.tpu.paging import KVRows, Pages, Visible, in_pieces

MOST_BLOCK = 128
"""Most tokens of a block, a power of two."""
GROUP_ROWS = 256
"""Queries of one product: as many as it takes to keep the chip's units for products busy, and few enough for
the compiler, which writes out each product."""
_BLOCK_BYTES = 12 * 2**20
"""What a block may take of the chip's memory beside the pages."""
_CHIP_BYTES = 32 * 2**20
"""What the kernel may have of it: XLA gives a kernel 16 MiB unless it asks, and the chips have 64 or more."""


def block_for(num_heads: int, dim: int, wide: int) -> int:
    """Return how many tokens a block has, for values of `wide` channels: a power of two."""
    per_token = num_heads * (2 * dim + (2 + 4) * wide + 2 * 4 * LANES)
    most = min(MOST_BLOCK, max(1, _BLOCK_BYTES // per_token))
    return 1 << (most.bit_length() - 1)


@functools.partial(jax.jit, static_argnames=("value_dim", "scale", "window", "chunk", "softcap", "interpret"))
def latent_attention(
    q: Array,
    kv: Array,
    starts: Array,
    q_lens: Array,
    page_table: Array,
    sinks: Array | None = None,
    *,
    value_dim: int,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    interpret: Any = False,
) -> Array:
    """Compute causal attention of a ragged step whose values are the first channels of the keys: q bfloat16
    [T, H, D], kv bfloat16 [page, 1, 1, page size, D] -> bfloat16 [T, H, value_dim], whose padding is 0.

    Row r has the next q_lens[r] tokens of q, from its position starts[r] on, and their keys are in the cache,
    which may also be int8 in columns (`kv_rows`); page_table int32[R, P] has the page of each position. What
    no token attends to may be NaN. `value_dim`, `window`, `chunk` and the others are as in
    `AttentionOptions`. `interpret`: as `pallas_call` takes it.
    """
    num_tokens, num_heads, dim = q.shape
    page_size, wide = kv.shape[3], -(-value_dim // LANES) * LANES
    heads = -(-num_heads // SUBLANES) * SUBLANES
    block = block_for(heads, dim, wide)
    in_group = min(block, 1 << (max(1, GROUP_ROWS // heads).bit_length() - 1))
    group = in_group * heads
    stages, span = stages_for(kv), span_for(page_size, planes=1) * page_size
    rows, before, counts = blocks_of(q_lens, num_tokens, block)
    firsts = (jnp.cumsum(q_lens) - q_lens)[rows] + before
    visible = Visible(in_group, window, chunk)

    def kernel(
        rows_ref: Any,
        firsts_ref: Any,
        positions_ref: Any,
        counts_ref: Any,
        table_ref: Any,
        q_ref: Any,
        *others: Any,
    ) -> None:
        *sink_ref, kv_ref, out_ref, queries, pages, results, peaks, totals, sums, moving, arrived = others
        del rows_ref  # the table's block is the row's
        number = pl.program_id(0)
        first, position, count = firsts_ref[number], positions_ref[number], counts_ref[number]
        num_groups = lax.div(count + (in_group - 1), jnp.int32(in_group))

        @pl.when(count > 0)
        def _() -> None:
            begin = lax.div(visible.oldest(position), jnp.int32(page_size))
            num_pages = lax.div(position + count + (page_size - 1), jnp.int32(page_size)) - begin
            fetched = Pages(kv_ref, lambda i: table_ref[0, 0, i], pages, arrived, begin, num_pages)
            fetched.begin()
            in_pieces(
                block,
                first,
                count,
                lambda far, near: pltpu.make_async_copy(q_ref.at[far], queries.at[near], moving),
            )
            softmax = OnlineSoftmax(peaks, totals, sums)
            softmax.begin()

            def step(i: Any, carry: None) -> None:
                stage, here = fetched.take(i)
                held = here + lax.broadcasted_iota(jnp.int32, (span, wide), 0)
                held = (held >= visible.oldest(position)) & (held < position + count)
                whole = KVRows.of(pages, stage, 1).read(0, 0, dim)
                keys = whole.astype(jnp.bfloat16)
                # What nobody attends to may be NaN, so it must not even be multiplied by zero.
                values = jnp.where(held, whole[:, :wide].astype(jnp.float32), 0.0).astype(jnp.bfloat16)
                at = here + lax.broadcasted_iota(jnp.int32, (group, span), 1)
                by_token = lax.broadcasted_iota(jnp.int32, (in_group, heads, span), 0).reshape(group, span)

                def of_group(g: Any, carry: None) -> None:
                    token = g * in_group + by_token
                    begins = position + g * in_group
                    seen = visible.seen(position + token, at, begins) & (token < count)
                    asked = queries[pl.ds(g * in_group, in_group)].reshape(group, dim)
                    softmax.take(g, asked, keys, values, seen, scale=scale, softcap=softcap)

                lax.fori_loop(0, num_groups, of_group, None)

            lax.fori_loop(0, fetched.num_steps, step, None)

            def result(g: Any, carry: None) -> None:
                found = softmax.result(g, sink_ref[0][:, :1] if sink_ref else None)
                to = pl.ds(g * in_group, in_group)
                results[to] = found.astype(jnp.bfloat16).reshape(in_group, heads, wide)

            lax.fori_loop(0, num_groups, result, None)
            in_pieces(
                block,
                first,
                count,
                lambda far, near: pltpu.make_async_copy(results.at[near], out_ref.at[far], moving),
            )

    width = page_table.shape[1]
    given, specs = [], []
    if sinks is not None:
        of_token = jnp.pad(sinks.astype(jnp.float32), (0, heads - num_heads))
        given.append(jnp.broadcast_to(jnp.tile(of_token, in_group)[:, None], (group, LANES)))
        specs.append(pl.BlockSpec((group, LANES), lambda number, *_: (0, 0)))
    out: Array = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((num_tokens, heads, wide), jnp.bfloat16),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(rows.shape[0],),
            in_specs=[
                pl.BlockSpec(
                    (1, 1, width), lambda number, of, *_: (of[number], 0, 0), memory_space=pltpu.SMEM
                ),
                pl.BlockSpec(memory_space=pl.ANY),
                *specs,
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((block, heads, dim), jnp.bfloat16),
                pltpu.VMEM((stages, *kv.shape[1:3], span, kv.shape[4]), kv.dtype),
                pltpu.VMEM((block, heads, wide), jnp.bfloat16),
                pltpu.VMEM((block // in_group, group, LANES), jnp.float32),
                pltpu.VMEM((block // in_group, group, LANES), jnp.float32),
                pltpu.VMEM((block // in_group, group, wide), jnp.float32),
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA((stages,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_CHIP_BYTES),
        name="latent_attention",
        interpret=interpret,
    )(
        rows,
        firsts,
        starts[rows] + before,
        counts,
        page_table.reshape(-1, 1, width),
        jnp.pad(q, ((0, 0), (0, heads - num_heads), (0, 0))),
        *given,
        kv,
    )
    real = jnp.arange(num_tokens, dtype=jnp.int32) < q_lens.sum()
    return jnp.where(real[:, None, None], out[:, :num_heads, :value_dim], 0)
