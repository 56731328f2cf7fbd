"""The one stage that a process has of a model, where each process of a group has one (`models.stages`), and
the links over which stages in two processes pass arrays.

A link is a program that both processes call, a collective permute from the devices of one stage to those of
the other. So what passes never is an object of Python's. XLA has the calls of one process wait for each
other, in their order, and each call of a link waits for the other process. The caller must not wait: else the
leader would make no plan, and log no call, before a step has passed all stages before the last one. But XLA
computes a program within the call if it has fewer than 1,000 operations and its arguments are there, as those
of a receiver always are. So a link's program also counts (`_COUNTS`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.runtime.execution.backend import Backend
from penstock.runtime.execution.compilation import compile_all, compile_program
from penstock.runtime.execution.device_state import DeviceState, builder_of_shapes, flat_leaves
from penstock.runtime.execution.on_mesh import WHOLE
from penstock.runtime.execution.program_set import ProgramBuilder
from penstock.runtime.execution.runner_config import RunnerConfig
from penstock.runtime.models.load_rules import AXIS
from penstock.runtime.models.stages import Stage
from penstock.runtime.ops.device_arrays import zeros

_ENDS = "ends"
"""The axis of a link's two ends."""
_COUNTS = 2048
"""Additions in a link's program, which make XLA compute it beside the caller (XLA's `cheap_computation_`)."""


class OwnStage(DeviceState):
    """The state of the stage that this process has."""

    def __init__(
        self,
        graphdef: nnx.GraphDef[Any],
        weights: Any,
        config: RunnerConfig,
        backend: Backend,
        stages: Sequence[Stage],
    ) -> None:
        """`weights`: the model's state, with shapes in place of the leaves that this process does not
        have.
        """
        assert backend.own_stage is not None, "another process has the other stages"
        self._of_all_stages = backend
        self.num_stages = len(stages)
        """Of the whole model."""
        stage, own_backend = stages[backend.own_stage], backend.of_stage(backend.own_stage)
        # Only the last stage samples, so the others need no penalties and no biases.
        without_features = dataclasses.replace(config, feature_slots=0)
        self._first = None
        if not stage.is_first:
            shapes = _of_stage(jax.tree.map(_shape, weights), stages[0])
            first = (graphdef, shapes, stages[0].cache, without_features, own_backend)
            self._first = partial(builder_of_shapes, *first, stage=stages[0])
        super().__init__(
            graphdef,
            _of_stage(weights, stage),
            stage.cache,
            config if stage.is_last else without_features,
            own_backend,
            stage=stage,
        )

    def builder(self, num_pages: tuple[int, ...]) -> ProgramBuilder:
        """See `DeviceState`. What the first stage passes is told by its shapes."""
        first = None if self._first is None else self._first(num_pages)
        return dataclasses.replace(super().builder(num_pages), first=first)

    def links(self) -> Links:
        """Compile the links to the neighbours, for a cache that is allocated: see `links_of`."""
        return links_of(self.builder(self.num_pages), self._of_all_stages)


def _of_stage(weights: Any, stage: Stage) -> Any:
    """Return the model's state with the leaves of one stage; the others are None."""
    leaves = [leaf if stage.has(path) else None for path, leaf in flat_leaves(weights)]
    return jax.tree.unflatten(jax.tree.structure(weights), leaves)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


class Link:
    """Passes arrays from the devices of one stage, each of which has all of them, to those of another. Each
    process has the devices of one of the two, and makes the same calls.
    """

    def __init__(
        self, sender: Mesh, receiver: Mesh, passed: Any, sizes: Collection[int], config: RunnerConfig
    ) -> None:
        """Compile the programs. `passed`: a tree of the shapes of what is passed, but for their first axis,
        which has one of these `sizes`.
        """
        ends = Mesh(np.stack([sender.devices, receiver.devices]), (_ENDS, AXIS))
        self._sharding = NamedSharding(ends, PartitionSpec(_ENDS))
        self._passed, self._own = passed, NamedSharding(receiver, WHOLE)
        jobs = {size: partial(self._compiled, size) for size in sizes}
        self._programs = compile_all(jobs, threads=config.threads, show_progress=config.show_progress)
        is_receiver = receiver.devices.flat[0].process_index == jax.process_index()
        own = self._own if is_receiver else NamedSharding(sender, WHOLE)
        (counts,) = zeros((_COUNTS,), np.dtype(np.int32), own)
        self._counts = self._at_one_end(counts)
        self._nothing = {size: self._zeros(size) for size in sizes} if is_receiver else {}

    def send(self, arrays: Any) -> None:
        """Pass a tree of arrays, and do not wait for the other process."""
        leaves = jax.tree.leaves(arrays)
        self._programs[leaves[0].shape[0]](self._counts, *map(self._at_one_end, leaves))

    def receive(self, size: int) -> Any:
        """Return the tree of arrays that the other process passes, and do not wait for it."""
        _, *made = self._programs[size](self._counts, *self._nothing[size])
        return jax.tree.unflatten(
            jax.tree.structure(self._passed),
            [_of_shards((size, *each.shape[1:]), self._own, each) for each in made],
        )

    def _at_one_end(self, array: jax.Array) -> jax.Array:
        """Return the array of both ends of which this process has what all of its devices have."""
        return _of_shards((2 * array.shape[0], *array.shape[1:]), self._sharding, array)

    def _zeros(self, size: int) -> list[jax.Array]:
        """Return what the receiving process gives in place of what it receives."""
        return [
            self._at_one_end(array)
            for each in jax.tree.leaves(self._passed)
            for array in zeros((size, *each.shape[1:]), each.dtype, self._own)
        ]

    def _compiled(self, size: int) -> jax.stages.Compiled:
        def program(counts: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
            return counts + 1, *(lax.ppermute(array, _ENDS, [(0, 1)]) for array in arrays)

        spec = self._sharding.spec
        on_both = jax.shard_map(
            program, mesh=self._sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        passed = [((size, *each.shape[1:]), each.dtype) for each in jax.tree.leaves(self._passed)]
        given = [
            jax.ShapeDtypeStruct((2 * rows, *others), dtype, sharding=self._sharding)
            for (rows, *others), dtype in [((_COUNTS,), np.int32), *passed]
        ]
        return compile_program(on_both, *given, name=f"pass{size}")


def _of_shards(shape: tuple[int, ...], sharding: NamedSharding, array: jax.Array) -> jax.Array:
    """Return an array of this shape and place of what this process's devices have of another one."""
    shards = [shard.data for shard in array.addressable_shards]
    made: jax.Array = jax.make_array_from_single_device_arrays(shape, sharding, shards)
    return made


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of one stage."""

    given: Link | None
    """From the stage before; None for the first one."""
    passed: Link | None
    """To the next stage; None for the last one."""


def links_of(builder: ProgramBuilder, backend: Backend) -> Links:
    """Make the links of this process's stage. `builder`: that of its programs."""
    config, stage, stages = builder.config, builder.stage, backend.stages
    assert stage is not None, "links are between stages"
    passed = builder.passed(builder.largest)
    sizes = sorted({key.tokens for key in config.buckets.keys()})  # noqa: SIM118 # no mapping

    def link(sender: int, receiver: int) -> Link:
        return Link(stages[sender], stages[receiver], passed, sizes, config)

    number = stage.number
    return Links(
        given=None if stage.is_first else link(number - 1, number),
        passed=None if stage.is_last else link(number, number + 1),
    )
