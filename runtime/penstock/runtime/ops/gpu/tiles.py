"""What all kernels for GPUs share: the sizes of tiles, how they lie in shared memory, and what differs
between versions of JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from penstock.runtime.ops.attention import blocks_of

TILE = 64
"""Rows of a product of the tensor cores, which take no fewer."""
SWIZZLE = 64
"""Channels of bfloat16 that one line of 128 bytes in shared memory holds."""
LINES = 8
"""Rows that lie together in a tile in shared memory: a tile can only be copied from a multiple of so many."""
BARRIER_BYTES = 1024
"""More than the barriers take of it."""


def tiled_in(columns: int) -> tuple[Any, Any]:
    """Return how bfloat16 lies in shared memory of which so many columns are read at a time."""
    return plgpu.TilingTransform((LINES, columns)), plgpu.SwizzleTransform(2 * columns)


TILED = tiled_in(SWIZZLE)
"""How operands of the tensor cores lie in shared memory."""
ALIGNMENT = 1024
"""What lies in tiles begins at multiples of so many bytes of it."""
WIDEST = 256
"""Columns that a product of the tensor cores has at most."""
ACC: Any = plgpu.ACC  # type: ignore[attr-defined] # it is public, under another name than its class


class Blocks(NamedTuple):
    """How rows of several owners, which lie one after the other, are cut into blocks. Tiles begin at
    multiples of 8 rows, so a block may begin with up to 7 rows of others.
    """

    owners: Array  # int32[B]
    eighths: Array  # int32[B] the block's first row, divided by 8
    before: Array  # int32[B] how many rows of the block are others'
    ends: Array  # int32[B] how many rows the block has, with these; 0 for padding
    passed: Array  # int32[B] how many of the owner's rows come before the block, less the others' in it


def aligned_blocks(firsts: Array, sizes: Array, num_rows: int, block: int) -> Blocks:
    """Cut into blocks of up to `block` rows: owner i has sizes[i] rows from firsts[i] on, of `num_rows`
    together. Blocks of padding come last.
    """
    lead = jnp.where(sizes > 0, firsts % LINES, 0)
    most = num_rows + (LINES - 1) * len(sizes)
    # No owner has more blocks than rows.
    owners, passed, ends = (each[:num_rows] for each in blocks_of(sizes + lead, most, block))
    before = jnp.where(passed == 0, lead[owners], 0)
    passed = passed - lead[owners]
    return Blocks(owners, (firsts[owners] + passed) // LINES, before, ends, passed)


def copy_rows(source: Any, target: Any, begin: Any, first: Any, count: Any, most: int = TILE) -> None:
    """Copy `count` rows of a tile in shared memory, from its row `begin` on, to the GPU's memory, from row
    `first` on, and wait. `source` and `target` are references whose first axis is that of rows. How many rows
    a copy has must be known when it is compiled, so there are pieces of `most`, a half, a quarter, ... of
    them, and those are copied that are together `count`.
    """
    size = most
    while size:
        place = count - lax.rem(count, jnp.int32(2 * size))

        @pl.when(lax.rem(lax.div(count, jnp.int32(size)), jnp.int32(2)) == 1)
        def _(size: int = size, place: Any = place) -> None:
            piece = source.at[pl.ds(begin + place, size)]
            plgpu.copy_smem_to_gmem(piece, target.at[pl.ds(first + place, size)])

        size //= 2
    plgpu.wait_smem_to_gmem(0)


def fetch_ahead(steps: Any, stages: int, fetch: Callable[[Any, Any], None], *free: Any) -> None:
    """Fetch what a loop of `steps` steps reads, up to `stages` steps ahead of it. fetch(i, stage) begins to
    copy what step i reads to this place in shared memory. Each of `free` has a barrier for each place, at
    which those arrive who have read what is there.
    """
    for i in range(stages):

        @pl.when(i < steps)
        def _(i: int = i) -> None:
            fetch(jnp.int32(i), i)

    @pl.loop(0, jnp.maximum(steps - stages, 0))
    def _(i: Any) -> None:
        stage = lax.rem(i, jnp.int32(stages))
        for barriers in free:
            plgpu.barrier_wait(barriers.at[stage])
        fetch(i + stages, stage)


def loaded(ref: Any, layout: Any, *, optimized: bool = True) -> Any:
    """Read in this layout. JAX 0.10 wants an index beside the reference, and 0.11 warns of it."""
    index: tuple[Any, ...] = ((),) if jax.__version_info__ < (0, 11) else ()
    return plgpu.load(ref, *index, layout=layout, optimized=optimized)


def columns_out(dim: int) -> list[int]:
    """Return how many columns of a result, of `dim`, may be in shared memory at a time on their way out: all,
    or fewer, where a kernel lacks the room for all. They divide `dim`.
    """
    return [dim, *(columns for columns in (SWIZZLE, SWIZZLE // 2, SWIZZLE // 4) if columns < dim)]


def zeros(columns: int) -> Any:
    """Return float32 [64, columns] of 0, as products of the tensor cores lie in registers."""
    return plgpu.layout_cast(jnp.zeros((TILE, columns), jnp.float32), plgpu.Layout.WGMMA)


def product_by_warps(acc: Any, left: Any, right: Any, *, interpreted: bool, piece: int = SWIZZLE) -> Any:
    """Add left [64, K] times right [K, N], both bfloat16 in shared memory, to acc float32 [64, N]. Each warp
    multiplies 16 rows by itself, by the instruction that GPUs have since Ampere. It has `piece` of K, a
    multiple of 16 in which both are tiled, in its registers at a time. `interpreted`: the interpreter does
    not know this instruction, so it computes the product as any other.
    """
    if interpreted:
        return acc + jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)
    of_warps: Any = plgpu  # JAX before 0.11 lacks what follows
    for begin in range(0, left.shape[1], piece):
        some = slice(begin, begin + piece)
        a = loaded(left.at[:, some], of_warps.Layout.MMA_LHS(jnp.bfloat16))
        b = loaded(right.at[some], of_warps.Layout.MMA_RHS(jnp.bfloat16))
        acc = of_warps.mma(acc, a, b)
    return acc


def launched(kernel: Callable[..., None], out: Any, **how: Any) -> Callable[..., Any]:
    """Return what launches the kernel: as `plgpu.kernel`, which differs between versions of JAX."""
    # Rows are reduced within warps, which takes no shared memory.
    params = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0)
    made: Callable[..., Any] = plgpu.kernel(kernel, out_type=out, compiler_params=params, **how)
    return made
