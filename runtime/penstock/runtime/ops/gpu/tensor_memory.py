"""Products of Blackwell's own tensor cores, which keep sums in a memory of their own, TMEM. Nothing waits for
a product but who wants its result, and a barrier tells when that is there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

ROWS = 128
"""Rows of a product. One of 64 rows takes as long."""
LAYOUT: Any = plgpu.Layout.TCGEN05
"""How sums lie in a warpgroup's registers."""
_PIECE = 64
"""Columns that a warpgroup has in its registers at a time, where it needs not all."""


class TensorMemory(NamedTuple):
    """What a tile of queries has in TMEM, and the barriers of its products. Two products share no barrier,
    because one warp of the warpgroup could begin the second before another has seen the end of the first.
    """

    scores: Any
    """float32 [128, page]."""
    weights: Any
    """bfloat16 [128, page], two in a column."""
    acc: Any
    """The values, added up with their weights, float32 [128, D]."""
    scored: Any
    added: Any

    @classmethod
    def of_tiles(cls, tiles: int, page_size: int, dim: int) -> TensorMemory:
        """Return what to allocate for so many tiles. A block can have 512 columns of 32 bits. Where shared
        memory has room for two tiles of queries, TMEM has, too.
        """
        barrier = plgpu.Barrier(num_barriers=tiles, orders_tensor_core=True)
        return cls(
            plgpu.TMEM((tiles, ROWS, page_size), jnp.float32),
            plgpu.TMEM((tiles, ROWS, page_size), jnp.bfloat16, packed=True),
            plgpu.TMEM((tiles, ROWS, dim), jnp.float32),
            barrier,
            barrier,
        )

    def at(self, tile: Any) -> TensorMemory:
        """Return what this tile has."""
        return TensorMemory(*(each.at[tile] for each in self))

    def clear(self) -> None:
        """Begin with no values."""
        zeros = jnp.zeros(self.acc.shape, jnp.float32)
        plgpu.async_store_tmem(self.acc, plgpu.layout_cast(zeros, LAYOUT))
        plgpu.commit_tmem()

    def product(self, queries: Any, keys: Any) -> Any:
        """Multiply queries [128, D] with keys [page, D], both in shared memory: float32 [128, page]."""
        plgpu.tcgen05_mma(self.scores, queries, keys.transpose((1, 0)), self.scored, accumulate=False)
        plgpu.barrier_wait(self.scored)
        found = plgpu.async_load_tmem(self.scores, layout=LAYOUT)
        plgpu.wait_load_tmem()  # else the next product may overwrite what is still read
        return found

    def fade(self, shares: Any) -> None:
        """Multiply the values so far with float32 [128], for `add`."""
        for piece in _pieces(self.acc.shape[1]):
            found = plgpu.async_load_tmem(self.acc.at[piece], layout=LAYOUT)
            plgpu.wait_load_tmem()
            faded = found * lax.broadcast_in_dim(shares, found.shape, [0])
            plgpu.async_store_tmem(self.acc.at[piece], faded)

    def add(self, weights: Any, values: Any) -> None:
        """Add weights, bfloat16 [128, page] in registers, times values [page, D] in shared memory."""
        plgpu.async_store_tmem(self.weights, weights)
        plgpu.commit_tmem()
        plgpu.tcgen05_mma(self.acc, self.weights, values, self.added)
        plgpu.barrier_wait(self.added)

    def store(self, shares: Any, begin: int, out: Any) -> None:
        """Write the values from this channel on, multiplied with float32 [128], to out bfloat16
        [128, channels] in shared memory.
        """
        for of_acc, of_out in zip(_pieces(out.shape[1], begin), _pieces(out.shape[1]), strict=True):
            found = plgpu.async_load_tmem(self.acc.at[of_acc], layout=LAYOUT)
            scaled = found * lax.broadcast_in_dim(shares, found.shape, [0])
            out.at[of_out][...] = scaled.astype(jnp.bfloat16)


def _pieces(columns: int, begin: int = 0) -> list[tuple[slice, slice]]:
    """Cut so many columns from `begin` on into pieces."""
    ends = range(begin, begin + columns, _PIECE)
    return [(slice(None), slice(at, min(at + _PIECE, begin + columns))) for at in ends]
