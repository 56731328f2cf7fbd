"""Attention of steps with chunks of prompts on GPUs of Hopper and Blackwell: a kernel in Pallas' Mosaic
GPU that reads only the pages in use.

A block of threads takes some consecutive tokens of one row, and one or two heads of queries that read the
same head of keys. One warpgroup brings the row's pages to shared memory, a few ahead. Each of the others has
a tile of 64 queries of one head, or of 128 where the tensor cores have a memory of their own, and keeps an
`online_softmax` of them. If a block has two heads, its two tiles are of the same tokens, and each page is
brought once for both. Where an odd number of heads of queries reads a head of keys, the two tiles have
consecutive tokens of one head. Each block reads the pages from the first one that its first token attends
to, up to that of its last token.

Pages of int8 are made bfloat16 by the warpgroup that brings them (`int8_pages`), while the others multiply.

Pages that all of a block's tokens attend to need no mask, so without windows and chunks they have a loop of
their own. Results go out in pieces of 64, 32, 16, ... tokens that are together what the tile has, so no block
touches what belongs to another.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from penstock.runtime.ops.gpu import online_softmax, tensor_memory
from penstock.runtime.ops.gpu.forms import ON_HOPPER, GpuForm
from penstock.runtime.ops.gpu.int8_pages import Int8Ring, views, widen_ahead
from penstock.runtime.ops.gpu.online_softmax import LEAST_STAGES, LOG2E, LOW, MOST_STAGES, Sums
from penstock.runtime.ops.gpu.tensor_memory import TensorMemory
from penstock.runtime.ops.gpu.tiles import (
    BARRIER_BYTES,
    LINES,
    TILE,
    TILED,
    aligned_blocks,
    columns_out,
    copy_rows,
    fetch_ahead,
    launched,
)
from penstock.runtime.ops.kv_rows import num_heads_of

_REGISTERS, _REGISTERS_TO_FETCH = 232, 40
"""Of each thread of the warpgroups that multiply, and of the one that fetches: where there are three
warpgroups, equal shares would be too few for those that multiply."""
_REGISTERS_BESIDE_INT8, _REGISTERS_TO_WIDEN = 208, 88
"""The same where the one that fetches makes operands of int8."""


def rows_of(form: GpuForm) -> int:
    """Tell how many queries a tile has."""
    return tensor_memory.ROWS if form.in_tensor_memory else TILE


def takes_int8(page_size: int, dim: int, *, form: GpuForm) -> bool:
    """Say whether the kernel can read int8 in sizes that `decode_attention` takes. Beside the pages it needs
    room for their operands, so it takes fewer. In tensor memory a thread has all scores of a query, and pages
    of 128 tokens would leave no registers for the scales.
    """
    has_room = tiles_for(page_size, dim, form=form, is_int8=True)[1] >= LEAST_STAGES
    return has_room and (page_size == TILE or not form.in_tensor_memory)


def tiles_for(page_size: int, dim: int, *, form: GpuForm, is_int8: bool = False) -> tuple[int, int, int]:
    """Tell how many tiles of queries a block has, how many pages shared memory holds at a time, and how many
    channels of a tile's results beside them. Sizes that `decode_attention` takes have room for one tile and
    two pages in bfloat16.
    """
    rows = rows_of(form)
    of_stage = Int8Ring.bytes_of_stage(page_size, dim) if is_int8 else page_size * dim * 2
    for columns, tiles in itertools.product(columns_out(dim), (2, 1)):
        beside = tiles * rows * (dim + columns) * 2 + BARRIER_BYTES
        if form.by_warps and not form.in_tensor_memory:
            beside += tiles * rows * page_size * 2  # weights
        stages = min(MOST_STAGES, (form.shared_bytes - beside) // (2 * of_stage))
        if stages >= LEAST_STAGES:
            break
    return tiles, stages, columns


@functools.partial(jax.jit, static_argnames=("scale", "window", "chunk", "softcap", "form", "interpreted"))
def chunk_attention(
    q: Array,
    kv: Array,
    firsts: Array,
    starts: Array,
    q_lens: Array,
    page_table: Array,
    sinks: Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    form: GpuForm = ON_HOPPER,
    interpreted: bool = False,
) -> Array:
    """Compute causal attention of rows of several tokens: q bfloat16 [T, H, D], kv bfloat16
    [page, 2, KH, page size, D] -> bfloat16 [T, H, D], which is undefined for tokens of no row. Or kv is int8
    in columns of `GPU_LANES`, and q is spread (`kv_rows`).

    Row r has the q_lens[r] tokens of q from firsts[r] on, which are at its positions from starts[r] on, and
    their keys and values are in the cache; with q_lens 0 it costs nothing. page_table int32[R, P] has the
    page of each position. What no token attends to may be NaN. `sinks` float32[H], `scale`, `window`,
    `chunk` and `softcap` are as in `AttentionOptions`. `form` and `interpreted`: as `decode_attention`
    takes them.
    """
    num_tokens, num_heads, dim = q.shape
    page_size, kv_heads, is_int8 = kv.shape[3], num_heads_of(kv, dim), kv.dtype == jnp.int8
    group = num_heads // kv_heads
    tiles, stages, columns = tiles_for(page_size, dim, form=form, is_int8=is_int8)
    registers, fewer_registers = (
        (_REGISTERS_BESIDE_INT8, _REGISTERS_TO_WIDEN) if is_int8 else (_REGISTERS, _REGISTERS_TO_FETCH)
    )
    heads = tiles if group % tiles == 0 else 1
    rows = rows_of(form)
    layout: Any = tensor_memory.LAYOUT if form.in_tensor_memory else plgpu.Layout.WGMMA
    block = rows * tiles // heads
    blocks = aligned_blocks(firsts, q_lens, num_tokens, block)
    positions = starts[blocks.owners] + blocks.passed

    def kernel(
        q_ref: Any,
        rows_ref: Any,
        eighths_ref: Any,
        positions_ref: Any,
        before_ref: Any,
        ends_ref: Any,
        table_ref: Any,
        *others: Any,
    ) -> None:
        kv_refs, sinks_ref, out_ref = others[: len(given)], others[len(given) : -1], others[-1]
        number, first_head = lax.axis_index("block"), lax.axis_index("heads") * heads
        row, position = rows_ref[number], positions_ref[number]  # the position of the block's first row
        before, end = before_ref[number], ends_ref[number]
        page = jnp.int32(page_size)
        first_asking = position + before
        seen_from, seen_to = jnp.int32(0), position + end
        if window is not None:
            seen_from = jnp.maximum(seen_from, first_asking - (window - 1))
        if chunk is not None:
            chunk_begin = first_asking - lax.rem(first_asking, jnp.int32(chunk))
            seen_from = jnp.maximum(seen_from, chunk_begin)
        first_page = lax.div(seen_from, page)
        steps = jnp.where(end > 0, lax.div(seen_to + (page_size - 1), page) - first_page, 0)
        # So many pages are seen by all of the block's tokens, because the first one sees them.
        whole = jnp.int32(0)
        if window is None and chunk is None:
            whole = jnp.minimum(steps, lax.div(first_asking + 1, page))

        def seen_by(asking: Any, at: Any) -> Any:
            """Tell which positions `at` the tokens at `asking` attend to."""
            seen = at <= asking
            if window is not None:
                seen &= at > asking - window
            if chunk is not None:
                for n in range(block // chunk + 2):  # the chunks that a block may lie in
                    own = chunk_begin + n * chunk
                    seen &= (at >= own) | (asking < own)
            return seen

        def scoped(
            q_smem: Any,
            k_pages: Any,
            v_pages: Any,
            out_smem: Any,
            w_smem: Any,
            memory: Any,
            q_bars: Any,
            k_bars: Any,
            v_bars: Any,
            k_free: Any,
            v_free: Any,
            cleaned: Any,
        ) -> None:
            tile = lax.axis_index("warpgroup")

            @pl.when(tile < tiles)
            def _compute() -> None:
                if tiles > 1:
                    plgpu.set_max_registers(registers, action="increase")
                head = first_head + (tile if heads > 1 else 0)
                skipped = jnp.int32(0) if heads > 1 else tile * rows
                token = eighths_ref[number] * LINES + skipped
                asking = (position + skipped) + plgpu.broadcasted_iota(
                    jnp.int32, (rows, page_size), 0, layout=layout
                )
                own = None if memory is None else memory.at(tile)
                keys, values = (k_pages.operands, v_pages.operands) if is_int8 else (k_pages, v_pages)

                @pl.when(steps > 0)
                def _() -> None:
                    plgpu.copy_gmem_to_smem(
                        q_ref.at[pl.ds(token, rows), head], q_smem.at[tile], q_bars.at[tile]
                    )
                    plgpu.barrier_wait(q_bars.at[tile])

                def step(i: Any, sums: Sums, *, masked: bool) -> Sums:
                    stage = lax.rem(i, jnp.int32(stages))
                    here = (first_page + i) * page_size
                    plgpu.barrier_wait(k_bars.at[stage])
                    if own is None:
                        scores = online_softmax.product(
                            q_smem.at[tile], keys.at[stage], by_warps=form.by_warps, interpreted=interpreted
                        )
                    else:
                        scores = own.product(q_smem.at[tile], keys.at[stage])
                    if is_int8:
                        k_scales = k_pages.scales_of(i, layout)
                        scores = scores * lax.broadcast_in_dim(k_scales, scores.shape, [1])

                    @pl.when(i + stages < steps)  # else nobody waits for it
                    def _() -> None:
                        plgpu.barrier_arrive(k_free.at[stage])

                    scores = online_softmax.capped(scores, scale, softcap)
                    if masked:
                        at = here + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
                        scores = jnp.where(seen_by(asking, at), scores, LOW)
                    v_scales = None
                    if is_int8:
                        plgpu.barrier_wait(v_bars.at[stage])
                        v_scales = lax.broadcast_in_dim(v_pages.scales_of(i, layout), scores.shape, [1])
                        if masked:  # those of others may be NaN
                            v_scales = jnp.where((at >= seen_from) & (at < seen_to), v_scales, 0.0)
                    weights, sums = online_softmax.weighed(scores, sums, own, v_scales)
                    if not is_int8:
                        plgpu.barrier_wait(v_bars.at[stage])
                    if masked and not is_int8:

                        @pl.when((here < seen_from) | (here + page_size > seen_to))
                        def _() -> None:
                            @pl.when(tile == 0)
                            def _() -> None:
                                online_softmax.clean(values.at[stage], here, seen_from, seen_to)

                            if tiles > 1:  # the others read the same page
                                plgpu.barrier_arrive(cleaned)
                                plgpu.barrier_wait(cleaned)

                    acc = None
                    if own is None:
                        mine = None if w_smem is None else w_smem.at[tile]
                        acc = online_softmax.added(
                            sums.acc,
                            weights,
                            values.at[stage],
                            mine,
                            by_warps=form.by_warps,
                            interpreted=interpreted,
                        )
                    else:
                        own.add(weights, values.at[stage])

                    @pl.when(i + stages < steps)
                    def _() -> None:
                        plgpu.barrier_arrive(v_free.at[stage])

                    return sums._replace(acc=acc)

                if sinks_ref:
                    sums = online_softmax.begin(dim, sinks_ref[0][head] * jnp.float32(LOG2E), 1, own)
                else:
                    sums = online_softmax.begin(dim, memory=own)
                if window is None and chunk is None:
                    sums = lax.fori_loop(0, whole, functools.partial(step, masked=False), sums)
                sums = lax.fori_loop(whole, steps, functools.partial(step, masked=True), sums)
                share = 1 / jnp.maximum(sums.total, 1e-30)
                begin = jnp.minimum(jnp.maximum(before - skipped, 0), rows)
                count = jnp.maximum(jnp.minimum(end - skipped, rows) - begin, 0)
                for at in range(0, dim, columns):
                    channels = slice(at, at + columns)
                    here, there = out_smem.at[tile], out_ref.at[:, head, channels]
                    if own is None:
                        out = sums.acc[:, channels]
                        out = out * lax.broadcast_in_dim(share, out.shape, [0])
                        here[...] = out.astype(jnp.bfloat16)
                    else:
                        own.store(share, at, here)
                    plgpu.commit_smem()
                    copy_rows(here, there, begin, token + begin, count, rows)

            @pl.when(tile == tiles)
            def _fetch() -> None:
                if tiles > 1:
                    plgpu.set_max_registers(fewer_registers, action="decrease")
                head = lax.div(first_head, jnp.int32(group))

                if is_int8:

                    def fetch_int8(i: Any, plane: int) -> None:
                        found = table_ref[row, first_page + i]
                        (k_pages, v_pages)[plane].fetch(*kv_refs, found, plane, head, kv_heads, i)

                    rings = (k_pages.widen, k_bars, k_free), (v_pages.widen, v_bars, v_free)
                    widen_ahead(steps, stages, fetch_int8, rings)
                    return

                def fetch(i: Any, stage: Any) -> None:
                    (kv_ref,) = kv_refs
                    found = table_ref[row, first_page + i]
                    for plane, pages, bars in ((0, k_pages, k_bars), (1, v_pages, v_bars)):
                        plgpu.copy_gmem_to_smem(
                            kv_ref.at[found, plane, head], pages.at[stage], bars.at[stage]
                        )

                fetch_ahead(steps, stages, fetch, k_free, v_free)

        pages: Any = plgpu.SMEM((stages, page_size, dim), jnp.bfloat16, transforms=TILED)
        if is_int8:
            pages = Int8Ring.of_stages(stages, page_size, dim)
        weights = None
        if not form.in_tensor_memory and (interpreted or form.by_warps):
            weights = online_softmax.weights_of((tiles, rows, page_size), dim, by_warps=form.by_warps)
        pl.run_scoped(
            scoped,
            plgpu.SMEM((tiles, rows, dim), jnp.bfloat16, transforms=TILED),
            pages,
            pages,
            plgpu.SMEM((tiles, rows, columns), jnp.bfloat16),
            weights,
            TensorMemory.of_tiles(tiles, page_size, dim) if form.in_tensor_memory else None,
            plgpu.Barrier(num_barriers=tiles),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=tiles, num_barriers=stages),
            plgpu.Barrier(num_arrivals=tiles, num_barriers=stages),
            plgpu.Barrier(num_arrivals=tiles),
            collective_axes="warpgroup",
        )

    # A tile is copied whole, also the last one of the step.
    given = views(kv) if is_int8 else (kv,)
    padded = jnp.pad(q, ((0, rows * tiles), (0, 0), (0, 0)))
    out: Array = launched(
        kernel,
        jax.ShapeDtypeStruct((num_tokens, num_heads, dim), jnp.bfloat16),
        grid=(num_heads // heads, len(positions)),
        grid_names=("heads", "block"),
        num_threads=tiles + 1,
        thread_name="warpgroup",
    )(
        padded,
        blocks.owners,
        blocks.eighths,
        positions,
        blocks.before,
        blocks.ends,
        page_table,
        *given,
        *(() if sinks is None else (sinks.astype(jnp.float32),)),
    )
    return out
