"""Attention of decode steps on GPUs of Hopper and Blackwell: a kernel in Pallas' Mosaic GPU.

There are two launches. In the first, a block of threads takes one row, one head of keys and one share of the
pages that the row attends to. One warpgroup brings pages to shared memory, a few ahead; the other multiplies
and keeps an `online_softmax`. The tensor cores take at least 64 rows, so the queries of all heads are
multiplied, and only those that read this head of keys are kept: decoding waits for memory and not for
products. On Hopper a whole warpgroup multiplies together, and on Blackwell each warp by itself. A block
writes its sum of values, the peak of its scores and the sum of its weights. The second launch merges the
shares of a row.

Lengths and page tables are read at run time. Padding rows cost nothing, and their output is 0.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from penstock.runtime.ops.gpu import online_softmax
from penstock.runtime.ops.gpu.forms import ON_HOPPER, GpuForm
from penstock.runtime.ops.gpu.int8_pages import COPIES, Int8Pages, bytes_of, views
from penstock.runtime.ops.gpu.online_softmax import LEAST_STAGES, LOG2E, LOW, MOST_STAGES, Sums
from penstock.runtime.ops.gpu.tiles import (
    ALIGNMENT,
    BARRIER_BYTES,
    SWIZZLE,
    TILE,
    TILED,
    WIDEST,
    columns_out,
    fetch_ahead,
    launched,
    loaded,
)
from penstock.runtime.ops.kv_rows import num_heads_of

_HEADS = 8
"""Heads of queries come to shared memory in whole tiles of so many."""
_THREADS = 128
"""Threads of a warpgroup, each of which holds as many channels of a vector."""
_BLOCKS = 264
"""So many blocks are wanted: two for each multiprocessor."""
_MOST_SPLITS = 32


def stages_for(page_size: int, dim: int, *, form: GpuForm, is_int8: bool = False) -> tuple[int, int]:
    """Tell how many pages of keys and of values shared memory can hold at a time, of which less than 2 do not
    do, and how many channels of the sums beside them.
    """
    of_stage, most = 2 * page_size * dim * 2, MOST_STAGES
    beside = TILE * dim * 2 + 2 * TILE * 4 + BARRIER_BYTES
    if form.by_warps:
        beside += TILE * page_size * 2  # weights
    if is_int8:  # as many bytes on their way as in bfloat16
        beside += of_stage + 2 * ALIGNMENT  # operands, and the ends of the scales
        of_stage, most = 2 * bytes_of(page_size, dim), 2 * MOST_STAGES
    for columns in columns_out(dim):
        stages = min(most, (form.shared_bytes - beside - TILE * columns * 4) // of_stage)
        if stages >= LEAST_STAGES:
            break
    return stages, columns


def takes(page_size: int, dim: int, group: int, *, form: GpuForm, is_int8: bool = False) -> bool:
    """Say whether the kernel can compute with such pages and heads, in bfloat16 or int8; `group` query heads
    read a head of keys. `form`: as `decode_attention` takes it.
    """
    return (
        page_size in (TILE, 2 * TILE)
        and dim % SWIZZLE == 0
        and dim <= WIDEST
        and group <= TILE
        and stages_for(page_size, dim, form=form, is_int8=is_int8)[0] >= LEAST_STAGES
    )


@functools.partial(jax.jit, static_argnames=("scale", "softcap", "splits", "form", "interpreted"))
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
    splits: int | None = None,
    form: GpuForm = ON_HOPPER,
    interpreted: bool = False,
) -> Array:
    """Compute attention of one query a row: q bfloat16 [R, H, D], kv bfloat16 [page, 2, KH, page size, D] ->
    bfloat16 [R, H, D]. Or kv is int8 in columns of `GPU_LANES`, and q is spread (`kv_rows`).

    Row r attends to its positions from oldest[r] up to ends[r], which is exclusive, and 0 for a padding row;
    page_table int32[R, P] has the page of each position. What lies elsewhere may be NaN. `splits`: how many
    blocks share a row and a head of keys; None: as many as fill the GPU. `sinks` float32[H], `scale` and
    `softcap` are as in `AttentionOptions`. `form`: that for the GPU. `interpreted`: as Pallas'
    interpreter knows products.
    """
    num_rows, num_heads, dim = q.shape
    kv_heads = num_heads_of(kv, dim)
    group = num_heads // kv_heads
    most = max(1, TILE // group)
    outs = []
    for first in range(0, kv_heads, most):
        count = min(most, kv_heads - first)
        mine = slice(first * group, (first + count) * group)
        asked = jnp.pad(q[:, mine], ((0, 0), (0, -(count * group) % _HEADS), (0, 0)))
        shared = splits or _splits_for(num_rows, count, page_table.shape[1])
        parts = _of_shares(
            asked, kv, oldest, ends, page_table,
            first=first, count=count, group=group, scale=scale, softcap=softcap, splits=shared,
            form=form, interpreted=interpreted,
        )  # fmt: skip
        own = None if sinks is None else sinks[mine].astype(jnp.float32)
        outs.append((_merged_here if dim % _THREADS == 0 else _merged_in_xla)(*parts, own))
    return outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=1)


def _splits_for(num_rows: int, kv_heads: int, width: int) -> int:
    """Tell how many blocks share a row and a head of keys: enough to fill the GPU, and at most one a page."""
    return max(1, min(_BLOCKS // (num_rows * kv_heads), width, _MOST_SPLITS))


def _of_shares(
    q: Array,
    kv: Array,
    oldest: Array,
    ends: Array,
    page_table: Array,
    *,
    first: int,
    count: int,
    group: int,
    scale: float,
    softcap: float | None,
    splits: int,
    form: GpuForm,
    interpreted: bool,
) -> tuple[Array, Array, Array]:
    """Compute for `count` heads of keys from `first` on, and each share of a row: the sum of values float32
    [R, count, splits, group, D], and of all heads of q the peaks and sums of weights, float32
    [R, count, splits, 64].
    """
    num_rows, num_heads, dim = q.shape
    page_size, kv_heads = kv.shape[3], num_heads_of(kv, dim)
    is_int8 = kv.dtype == jnp.int8
    stages, columns = stages_for(page_size, dim, form=form, is_int8=is_int8)

    def kernel(q_ref: Any, oldest_ref: Any, ends_ref: Any, table_ref: Any, *others: Any) -> None:
        *kv_refs, acc_out, peak_out, total_out = others
        row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
        seen_from, seen_to = oldest_ref[row], ends_ref[row]
        page = jnp.int32(page_size)
        first_page = lax.div(seen_from, page)
        pages = lax.div(seen_to + (page_size - 1), page) - first_page
        share = lax.div(pages + (splits - 1), jnp.int32(splits))
        skipped = jnp.minimum(split * share, pages)
        steps = jnp.minimum(skipped + share, pages) - skipped
        begin = first_page + skipped

        def scoped(
            q_smem: Any,
            k_pages: Any,
            v_pages: Any,
            acc_smem: Any,
            row_smem: Any,
            w_smem: Any,
            q_bar: Any,
            k_bars: Any,
            v_bars: Any,
            k_free: Any,
            v_free: Any,
        ) -> None:
            warpgroup = lax.axis_index("warpgroup")

            @pl.when(warpgroup == 0)
            def _compute() -> None:
                @pl.when(steps > 0)
                def _() -> None:
                    plgpu.copy_gmem_to_smem(q_ref.at[row], q_smem.at[pl.ds(0, num_heads)], q_bar)
                    plgpu.barrier_wait(q_bar)

                def step(i: Any, sums: Sums) -> Sums:
                    stage = lax.rem(i, jnp.int32(stages))
                    position = (begin + i) * page_size

                    def free(barriers: Any) -> None:
                        @pl.when(i + stages < steps)  # else nobody waits for it
                        def _() -> None:
                            plgpu.barrier_arrive(barriers.at[stage])

                    plgpu.barrier_wait(k_bars.at[stage])
                    if is_int8:
                        k_scales = k_pages.take(stage)
                        free(k_free)
                    keys = k_pages.operand if is_int8 else k_pages.at[stage]
                    scores = online_softmax.product(
                        q_smem, keys, by_warps=form.by_warps, interpreted=interpreted
                    )
                    if is_int8:
                        scores = scores * lax.broadcast_in_dim(k_scales, scores.shape, [1])
                    else:
                        free(k_free)
                    at = position + plgpu.broadcasted_iota(
                        jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA
                    )
                    scores = online_softmax.capped(scores, scale, softcap)
                    seen = (at >= seen_from) & (at < seen_to)
                    scores = jnp.where(seen, scores, LOW)
                    v_scales = None
                    if is_int8:
                        plgpu.barrier_wait(v_bars.at[stage])
                        v_scales = lax.broadcast_in_dim(v_pages.take(stage), scores.shape, [1])
                        v_scales = jnp.where(seen, v_scales, 0.0)  # others may be NaN
                        free(v_free)
                    weights, sums = online_softmax.weighed(scores, sums, scales=v_scales)
                    if not is_int8:
                        plgpu.barrier_wait(v_bars.at[stage])

                        @pl.when((position < seen_from) | (position + page_size > seen_to))
                        def _() -> None:
                            online_softmax.clean(v_pages.at[stage], position, seen_from, seen_to)

                    acc = online_softmax.added(
                        sums.acc,
                        weights,
                        v_pages.operand if is_int8 else v_pages.at[stage],
                        w_smem,
                        by_warps=form.by_warps,
                        interpreted=interpreted,
                    )
                    if not is_int8:
                        free(v_free)
                    return sums._replace(acc=acc)

                acc, peak, total = lax.fori_loop(0, steps, step, online_softmax.begin(dim))
                row_smem[0] = peak
                row_smem[1] = total
                mine = acc_smem.at[pl.ds(head * group, group)]
                for at in range(0, dim, columns):
                    some = slice(at, at + columns)
                    acc_smem[...] = acc[:, some]
                    plgpu.commit_smem()
                    if at == 0:
                        plgpu.copy_smem_to_gmem(row_smem.at[0], peak_out.at[row, head, split])
                        plgpu.copy_smem_to_gmem(row_smem.at[1], total_out.at[row, head, split])
                    plgpu.copy_smem_to_gmem(mine, acc_out.at[row, head, split, :, some])
                    plgpu.wait_smem_to_gmem(0)

            @pl.when(warpgroup == 1)
            def _fetch() -> None:
                def fetch(i: Any, stage: Any) -> None:
                    at = table_ref[row, begin + i]
                    for plane, pages, bars in ((0, k_pages, k_bars), (1, v_pages, v_bars)):
                        bar = bars.at[stage]
                        if is_int8:
                            pages.fetch(*kv_refs, at, plane, first + head, kv_heads, stage, bar)
                        else:
                            (kv_ref,) = kv_refs
                            plgpu.copy_gmem_to_smem(kv_ref.at[at, plane, first + head], pages.at[stage], bar)

                fetch_ahead(steps, stages, fetch, k_free, v_free)

        places: Any = plgpu.SMEM((stages, page_size, dim), jnp.bfloat16, transforms=TILED)
        if is_int8:
            places = Int8Pages.of_stages(stages, page_size, dim)
        copies = COPIES if is_int8 else 1
        kept = interpreted or form.by_warps
        pl.run_scoped(
            scoped,
            plgpu.SMEM((TILE, dim), jnp.bfloat16, transforms=TILED),
            places,
            places,
            plgpu.SMEM((TILE, columns), jnp.float32),
            plgpu.SMEM((2, TILE), jnp.float32),
            online_softmax.weights_of((TILE, page_size), dim, by_warps=form.by_warps) if kept else None,
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            collective_axes="warpgroup",
        )

    made: tuple[Array, Array, Array] = launched(
        kernel,
        (
            jax.ShapeDtypeStruct((num_rows, count, splits, group, dim), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, count, splits, TILE), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, count, splits, TILE), jnp.float32),
        ),
        grid=(splits, count, num_rows),
        grid_names=("split", "head", "row"),
        num_threads=2,
        thread_name="warpgroup",
    )(q, oldest, ends, page_table, *(views(kv) if is_int8 else (kv,)))
    return made


def _merged_in_xla(acc: Array, peak: Array, total: Array, sinks: Array | None) -> Array:
    """Compute what the shares of `_of_shares` give together, bfloat16 [R, heads, D], for heads that are
    narrower than a warpgroup.
    """
    num_rows, kv_heads, _, group, dim = acc.shape
    own = jnp.arange(kv_heads * group, dtype=jnp.int32).reshape(1, kv_heads, 1, group)
    peak, total = (jnp.take_along_axis(each, own, axis=3) for each in (peak, total))
    top = peak.max(axis=2, keepdims=True)
    sink = None if sinks is None else sinks.reshape(1, kv_heads, 1, group) * LOG2E
    if sink is not None:
        top = jnp.maximum(top, sink)
    fade = jnp.exp2(peak - top)
    below = (fade * total).sum(axis=2)
    if sink is not None:
        below = below + jnp.exp2(sink - top)[:, :, 0]
    above = (acc * fade[..., None]).sum(axis=2)
    out = above / jnp.maximum(below, 1e-30)[..., None]
    return out.reshape(num_rows, kv_heads * group, dim).astype(jnp.bfloat16)


def _merged_here(acc: Array, peak: Array, total: Array, sinks: Array | None) -> Array:
    """Compute the same in one launch, for heads of whole warpgroups: a block takes a row and a query head."""
    num_rows, kv_heads, splits, group, dim = acc.shape
    heads = kv_heads * group

    def kernel(acc_ref: Any, peak_ref: Any, total_ref: Any, *others: Any) -> None:
        *sinks_ref, out_ref = others
        row, h = lax.axis_index("row"), lax.axis_index("query head")
        head, member = lax.div(h, jnp.int32(group)), lax.rem(h, jnp.int32(group))
        peaks = [peak_ref[row, head, s, h] for s in range(splits)]
        totals = [total_ref[row, head, s, h] for s in range(splits)]
        layout = plgpu.Layout.WG_STRIDED((dim,), vec_size=1)
        parts = [loaded(acc_ref.at[row, head, s, member], layout) for s in range(splits)]
        sink = [ref[h] * jnp.float32(LOG2E) for ref in sinks_ref]
        top = functools.reduce(jnp.maximum, [*peaks, *sink])
        fades = [jnp.exp2(each - top) for each in peaks]
        below = sum((fade * each for fade, each in zip(fades, totals, strict=True)), jnp.float32(0))
        below = sum((jnp.exp2(each - top) for each in sink), below)
        above = functools.reduce(
            lambda x, y: x + y, [part * fade for part, fade in zip(parts, fades, strict=True)]
        )
        scale = jnp.float32(1) / jnp.maximum(below, jnp.float32(1e-30))
        out_ref[row, h] = (above * scale).astype(jnp.bfloat16)

    merged: Array = launched(
        kernel,
        jax.ShapeDtypeStruct((num_rows, heads, dim), jnp.bfloat16),
        grid=(heads, num_rows),
        grid_names=("query head", "row"),
    )(acc, peak, total, *(() if sinks is None else (sinks,)))
    return merged
