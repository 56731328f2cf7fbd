"""Attention of steps with chunks of prompts on TPUs: a kernel in Pallas that reads only the pages in use.

A program of the grid takes a block of consecutive tokens of one row. It brings their queries and the row's
pages to the chip's memory, a few pages ahead, and keeps an online softmax for each query head, as
`decode_attention` does for rows of one token. A block reads each page once that any of its tokens attends to,
so the larger the blocks, the less is read: a prompt of n tokens is read about n / (2 * block) times.

A row of one token copies no more than its own, and no block touches what belongs to another.
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
from penstock.runtime.ops.kv_rows import num_heads_of
from penstock.runtime.ops.tpu.decode_attention import LANES, stages_for
from penstock.runtime.ops.tpu.online_softmax import OnlineSoftmax
from penstock.runtime.ops.tpu.paging import KVRows, Pages, Visible, in_pieces

MOST_BLOCK = 128
"""Most tokens of a block, a power of two."""
LEAST_BLOCK = 16
_BLOCK_BYTES = 10 * 2**20
"""What a block may take of the chip's memory beside the pages."""
_CHIP_BYTES = 24 * 2**20
"""What the kernel may have of it: XLA gives a kernel 16 MiB unless it asks, and the chips have 64 or more."""


def block_for(num_heads: int, dim: int) -> int:
    """Return the tokens of a block; less than LEAST_BLOCK do not do."""
    per_token = num_heads * (dim * (4 + 2 + 4) + 2 * LANES * 4)
    block = MOST_BLOCK
    while block * per_token > _BLOCK_BYTES:
        block //= 2
    return block


@functools.partial(jax.jit, static_argnames=("scale", "window", "chunk", "softcap", "interpret"))
def chunk_attention(
    q: Array,
    kv: Array,
    starts: Array,
    q_lens: Array,
    page_table: Array,
    sinks: Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    interpret: Any = False,
) -> Array:
    """Compute causal attention of a ragged step: q bfloat16 [T, H, D], kv bfloat16
    [page, 2, KH, page size, D] -> bfloat16 [T, H, D], whose padding is 0.

    Row r has the next q_lens[r] tokens of q, from its position starts[r] on, and their keys and values are in
    the cache, which may also be as `decode_attention` takes it in int8; page_table int32[R, P] has the page
    of each position. What no token attends to may be NaN.
    `window`, `chunk` and the others are as in `AttentionOptions`. `interpret`: as `pallas_call` takes it.
    """
    num_tokens, num_heads, dim = q.shape
    page_size, kv_heads = kv.shape[3], num_heads_of(kv, dim)
    group = num_heads // kv_heads
    stages = stages_for(kv)
    block = block_for(num_heads, dim)
    rows, before, counts = blocks_of(q_lens, num_tokens, block)
    firsts = (jnp.cumsum(q_lens) - q_lens)[rows] + before
    positions = starts[rows] + before

    visible = Visible(block, window, chunk)

    def kernel(
        rows_ref: Any,
        firsts_ref: Any,
        positions_ref: Any,
        counts_ref: Any,
        table_ref: Any,
        q_ref: Any,
        *others: Any,
    ) -> None:
        *sink_ref, kv_ref, out_ref, moved, queries, pages, peaks, totals, sums, moving, arrived = others
        del rows_ref  # the table's block is the row's
        number = pl.program_id(0)
        first, position, count = firsts_ref[number], positions_ref[number], counts_ref[number]

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
                lambda far, near: pltpu.make_async_copy(q_ref.at[far], moved.at[near], moving),
            )
            for h in range(num_heads):
                queries[h] = moved[:, h, :].astype(jnp.bfloat16)
            softmax = OnlineSoftmax(peaks, totals, sums)
            softmax.begin()

            def step(i: Any, carry: None) -> None:
                stage, here = fetched.take(i)
                at = here + lax.broadcasted_iota(jnp.int32, (block, page_size), 1)
                token = lax.broadcasted_iota(jnp.int32, (block, page_size), 0)
                seen = visible.seen(position + token, at, position) & (token < count)
                held = here + lax.broadcasted_iota(jnp.int32, (page_size, dim), 0)
                held = (held >= visible.oldest(position)) & (held < position + count)
                of_page = KVRows.of(pages, stage, kv_heads)
                for head in range(kv_heads):
                    keys = of_page.read(0, head, dim).astype(jnp.bfloat16)
                    # What nobody attends to may be NaN, so it must not even be multiplied by zero.
                    values = jnp.where(held, of_page.read(1, head, dim).astype(jnp.float32), 0.0)
                    values = values.astype(jnp.bfloat16)
                    for h in range(head * group, (head + 1) * group):
                        softmax.take(h, queries[h], keys, values, seen, scale=scale, softcap=softcap)

            lax.fori_loop(0, fetched.num_steps, step, None)
            for h in range(num_heads):
                sink = sink_ref[0][h, :1, :1] if sink_ref else None
                moved[:, h, :] = softmax.result(h, sink)
            in_pieces(
                block,
                first,
                count,
                lambda far, near: pltpu.make_async_copy(moved.at[near], out_ref.at[far], moving),
            )

    width = page_table.shape[1]
    given, specs = [], []
    if sinks is not None:
        shape = (num_heads, 8, LANES)  # a tile for each head
        given.append(jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], shape))
        specs.append(pl.BlockSpec(shape, lambda number, *_: (0, 0, 0)))
    out: Array = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((num_tokens, num_heads, dim), jnp.float32),
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
                pltpu.VMEM((block, num_heads, dim), jnp.float32),
                pltpu.VMEM((num_heads, block, dim), jnp.bfloat16),
                pltpu.VMEM((stages, *kv.shape[1:]), kv.dtype),
                pltpu.VMEM((num_heads, block, LANES), jnp.float32),
                pltpu.VMEM((num_heads, block, LANES), jnp.float32),
                pltpu.VMEM((num_heads, block, dim), jnp.float32),
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA((stages,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_CHIP_BYTES),
        name="chunk_attention",
        interpret=interpret,
    )(
        rows,
        firsts,
        positions,
        counts,
        page_table.reshape(-1, 1, width),
        q.astype(jnp.float32),
        *given,
        kv,
    )
    real = jnp.arange(num_tokens, dtype=jnp.int32) < q_lens.sum()
    return jnp.where(real[:, None, None], out, 0.0).astype(jnp.bfloat16)
