"""What LoRA adapters (Hu et al. 2021, arXiv 2106.09685) add to the products of linear layers, by XLA.

All adapters that can be used lie in one array, the pool: a row for each slot, and slot 0 stands for no
adapter. A layer has the same place in every row. There it has, for each of its parts, the matrix A as
[in, rank] and the matrix B, times the adapter's scaling, as [rank, out]; the parts' As come first. Smaller
ranks are filled up with zeros. Each token has a slot, so any mix of adapters is one program.

The products are written as sums over gathered matrices, so a token's result depends on its own slot alone.

Where a model is cut over devices, each has a pool of its own. Of a layer whose outputs are cut it has A and
its outputs of B. Of one whose inputs are cut it has its inputs of A and B: the products of all devices are
added up with those of the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


@dataclass(frozen=True, slots=True)
class AdapterPlace:
    """Where the matrices of one linear layer lie in a row of the pool. `begin` and `size` count in units of
    `AdapterRows.rank` values.
    """

    begin: int
    in_size: int
    parts: tuple[int, ...]
    """Numbers of outputs of the parts, which lie side by side."""

    @property
    def size(self) -> int:
        """How many units it takes."""
        return len(self.parts) * self.in_size + sum(self.parts)

    def a_at(self, part: int) -> int:
        """Where the A of a part begins, in units."""
        return self.begin + part * self.in_size

    def b_at(self, part: int) -> int:
        """Where the B of a part begins, in units."""
        return self.begin + len(self.parts) * self.in_size + sum(self.parts[:part])


class AdapterRows(NamedTuple):
    """The adapters of the tokens of one step."""

    pool: Array
    """[slots, units * rank] in the model's dtype."""
    slots: Array
    """The slot of each token, int32 [T]; 0: none."""
    rank: int

    @property
    def are_any(self) -> Array:
        """Whether any token has an adapter, bool []."""
        return jnp.any(self.slots > 0)

    def a(self, place: AdapterPlace, part: int) -> Array:
        """The A of each token, float32 [T, in, rank]."""
        return self._gathered(place.a_at(part), place.in_size).reshape(-1, place.in_size, self.rank)

    def b(self, place: AdapterPlace, part: int) -> Array:
        """The B of each token, float32 [T, rank, out]."""
        size = place.parts[part]
        return self._gathered(place.b_at(part), size).reshape(-1, self.rank, size)

    def _gathered(self, begin: int, size: int) -> Array:
        found = self.pool[:, begin * self.rank : (begin + size) * self.rank]
        return found.at[self.slots].get(mode="clip").astype(jnp.float32)


def delta(x: Array, rows: AdapterRows, place: AdapterPlace) -> Array:
    """What the tokens' adapters add to a layer's product: x [T, in] -> float32 [T, out]. Nothing is computed
    where no token has one.
    """

    def made() -> Array:
        wide = x.astype(jnp.float32)
        found = []
        for part in range(len(place.parts)):
            small = jnp.sum(wide[:, :, None] * rows.a(place, part), axis=1)
            found.append(jnp.sum(small[:, :, None] * rows.b(place, part), axis=1))
        return jnp.concatenate(found, axis=1)

    with jax.named_scope("adapters"):
        shape = (x.shape[0], sum(place.parts))
        result: Array = lax.cond(rows.are_any, made, lambda: jnp.zeros(shape, jnp.float32))
    return result


def added(y: Array, more: Array, rows: AdapterRows) -> Array:
    """y + more, both float32 [T, ...], in the rows of tokens that have an adapter. The others stay as they
    are, bit for bit.
    """
    has = (rows.slots > 0).reshape(-1, *(1,) * (y.ndim - 1))
    return jnp.where(has, y + more, y)
