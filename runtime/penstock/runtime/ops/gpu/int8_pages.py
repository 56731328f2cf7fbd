"""Pages of int8 in shared memory, and how a warpgroup makes operands of the tensor cores of them.

Whole numbers up to 127 are exact in bfloat16, so numbers become that, and scales multiply what comes of them
in float32: those of keys the scores, and those of values the weights. Nothing is rounded but what is rounded
of a cache in bfloat16, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from penstock.runtime.ops.gpu.tiles import LINES, TILED, loaded
from penstock.runtime.ops.kv_rows import GPU_LANES, first_line_of_scales, words_of

TILED_COLUMNS: Any = (plgpu.TilingTransform((LINES, GPU_LANES)), plgpu.SwizzleTransform(GPU_LANES))
"""How columns of int8 lie in shared memory, of which operands are made."""
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


def _fetch(
    kv: Any,
    words: Any,
    page: Any,
    plane: int,
    head: Any,
    kv_heads: int,
    numbers: Any,
    scales: Any,
    barrier: Any,
) -> None:
    """Begin to copy a head's keys or values of a page, in `COPIES`, to int8 [columns of a head, page, lanes]
    and float32 [page]. `kv` and `words` are `views`.
    """
    of_head = numbers.shape[0]
    plgpu.copy_gmem_to_smem(kv.at[page, plane, pl.ds(head * of_head, of_head)], numbers, barrier)
    line = first_line_of_scales(kv_heads, of_head * GPU_LANES) + head
    plgpu.copy_gmem_to_smem(words.at[page, plane, line], scales, barrier)


def widen(numbers: Any, operand: Any) -> None:
    """Make an operand bfloat16 [rows, columns * lanes] of numbers int8 [columns, rows, lanes]."""
    for i in range(numbers.shape[0]):
        column = loaded(numbers.at[i], plgpu.Layout.WGMMA_UPCAST_2X)
        operand[:, i * GPU_LANES : (i + 1) * GPU_LANES] = column.astype(jnp.bfloat16)


def _read(scales: Any, layout: Any) -> Any:
    """Read the scales of a page, float32 [page], as the columns of scores in this layout lie in registers."""
    return loaded(scales, layout.reduce(0), optimized=False)


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
            plgpu.SMEM(columns, jnp.int8, transforms=TILED_COLUMNS),
            plgpu.SMEM((stages, page_size), jnp.float32),
            plgpu.SMEM((page_size, dim), jnp.bfloat16, transforms=TILED),
        )

    def fetch(
        self, kv: Any, words: Any, page: Any, plane: int, head: Any, kv_heads: int, stage: Any, barrier: Any
    ) -> None:
        """Begin to copy a head's keys or values of a page, in `COPIES`. `kv` and `words` are `views`."""
        places = self.numbers.at[stage], self.scales.at[stage]
        _fetch(kv, words, page, plane, head, kv_heads, *places, barrier)

    def take(self, stage: Any) -> Any:
        """Make an operand of the numbers of a page that has come, and return its scales, float32 [page]. Then
        the place is free. The last product with the operand must have been waited for, by all warps.
        """
        widen(self.numbers.at[stage], self.operand)
        scales = _read(self.scales.at[stage], plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        return scales


class Int8Ring(NamedTuple):
    """Places for keys or values of a head where one warpgroup makes the operands that others multiply. Others
    may still read the scales of as many pages as there are places, while as many have been sent for.
    """

    numbers: Any
    """int8 [stages, columns of a head, page, lanes]."""
    scales: Any
    """float32 [2 * stages, page]."""
    operands: Any
    """bfloat16 [stages, page, D]."""
    arrived: Any
    """A barrier for each place of numbers."""

    @classmethod
    def of_stages(cls, stages: int, page_size: int, dim: int) -> Int8Ring:
        """Return what to allocate."""
        pages = Int8Pages.of_stages(stages, page_size, dim)
        return cls(
            pages.numbers,
            plgpu.SMEM((2 * stages, page_size), jnp.float32),
            plgpu.SMEM((stages, page_size, dim), jnp.bfloat16, transforms=TILED),
            plgpu.Barrier(num_arrivals=COPIES, num_barriers=stages),
        )

    @staticmethod
    def bytes_of_stage(page_size: int, dim: int) -> int:
        """Count the bytes of shared memory of each stage."""
        return page_size * (dim + 2 * 4 + dim * 2)

    def fetch(self, kv: Any, words: Any, page: Any, plane: int, head: Any, kv_heads: int, step: Any) -> None:
        """Begin to copy what this step multiplies. `kv` and `words` are `views`."""
        stage = self._stage(step)
        places = self.numbers.at[stage], self.scales.at[self._place(step)]
        _fetch(kv, words, page, plane, head, kv_heads, *places, self.arrived.at[stage])

    def widen(self, step: Any) -> None:
        """Wait for what this step multiplies, and make an operand of it."""
        stage = self._stage(step)
        plgpu.barrier_wait(self.arrived.at[stage])
        widen(self.numbers.at[stage], self.operands.at[stage])
        plgpu.commit_smem()

    def scales_of(self, step: Any, layout: Any) -> Any:
        """Return the scales of this step's page, float32 [page], whose operand has been made. `layout`: that
        of the scores.
        """
        return _read(self.scales.at[self._place(step)], layout)

    def _stage(self, step: Any) -> Any:
        return lax.rem(step, jnp.int32(self.numbers.shape[0]))

    def _place(self, step: Any) -> Any:
        return lax.rem(step, jnp.int32(self.scales.shape[0]))


def widen_ahead(
    steps: Any,
    stages: int,
    fetch: Callable[[Any, int], None],
    rings: Sequence[tuple[Callable[[Any], None], Any, Any]],
) -> None:
    """Fetch what a loop of `steps` steps multiplies, up to `stages` steps ahead, and make operands of it.
    fetch(i, number) begins to copy what step i multiplies of the ring of this number. Each ring has what
    makes its operand for a step, a barrier for each place at which it is told that the operand is made, and
    one at which those arrive who have read it.
    """
    for i in range(stages):

        @pl.when(i < steps)
        def _(i: int = i) -> None:
            for number in range(len(rings)):
                fetch(jnp.int32(i), number)

    @pl.loop(0, steps)
    def _(i: Any) -> None:
        stage = lax.rem(i, jnp.int32(stages))
        for number, (make, made, free) in enumerate(rings):

            @pl.when(i >= stages)
            def _(free: Any = free) -> None:
                plgpu.barrier_wait(free.at[stage])

            make(i)
            plgpu.barrier_arrive(made.at[stage])

            @pl.when(i + stages < steps)
            def _(number: int = number) -> None:
                fetch(i + stages, number)
