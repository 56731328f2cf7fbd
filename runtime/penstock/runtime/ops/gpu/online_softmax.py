"""What the kernels for attention on GPUs share: how a warpgroup takes a page of keys and values into an
online softmax (Milakov and Gimelshein 2018).

Scores are in units of log2, because the GPU has an
instruction for powers of 2. Weights are rounded to bfloat16 before they multiply values; everything else is
float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from penstock.runtime.ops.gpu.tensor_memory import LAYOUT, ROWS, TensorMemory
from penstock.runtime.ops.gpu.tiles import (
    ACC,
    SWIZZLE,
    TILE,
    loaded,
    product_by_warps,
    tiled_in,
    zeros,
)

LEAST_STAGES = 2
"""Pages that shared memory must hold at a time, so that one can come while another is read."""
MOST_STAGES = 3
_FEWEST_BY_WARPS = 16
"""Positions that an instruction of a warp multiplies."""
LOG2E = math.log2(math.e)
LOW = -1e30
"""Below all scores, and finite, so that differences of such scores are numbers."""


class Sums(NamedTuple):
    """What is known of the pages so far, in the registers of a warpgroup; all float32."""

    acc: Any
    """The values, added up with their weights, [64, D]; None: they are in a `TensorMemory`."""
    peak: Any
    """The largest score of each query, [64]."""
    total: Any
    """The sum of the weights, 2^(score - peak), [64]."""


def begin(dim: int, peak: Any = LOW, total: float = 0, memory: TensorMemory | None = None) -> Sums:
    """Begin with no page. `peak` and `total` are those of one score without a value, where there is one.
    `memory`: where the values are added up, of 128 queries; None: in registers, of 64.
    """
    rows, layout = (TILE, plgpu.Layout.WGMMA) if memory is None else (ROWS, LAYOUT)
    if memory is not None:
        memory.clear()
    return Sums(
        peak=plgpu.layout_cast(jnp.full((rows,), peak, jnp.float32), layout.reduce(1)),
        total=plgpu.layout_cast(jnp.full((rows,), total, jnp.float32), layout.reduce(1)),
        acc=zeros(dim) if memory is None else None,
    )


def product(queries: Any, keys: Any, *, by_warps: bool, interpreted: bool) -> Any:
    """Multiply queries [64, D] with keys [page, D], both in shared memory: float32 [64, page]. `by_warps`:
    by `product_by_warps`.
    """
    if by_warps:
        return product_by_warps(
            zeros(keys.shape[0]), queries, keys.transpose((1, 0)), interpreted=interpreted
        )

    def multiply(acc_ref: Any) -> Any:
        plgpu.wgmma(acc_ref, queries, keys.transpose((1, 0)))
        return acc_ref[...]

    return pl.run_scoped(multiply, ACC((TILE, keys.shape[0]), jnp.float32))


def capped(scores: Any, scale: float, softcap: float | None) -> Any:
    """Turn products into scores in units of log2."""
    scores = scores * scale
    if softcap is not None:  # c * tanh(s / c), by a power of 2
        scores = 2 * softcap / (1 + jnp.exp2(scores * (-2 * LOG2E / softcap))) - softcap
    return scores * LOG2E


def weighed(
    scores: Any, sums: Sums, memory: TensorMemory | None = None, scales: Any = None
) -> tuple[Any, Sums]:
    """Return the weights of a page's scores, bfloat16 [64, page], and the sums without the page's values.
    `memory`: as `begin` takes it. `scales`: of the values, float32 [64, page], with which the weights are
    multiplied; None: the values have none.
    """
    acc, peak, total = sums
    top = jnp.maximum(peak, scores.max(axis=1))
    fade = jnp.exp2(peak - top)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(top, scores.shape, [0]))
    total = total * fade + weights.sum(axis=1)
    if scales is not None:
        weights = weights * scales
    weights = weights.astype(jnp.bfloat16)
    if memory is None:
        acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
    else:
        memory.fade(fade)
    return weights, Sums(acc, top, total)


def clean(values: Any, position: Any, seen_from: Any, seen_to: Any) -> None:
    """Write 0 over a page's values [page, D] outside of these positions: what nobody attends to may be
    NaN, so it must not even be multiplied by 0. `position`: that of the page's first token.
    """
    held = position + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
    held = (held >= seen_from) & (held < seen_to)
    found = loaded(values, plgpu.Layout.WGMMA, optimized=False)
    values[...] = jnp.where(held, found, jnp.zeros_like(found))
    plgpu.commit_smem()


def weights_of(shape: tuple[int, ...], dim: int, *, by_warps: bool) -> Any:
    """Return what to allocate for weights that multiply values of `dim` channels, as `added` takes them."""
    columns = _piece_by_warps(dim) if by_warps else SWIZZLE
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=tiled_in(columns))


def added(acc: Any, weights: Any, values: Any, kept: Any = None, *, by_warps: bool, interpreted: bool) -> Any:
    """Add weights [64, page] times values [page, D]. `kept`: shared memory (`weights_of`) to which the
    weights go first. None: they are multiplied where they are, in such memory or in registers, from which
    neither `product_by_warps` nor the interpreter multiplies. `by_warps`: by `product_by_warps`.
    """
    if kept is not None:
        kept[...] = weights
        plgpu.commit_smem()
        weights = kept
    if by_warps:
        piece = _piece_by_warps(acc.shape[1])
        out = product_by_warps(acc, weights, values, interpreted=interpreted, piece=piece)
        plgpu.commit_smem()  # else the next copy may overwrite what is still read
        return out

    def add(acc_ref: Any) -> Any:
        plgpu.wgmma(acc_ref, weights, values)
        return acc_ref[...] if interpreted else None

    if interpreted:
        return acc + pl.run_scoped(add, ACC(acc.shape, jnp.float32))
    return pl.run_state(add)(ACC.init(acc))


def _piece_by_warps(columns: int) -> int:
    """Tell how many positions' values `product_by_warps` has in registers at a time, where it adds to so many
    columns. A warp would spill with more, beside so many sums.
    """
    return SWIZZLE if columns <= 2 * SWIZZLE else _FEWEST_BY_WARPS
