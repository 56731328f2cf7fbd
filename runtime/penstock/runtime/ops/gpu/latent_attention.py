"""Latent attention on GPUs of Hopper and Blackwell: a kernel in Pallas' Mosaic GPU, for decode steps and for
steps with chunks of prompts. It reads only the pages in use.

All heads share one key of each position, and its first channels are the value, so a piece of 64 positions
comes to shared memory once and is used as both. A block of threads takes 64 queries: some heads of a token,
or all heads of a few consecutive tokens of one row. Where there are few blocks, several take the same queries
and have each a share of the positions, and a second launch merges what they found.

An accumulator of 64 queries and 512 channels is too large for the registers of one warpgroup, so two have
each a half of the channels, as in DeepSeek's FlashMLA. The first one multiplies queries with keys, keeps the
peaks and sums of an `online_softmax`, and hands the weights of each piece over through shared memory. The
second one also brings the pieces, as soon as both have read what was in their place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from penstock.runtime.ops.attention import blocks_of
from penstock.runtime.ops.gpu import online_softmax
from penstock.runtime.ops.gpu.forms import ON_HOPPER, GpuForm
from penstock.runtime.ops.gpu.online_softmax import LEAST_STAGES, LOW, MOST_STAGES, Sums
from penstock.runtime.ops.gpu.tiles import (
    BARRIER_BYTES,
    LINES,
    SWIZZLE,
    TILE,
    TILED,
    launched,
    loaded,
    zeros,
)

_MOST_VALUES = 512
"""Channels of values: a half of them, for 64 queries, takes half of a warpgroup's registers."""
_THREADS = 128
"""Threads of a warpgroup."""
_BLOCKS = 132
"""So many blocks are wanted: one for each multiprocessor of an H100, whose shared memory one block fills."""
_MOST_SPLITS = 32
_FADE, _PEAK, _TOTAL = range(3)
"""What the first warpgroup writes of each query for others: by how much a piece lowers the sums so far, and
at the end the largest score and the sum of the weights."""


def stages_for(dim: int, *, form: GpuForm) -> int:
    """Tell how many pieces of keys shared memory can hold at a time; less than 2 do not do."""
    beside = TILE * dim * 2 + TILE * TILE * 2 + 3 * TILE * 4 + BARRIER_BYTES
    return min(MOST_STAGES, (form.shared_bytes - beside) // (TILE * dim * 2))


def takes(page_size: int, dim: int, value_dim: int, *, form: GpuForm) -> bool:
    """Say whether the kernel can compute with such pages and keys of `dim` channels, the first `value_dim` of
    which are the values. `form`: that for the GPU.
    """
    return (
        page_size % TILE == 0
        and dim % SWIZZLE == 0
        and value_dim % (2 * SWIZZLE) == 0
        and value_dim <= min(dim, _MOST_VALUES)
        and stages_for(dim, form=form) >= LEAST_STAGES
    )


def tiles_for(num_heads: int) -> tuple[int, int]:
    """Tell into how many tiles of queries the heads of a token are cut, and how many heads each has, with
    padding: whole tiles of shared memory.
    """
    tiles = -(-num_heads // TILE)
    return tiles, -(-num_heads // (tiles * LINES)) * LINES


@functools.partial(jax.jit, static_argnames=("value_dim", "scale", "single", "form", "interpreted"))
def latent_attention(
    q: Array,
    kv: Array,
    firsts: Array,
    starts: Array,
    q_lens: Array,
    page_table: Array,
    *,
    value_dim: int,
    scale: float,
    single: bool,
    form: GpuForm = ON_HOPPER,
    interpreted: bool = False,
) -> Array:
    """Compute causal attention whose values are the first channels of the keys: q bfloat16 [T, H, D], kv
    bfloat16 [page, 1, 1, page size, D] -> bfloat16 [T, H, value_dim], which is undefined for tokens of no
    row.

    Row r has the q_lens[r] tokens of q from firsts[r] on, which are at its positions from starts[r] on, and
    their keys are in the cache; with q_lens 0 it costs nothing. page_table int32[R, P] has the page of each
    position. What no token attends to may be NaN. `single` promises that no row has more than one token.
    `scale` is as in `AttentionOptions`. `form`: that for the GPU. `interpreted`: as Pallas' interpreter knows
    products.
    """
    num_tokens, num_heads, dim = q.shape
    page_size, width = kv.shape[3], page_table.shape[1]
    tiles, heads = tiles_for(num_heads)
    all_heads = tiles * heads
    together = 1 if single else max(1, TILE // all_heads)  # tokens of a block
    owners, passed, counts = blocks_of(q_lens, num_tokens, together)
    tokens, positions = firsts[owners] + passed, starts[owners] + passed
    pieces_of_page, half = page_size // TILE, value_dim // 2
    shares = _splits_for(len(owners) * tiles, width * pieces_of_page)
    stages = stages_for(dim, form=form)

    def kernel(
        q_ref: Any,
        kv_ref: Any,
        owners_ref: Any,
        tokens_ref: Any,
        positions_ref: Any,
        counts_ref: Any,
        table_ref: Any,
        out_ref: Any,
        *sums_out: Any,
    ) -> None:
        number, tile, split = (lax.axis_index(name) for name in ("block", "tile", "split"))
        row, position, count = owners_ref[number], positions_ref[number], counts_ref[number]
        seen_to = position + count
        pieces = jnp.where(count > 0, lax.div(seen_to + (TILE - 1), jnp.int32(TILE)), 0)
        share = lax.div(pieces + (shares - 1), jnp.int32(shares))
        begin = jnp.minimum(split * share, pieces)
        steps = jnp.minimum(begin + share, pieces) - begin
        # So many pieces are seen by all of the block's tokens, because the first one sees them.
        whole = jnp.minimum(jnp.maximum(lax.div(position + 1, jnp.int32(TILE)) - begin, 0), steps)

        first = tokens_ref[number] * all_heads + tile * heads  # of the block's queries

        def write_rows(source: Callable[[slice], Any], target: Callable[[Any], Any]) -> None:
            """Copy what belongs to the block's queries from shared memory, a tile's eight rows at a time: a
            copy must be of one piece there. The two functions return references of some rows.
            """
            for row in range(0, together * heads, LINES):

                @pl.when(row < count * heads)
                def _(row: int = row) -> None:
                    here = source(slice(row, row + LINES))
                    plgpu.copy_smem_to_gmem(here, target(pl.ds(first + row, LINES)))

            plgpu.wait_smem_to_gmem(0)

        def scoped(
            q_smem: Any,
            k_smem: Any,
            w_smem: Any,
            rows_smem: Any,
            q_bar: Any,
            k_bars: Any,
            k_free: Any,
            w_full: Any,
            w_free: Any,
            done: Any,
        ) -> None:
            warpgroup = lax.axis_index("warpgroup")

            def take(i: Any, acc: Any, own: slice, *, masked: bool = True) -> Any:
                """Add a piece's values of these channels with the weights that are in shared memory. Without
                `masked` the piece is one that all tokens see.
                """
                values = k_smem.at[lax.rem(i, jnp.int32(stages)), :, own]
                here = (begin + i) * TILE
                if masked:

                    @pl.when(here + TILE > seen_to)
                    def _() -> None:
                        for channel in range(0, half, SWIZZLE):  # few registers are left
                            some = values.at[:, channel : channel + SWIZZLE]
                            online_softmax.clean(some, here, jnp.int32(0), seen_to)

                return online_softmax.added(
                    acc, w_smem, values, by_warps=form.by_warps, interpreted=interpreted
                )

            def write(acc: Any, own: slice) -> None:
                """Write the sum of these channels in the place of the queries, which nobody reads any more,
                and from there to the result.
                """
                share = 1 / jnp.maximum(loaded(rows_smem.at[_TOTAL], plgpu.Layout.WGMMA.reduce(1)), 1e-30)
                acc = acc * lax.broadcast_in_dim(share, acc.shape, [0])
                q_smem.at[:, own][...] = acc.astype(jnp.bfloat16)
                plgpu.commit_smem()
                write_rows(lambda some: q_smem.at[some, own], lambda some: out_ref.at[split, some, own])

            @pl.when(warpgroup == 0)
            def _score() -> None:
                @pl.when(steps > 0)
                def _() -> None:
                    asked = together * heads
                    plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(first, asked)], q_smem.at[:asked], q_bar)
                    plgpu.barrier_wait(q_bar)

                def step(i: Any, sums: Sums, *, masked: bool) -> Sums:
                    stage = lax.rem(i, jnp.int32(stages))
                    plgpu.barrier_wait(k_bars.at[stage])
                    scores = online_softmax.product(
                        q_smem, k_smem.at[stage], by_warps=form.by_warps, interpreted=interpreted
                    )
                    scores = online_softmax.capped(scores, scale, None)
                    if masked:
                        of_row, of_key = (
                            plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=plgpu.Layout.WGMMA)
                            for axis in (0, 1)
                        )
                        asking = position + (lax.div(of_row, jnp.int32(heads)) if together > 1 else 0)
                        scores = jnp.where((begin + i) * TILE + of_key <= asking, scores, LOW)
                    weights, sums_now = online_softmax.weighed(scores, sums)

                    @pl.when(i > 0)
                    def _() -> None:
                        plgpu.barrier_wait(w_free)

                    w_smem[...] = weights
                    rows_smem[_FADE] = jnp.exp2(sums.peak - sums_now.peak)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(w_full)
                    acc = take(i, sums_now.acc, slice(0, half), masked=masked)

                    @pl.when(i + stages < steps)  # else nobody waits for it
                    def _() -> None:
                        plgpu.barrier_arrive(k_free.at[stage])

                    return sums_now._replace(acc=acc)

                sums = online_softmax.begin(half)
                sums = lax.fori_loop(0, whole, functools.partial(step, masked=False), sums)
                acc, peak, total = lax.fori_loop(whole, steps, functools.partial(step, masked=True), sums)
                rows_smem[_PEAK] = peak
                rows_smem[_TOTAL] = total
                plgpu.commit_smem()

                @pl.when(steps > 0)
                def _() -> None:
                    plgpu.barrier_arrive(done)
                    write(acc, slice(0, half))

                for which, sums_ref in zip((_PEAK, _TOTAL), sums_out, strict=False):
                    write_rows(
                        functools.partial(lambda which, some: rows_smem.at[which, some], which),
                        functools.partial(lambda ref, some: ref.at[split, some], sums_ref),
                    )

            @pl.when(warpgroup == 1)
            def _help() -> None:
                def fetch(i: Any, stage: Any) -> None:
                    piece = begin + i
                    page = table_ref[row, lax.div(piece, jnp.int32(pieces_of_page))]
                    offset = lax.rem(piece, jnp.int32(pieces_of_page)) * TILE
                    plgpu.copy_gmem_to_smem(
                        kv_ref.at[page, 0, 0, pl.ds(offset, TILE)], k_smem.at[stage], k_bars.at[stage]
                    )

                for i in range(stages):

                    @pl.when(i < steps)
                    def _(i: int = i) -> None:
                        fetch(jnp.int32(i), i)

                def step(i: Any, acc: Any) -> Any:
                    stage = lax.rem(i, jnp.int32(stages))
                    plgpu.barrier_wait(k_bars.at[stage])
                    plgpu.barrier_wait(w_full)
                    fade = loaded(rows_smem.at[_FADE], plgpu.Layout.WGMMA.reduce(1))
                    acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
                    acc = take(i, acc, slice(half, value_dim))

                    @pl.when(i + 1 < steps)
                    def _() -> None:
                        plgpu.barrier_arrive(w_free)

                    @pl.when(i + stages < steps)
                    def _() -> None:
                        plgpu.barrier_wait(k_free.at[stage])
                        fetch(i + stages, stage)

                    return acc

                acc = lax.fori_loop(0, steps, step, zeros(half))

                @pl.when(steps > 0)
                def _() -> None:
                    plgpu.barrier_wait(done)
                    write(acc, slice(half, value_dim))

        pl.run_scoped(
            scoped,
            plgpu.SMEM((TILE, dim), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((stages, TILE, dim), jnp.bfloat16, transforms=TILED),
            online_softmax.weights_of((TILE, TILE), half, by_warps=form.by_warps),
            plgpu.SMEM((3, TILE), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(),
            collective_axes="warpgroup",
        )

    # A block of several tokens is copied whole, also the last one of the step.
    behind = (together - 1) * all_heads
    flat = jnp.pad(q, ((0, 0), (0, all_heads - num_heads), (0, 0))).reshape(num_tokens * all_heads, dim)
    rows = (shares, num_tokens * all_heads)
    of_rows = jax.ShapeDtypeStruct(rows, jnp.float32)
    parts, *sums = launched(
        kernel,
        (jax.ShapeDtypeStruct((*rows, value_dim), jnp.bfloat16), *((of_rows, of_rows) if shares > 1 else ())),
        grid=(shares, tiles, len(owners)),
        grid_names=("split", "tile", "block"),
        num_threads=2,
        thread_name="warpgroup",
    )(jnp.pad(flat, ((0, behind), (0, 0))), kv, owners, tokens, positions, counts, page_table)
    out: Array = _merged(parts, *sums) if sums else parts[0]
    return out.reshape(num_tokens, all_heads, value_dim)[:, :num_heads]


def _splits_for(blocks: int, width: int) -> int:
    """Tell how many blocks share the positions of a block's queries: enough to fill the GPU, and at most one
    a piece.
    """
    return max(1, min(_BLOCKS // blocks, width, _MOST_SPLITS))


def _merged(parts: Array, peaks: Array, totals: Array) -> Array:
    """Compute what the shares of each query give together: parts bfloat16 [shares, N, D], each divided by the
    sum of its weights, and float32 [shares, N], the peaks and these sums -> bfloat16 [N, D]. A share without
    positions has the sum 0 and may be NaN.
    """
    shares, num_rows, dim = parts.shape
    channels = dim // _THREADS  # of a thread
    layout = plgpu.Layout.WG_STRIDED((dim,), vec_size=channels & -channels)

    def kernel(parts_ref: Any, peaks_ref: Any, totals_ref: Any, out_ref: Any) -> None:
        row = lax.axis_index("query")
        peaks = [peaks_ref[s, row] for s in range(shares)]
        top = functools.reduce(jnp.maximum, peaks)
        sums = [totals_ref[s, row] * jnp.exp2(peak - top) for s, peak in enumerate(peaks)]
        scale = jnp.float32(1) / jnp.maximum(functools.reduce(lambda x, y: x + y, sums), jnp.float32(1e-30))
        out = plgpu.layout_cast(jnp.zeros((dim,), jnp.float32), layout)
        for s, total in enumerate(sums):
            # Nobody wrote the part of a share without positions. The first share has some if any has.
            written = jnp.where(total > 0, jnp.int32(s), 0)
            part = loaded(parts_ref.at[written, row], layout).astype(jnp.float32)
            out += part * (total * scale)
        out_ref[row] = out.astype(jnp.bfloat16)

    merged: Array = launched(
        kernel, jax.ShapeDtypeStruct((num_rows, dim), jnp.bfloat16), grid=(num_rows,), grid_names=("query",)
    )(parts, peaks, totals)
    return merged
