"""What LoRA adapters (Hu et al. 2021, arXiv 2106.09685) add to the products of linear layers, by XLA.

All adapters that can be used lie in one array, the pool: a row for each slot, and slot 0 stands for no
adapter. A layer has the same place in every row, and one of which each expert has one has as many places.
There it has, for each of its parts, the matrix A as [in, rank] and the matrix B, times the adapter's scaling,
as [rank, out]; the parts' As come first. Where native kernels compute the layer, the
matrices are packed: A is [in / 2, rank, 2], and B is [out / 16, rank / 2, 16, 2]. Smaller ranks are filled up
with zeros. Each token has a slot, so any mix of adapters is one program.

The products are written as sums over gathered matrices, so a token's result depends on its own slot alone.

Where a model is cut over devices, each has a pool of its own. Of a layer whose outputs are cut it has A and
its outputs of B. Of one whose inputs are cut it has its inputs of A and B: the products of all devices are
added up with those of the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

_MOST_GATHERED = 1 << 24
"""The most values of a matrix that are gathered at a time: 64 MiB in float32."""
_LEAST_AT_ONCE = 16
"""But those of so many tokens are gathered together: of very few tokens XLA adds up in another order."""


@dataclass(frozen=True, slots=True)
class AdapterPlace:
    """Where the matrices of one linear layer lie in a row of the pool. `begin` and `size` count in units of
    `AdapterRows.rank` values.
    """

    begin: int
    in_size: int
    parts: tuple[int, ...]
    """Numbers of outputs of the parts, which lie side by side."""
    num_experts: int = 1
    """How many experts have such a layer. Their matrices lie one behind the other."""
    packed: bool = False
    """Whether the matrices lie as native kernels read them."""

    @property
    def size(self) -> int:
        """How many units it takes."""
        return self.num_experts * (len(self.parts) * self.in_size + sum(self.parts))

    def of_expert(self, number: int) -> AdapterPlace:
        """Tell where the matrices of one expert lie."""
        own = replace(self, num_experts=1)
        return replace(own, begin=self.begin + number * own.size)

    def a_at(self, part: int) -> int:
        """Tell where the A of a part begins, in units; of the first expert."""
        return self.begin + part * self.in_size

    def b_at(self, part: int) -> int:
        """Tell where the B of a part begins, in units; of the first expert."""
        return self.begin + len(self.parts) * self.in_size + sum(self.parts[:part])


class AdapterRows(NamedTuple):
    """The adapters of the tokens of one step."""

    pool: Array
    """[slots, units * rank] in the model's dtype."""
    slots: Array
    """The slot of each token, int32 [T]; 0: none."""
    rank: int
    experts: Array | None = None
    """The expert of each token, int32 [T], for a layer that each expert has one of. What is
    computed for a number that no expert has must not be used."""

    def has_room(self, place: AdapterPlace) -> bool:
        """Say whether adapters have the matrices of this layer: those of experts lie behind all others, and
        the pool may end before them.
        """
        return bool((place.begin + place.size) * self.rank <= self.pool.shape[1])

    def of_choices(self, ids: Array) -> AdapterRows:
        """Return the adapters of the choices of all tokens, of which each is a row now: ids int32 [T, k] are
        the experts that a token chose.
        """
        return self._replace(slots=jnp.repeat(self.slots, ids.shape[1]), experts=ids.reshape(-1))

    @property
    def are_any(self) -> Array:
        """Whether any token has an adapter, bool []."""
        return jnp.any(self.slots > 0)

    def a(self, place: AdapterPlace, part: int) -> Array:
        """Return the A of each token, float32 [T, in, rank]."""
        found = self._gathered(place, place.a_at(part), place.in_size)
        return found.reshape(-1, place.in_size, self.rank)

    def b(self, place: AdapterPlace, part: int) -> Array:
        """Return the B of each token, float32 [T, rank, out]."""
        size = place.parts[part]
        return self._gathered(place, place.b_at(part), size).reshape(-1, self.rank, size)

    def _gathered(self, place: AdapterPlace, begin: int, size: int) -> Array:
        if self.experts is None:
            found = self.pool[:, begin * self.rank : (begin + size) * self.rank]
            return found.at[self.slots].get(mode="clip").astype(jnp.float32)
        first = (begin - place.begin) * self.rank
        of_all = self.pool[:, place.begin * self.rank : (place.begin + place.size) * self.rank]
        of_each = of_all.reshape(len(of_all), place.num_experts, -1)[:, :, first : first + size * self.rank]
        return of_each.at[self.slots, self.experts].get(mode="clip").astype(jnp.float32)


WriteRow: TypeAlias = Callable[[Array, Array, Array], Array]
"""(pool, slot int32 [], values [units * rank]) to the pool with these values in a slot."""


def write_row(pool: Array, slot: Array, values: Array) -> Array:
    """Write what an adapter has to its slot, see `WriteRow`."""
    return lax.dynamic_update_slice(pool, values[None], (slot, 0))


class LinearAdapters(NamedTuple):
    """The adapters of a linear layer."""

    rows: AdapterRows
    place: AdapterPlace


class ExpertAdapters(NamedTuple):
    """The adapters of a mixture of experts."""

    rows: AdapterRows
    """Those of the tokens, which have no expert yet."""
    gate_up: AdapterPlace
    down: AdapterPlace


def delta(x: Array, rows: AdapterRows, place: AdapterPlace) -> Array:
    """Compute what the tokens' adapters add to a layer's product: x [T, in] -> float32 [T, out]. Nothing is
    computed where no token has one.
    """

    def made(x: Array, rows: AdapterRows) -> Array:
        wide = x.astype(jnp.float32)
        found = []
        for part in range(len(place.parts)):
            small = jnp.sum(wide[:, :, None] * rows.a(place, part), axis=1)
            found.append(jnp.sum(small[:, :, None] * rows.b(place, part), axis=1))
        return jnp.concatenate(found, axis=1)

    return where_any(made, x, rows, place, (sum(place.parts),))


def where_any(
    made: Callable[[Array, AdapterRows], Array],
    x: Array,
    rows: AdapterRows,
    place: AdapterPlace,
    shape: tuple[int, ...],
) -> Array:
    """Compute made(x, rows), x [T, ...] -> float32 [T, *shape], if any token has an adapter; else return
    zeros. `made` gathers the matrices of `place` for each token, so it is given some tokens at a time where
    all of them would take much memory. On CPUs a token has the same bits in either case.
    """
    count = x.shape[0]
    at_once = max(_LEAST_AT_ONCE, _MOST_GATHERED // (max(place.in_size, *place.parts) * rows.rank))
    turns = -(-count // at_once)

    def cut(values: Array) -> Array:
        """Cut what tokens have into parts of equal size, of which the last one may end in zeros."""
        size = -(-count // turns)
        filled = jnp.pad(values, ((0, turns * size - count), *((0, 0),) * (values.ndim - 1)))
        return filled.reshape(turns, size, *values.shape[1:])

    def of_some(each: tuple[Array, Array, Array | None]) -> Array:
        some, slots, experts = each
        return made(some, rows._replace(slots=slots, experts=experts))

    def of_all() -> Array:
        if turns == 1:
            return made(x, rows)
        in_turn: Array = lax.map(of_some, jax.tree.map(cut, (x, rows.slots, rows.experts)))
        return in_turn.reshape(-1, *shape)[:count]

    with jax.named_scope("adapters"):
        found: Array = lax.cond(rows.are_any, of_all, lambda: jnp.zeros((x.shape[0], *shape), jnp.float32))
    return found


def added(y: Array, more: Array, rows: AdapterRows) -> Array:
    """Compute y + more, both float32 [T, ...], in the rows of tokens that have an adapter. The others stay as
    they are, bit for bit.
    """
    has = (rows.slots > 0).reshape(-1, *(1,) * (y.ndim - 1))
    return jnp.where(has, y + more, y)
