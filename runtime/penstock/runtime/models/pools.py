"""The small parameters of all layers, in up to three arrays. A step passes every array of the model to its
program, and each one costs the host time: Qwen3-0.6B passes at most 150 arrays, where it would pass over 340
with one array for each tensor.

Norms and biases lie one after the other in one array, the scales of int8 outputs in another, and what is
float32 in any model, such as the corrections of a router's scores, in a third. A layer knows its place there,
which is static: a slice in XLA, an offset for the CPU kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.runtime.models.load_rules import Padding, ParamPath
from penstock.runtime.ops.adapters import AdapterRows

_ALIGNMENT = 32  # of places, in elements: every vector begins in a cache line of its own


@dataclass(frozen=True, slots=True)
class Place:
    """The `size` columns of a pool from `begin` on."""

    begin: int
    size: int

    @property
    def end(self) -> int:
        return self.begin + self.size

    @property
    def columns(self) -> slice:
        return slice(self.begin, self.end)


VECTORS: ParamPath = ("vectors",)
SCALES: ParamPath = ("scales",)
FLOATS: ParamPath = ("floats",)
"""The paths of the pools in a model's state."""


class Pools(NamedTuple):
    """The pools of one model, and the adapters of the tokens that it computes."""

    vectors: jax.Array
    """Norms and biases, [size] in the model's dtype."""
    scales: jax.Array | None
    """Scales of outputs, float32 [size], with int8; else None."""
    floats: jax.Array | None = None
    """What is float32 whatever the model's dtype is, [size]; None if there is nothing."""
    adapters: AdapterRows | None = None
    """The adapters of the step's tokens; None where there can be none."""


class Planner:
    """Hands out the places of one pool while a model is built."""

    def __init__(self, path: ParamPath) -> None:
        """Plans the pool at `path`."""
        self.size = 0
        self._path = path
        self._padding: list[Padding] = []

    def take(self, size: int) -> Place:
        """Reserve the next `size` columns."""
        place = Place(self.size, size)
        self.size += -(-size // _ALIGNMENT) * _ALIGNMENT
        if place.end < self.size:
            self._padding.append(Padding(self._path, place.end, self.size - place.end))
        return place

    @property
    def padding(self) -> tuple[Padding, ...]:
        """The columns between places, which nothing uses."""
        return tuple(self._padding)


@dataclass(frozen=True, slots=True)
class PoolPlanners:
    """One planner for each of `Pools`."""

    vectors: Planner
    scales: Planner
    floats: Planner

    @classmethod
    def new(cls) -> PoolPlanners:
        """Make planners of empty pools."""
        return cls(Planner(VECTORS), Planner(SCALES), Planner(FLOATS))

    @property
    def padding(self) -> tuple[Padding, ...]:
        """The columns between places of all pools."""
        return self.vectors.padding + self.scales.padding + self.floats.padding


class PooledModel(nnx.Module):
    """A model with pools, of which its parts have taken places."""

    def take_pools(self, planners: PoolPlanners, dtype: jnp.dtype) -> None:
        """Make the pools, once all parts have taken their places."""
        num_vectors = planners.vectors.size
        self.vectors = nnx.Param(jnp.zeros((num_vectors,), dtype)) if num_vectors else None
        num_scales, num_floats = planners.scales.size, planners.floats.size
        self.scales = nnx.Param(jnp.zeros((num_scales,), jnp.float32)) if num_scales else None
        self.floats = nnx.Param(jnp.zeros((num_floats,), jnp.float32)) if num_floats else None
        self.padding, self.dtype = planners.padding, dtype

    @property
    def pools(self) -> Pools:
        """The small parameters of all layers."""
        return Pools(
            jnp.zeros((1,), self.dtype) if self.vectors is None else self.vectors[...],
            None if self.scales is None else self.scales[...],
            None if self.floats is None else self.floats[...],
        )
