"""Pages of int8 in shared memory, and how a warpgroup makes operands of the tensor cores of them.

Whole numbers up to 127 are exact in bfloat16, so numbers become that, and scales multiply what comes of them
in float32: those of keys the scores, and those of values the weights. Nothing is rounded but what is rounded
of a cache in bfloat16, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from penstock.runtime.ops.gpu.tiles import LINES, TILED, loaded
from penstock.runtime.ops.kv_rows import GPU_LANES, first_line_of_scales, words_of

_TILED_COLUMNS: Any = (plgpu.TilingTransform((LINES, GPU_LANES)), plgpu.SwizzleTransform(GPU_LANES))
COPIES = 2
"""A page comes in so many, of its numbers and of its scales."""


def bytes_of(page_size: int, dim: int) -> int:
    """Count the bytes of shared memory of a head's keys or values of one page."""
    return page_size * (dim + 4)


def views(kv: Array) -> tuple[Array, Array]:
    """Return what a kernel reads of a cache in columns of `GPU_LANES`: itself, and its scales as float32 in
    the lines of `words_of`.
    """
    return kv, lax.bitcast_convert_type(words_of(kv), jnp.float32)


class Int8Pages(NamedTuple):
    """Places in shared memory for keys or values of a head."""

    numbers: Any
    """int8 [stages, columns of a head, page, lanes]."""
    scales: Any
    """float32 [stages, page]."""
    operand: Any
    """bfloat16 [page, D]: the numbers of the page that is multiplied."""

    @classmethod
    def of_stages(cls, stages: int, page_size: int, dim: int) -> Int8Pages:
        """Return what to allocate."""
        columns = (stages, dim // GPU_LANES, page_size, GPU_LANES)
        return cls(
            plgpu.SMEM(columns, jnp.int8, transforms=_TILED_COLUMNS),
            plgpu.SMEM((stages, page_size), jnp.float32),
            plgpu.SMEM((page_size, dim), jnp.bfloat16, transforms=TILED),
        )

    def fetch(
        self, kv: Any, words: Any, page: Any, plane: int, head: Any, kv_heads: int, stage: Any, barrier: Any
    ) -> None:
        """Begin to copy a head's keys or values of a page, in `COPIES`. `kv` and `words` are `views`."""
        of_head = self.numbers.shape[1]
        columns = kv.at[page, plane, pl.ds(head * of_head, of_head)]
        plgpu.copy_gmem_to_smem(columns, self.numbers.at[stage], barrier)
        line = first_line_of_scales(kv_heads, of_head * GPU_LANES) + head
        plgpu.copy_gmem_to_smem(words.at[page, plane, line], self.scales.at[stage], barrier)

    def take(self, stage: Any) -> Any:
        """Make an operand of the numbers of a page that has come, and return its scales, float32 [page]. Then
        the place is free. The last product with the operand must have been waited for, by all warps.
        """
        for i in range(self.numbers.shape[1]):
            numbers = loaded(self.numbers.at[stage, i], plgpu.Layout.WGMMA_UPCAST_2X)
            self.operand[:, i * GPU_LANES : (i + 1) * GPU_LANES] = numbers.astype(jnp.bfloat16)
        scales = loaded(self.scales.at[stage], plgpu.Layout.WGMMA.reduce(0), optimized=False)
        plgpu.commit_smem()
        return scales
