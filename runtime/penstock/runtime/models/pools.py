"""Small parameters of all layers in one or two arrays: a step passes every array of the model to its program,
and each costs the host time.

Norms and biases lie one after the other in one array, the scales of int8 outputs in another. A layer knows
its place there, which is static: a slice in XLA, an offset for the CPU kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax

_ALIGNMENT = 32  # of places, in elements: every vector begins in a cache line of its own


@dataclass(frozen=True, slots=True)
class Place:
    """`size` columns of a pool, from `begin` on."""

    begin: int
    size: int

    @property
    def columns(self) -> slice:
        return slice(self.begin, self.begin + self.size)


class Pools(NamedTuple):
    """The pools of one model."""

    vectors: jax.Array
    """[size] in the model's dtype: norms and biases."""
    scales: jax.Array | None
    """float32 [2, size] with int8: see `native.Packed`."""


class Planner:
    """Hands out the places of one pool while a model is built."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, size: int) -> Place:
        """The next `size` columns."""
        place = Place(self.size, size)
        self.size += -(-size // _ALIGNMENT) * _ALIGNMENT
        return place


@dataclass(frozen=True, slots=True)
class PoolPlanners:
    """One planner for each of `Pools`."""

    vectors: Planner
    scales: Planner
