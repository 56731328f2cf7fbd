"""Runs a model whose layers are cut into stages (`models.stages`), each on devices of its own.

Each stage has a `DeviceState`: its leaves, its entries of the cache, and page tables, which are the same in
all of them. A step is one program for each stage, called one after the other without waiting, and what one
passes goes to the devices of the next as device arrays. The last stage has all that concerns tokens, and
chooses them.

A row's next input is the token that the last stage has sampled, so that goes back to the first one. It would
make each step wait for the end of the step before. So the first stage reads the tokens as they were after
the latest step that has sampled one for a row of the step at hand (`LastTokens`). The scheduler lets steps
take turns in their rows, as many as there are stages (`SchedulerConfig.num_turns`); then a step begins while
the steps before it are in the next stages.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.backend import Backend
from penstock.runtime.execution.buckets import ProgramKey
from penstock.runtime.execution.device_state import DeviceState, flat_leaves
from penstock.runtime.execution.on_mesh import cut_sharding
from penstock.runtime.execution.program_set import ProgramBuilder, Programs, StagePrograms
from penstock.runtime.execution.runner import Ints, ModelRunner, ProgramCalls
from penstock.runtime.execution.runner_config import RunnerConfig
from penstock.runtime.execution.step_buffer import MAX_SAMPLES, SLOT
from penstock.runtime.execution.step_programs import Chosen
from penstock.runtime.models.load_rules import ParamPath
from penstock.runtime.models.stages import Stage
from penstock.runtime.ops.device_arrays import zeros


class PipelineState(DeviceState):
    """The state of the last stage, with those of the stages before it. What is asked of weights and cache is
    asked of all stages.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef[Any],
        weights: Any,
        config: RunnerConfig,
        backend: Backend,
        stages: Sequence[Stage],
    ) -> None:
        """`weights`: the model's state, of which each leaf lies on devices of the first stage that has it."""
        # Only the last stage samples, so the others need no penalties and no biases.
        without_features = dataclasses.replace(config, feature_slots=0)
        self.before = tuple(
            DeviceState(
                graphdef,
                _of_stage(weights, stage, backend),
                stage.cache,
                without_features,
                backend.of_stage(stage.number),
                stage=stage,
            )
            for stage in stages[:-1]
        )
        """The states of the stages before the last one."""
        self._all_paths = [path for path, _ in flat_leaves(weights)]
        last = stages[-1]
        of_last = _of_stage(weights, last, backend)
        super().__init__(graphdef, of_last, last.cache, config, backend.of_stage(last.number), stage=last)

    # -- weights --

    @property
    def leaves_by_path(self) -> dict[ParamPath, jax.Array]:
        """See `DeviceState`. A leaf that several stages have is that of the first of them."""
        found = dict(super().leaves_by_path)
        for state in reversed(self.before):
            found |= state.leaves_by_path
        return {path: found[path] for path in self._all_paths}

    def replace_leaves(self, new: Mapping[ParamPath, jax.Array | NDArray[Any]]) -> None:
        """See `DeviceState`. Nothing is replaced in any stage unless all have theirs."""
        if unknown := new.keys() - set(self._all_paths):
            raise ConfigError(f"{min(unknown)} is no leaf of the model")
        made = [state.leaves_with(_own(new, state)) for state in self.before]
        self.leaves = self.leaves_with(_own(new, self))
        for state, leaves in zip(self.before, made, strict=True):
            state.leaves = leaves

    def offload_weights(self) -> int:
        """See `DeviceState`."""
        try:
            return super().offload_weights() + sum(state.offload_weights() for state in self.before)
        except BaseException:
            self.restore_weights()  # of the stages before the one that failed
            raise

    def restore_weights(self) -> None:
        """See `DeviceState`. If this raises, some stages have theirs, and a further call moves the others."""
        super().restore_weights()
        for state in self.before:
            state.restore_weights()

    @property
    def num_devices(self) -> int:
        """See `DeviceState`."""
        return super().num_devices + sum(state.num_devices for state in self.before)

    @property
    def weights_bytes(self) -> int:
        """See `DeviceState`. What several stages have counts in each."""
        return super().weights_bytes + sum(state.weights_bytes for state in self.before)

    # -- the cache --

    @property
    def cache_bytes(self) -> int:
        """See `DeviceState`."""
        return super().cache_bytes + sum(state.cache_bytes for state in self.before)

    def allocate_cache(self, num_pages: Sequence[int]) -> None:
        """See `DeviceState`. Each stage has so many pages for its layers."""
        super().allocate_cache(num_pages)
        for state in self.before:
            state.allocate_cache(num_pages)

    def free_cache(self) -> int:
        """See `DeviceState`."""
        return super().free_cache() + sum(state.free_cache() for state in self.before)

    def restore_cache(self) -> None:
        """See `DeviceState`."""
        super().restore_cache()
        for state in self.before:
            state.restore_cache()

    # -- programs --

    def builder(self, num_pages: tuple[int, ...]) -> ProgramBuilder:
        """See `DeviceState`. These are the programs of the last stage."""
        return dataclasses.replace(super().builder(num_pages), first=self.before[0].builder(num_pages))

    def compile_before(self) -> list[StagePrograms]:
        """Compile the programs of the stages before the last one."""
        first, *others = (state.builder(self.num_pages) for state in self.before)
        builders = [first, *(dataclasses.replace(other, first=first) for other in others)]
        return [builder.compile_stage() for builder in builders]

    def free(self) -> None:
        """See `DeviceState`."""
        super().free()
        for state in self.before:
            state.free()


def _of_stage(weights: Any, stage: Stage, backend: Backend) -> Any:
    """Return the model's state with the leaves of one stage, on its devices; the others are None."""
    sharding = cut_sharding(backend.stages[stage.number])
    leaves = [
        jax.device_put(leaf, sharding) if stage.has(path) else None for path, leaf in flat_leaves(weights)
    ]
    return jax.tree.unflatten(jax.tree.structure(weights), leaves)


def _own(new: Mapping[ParamPath, Any], state: DeviceState) -> dict[ParamPath, Any]:
    return {path: new[path] for path in state.paths if path in new}


class LastTokens:
    """The last token of each slot, as it was after each of the latest choices, on the devices of the first
    stage.
    """

    def __init__(self, num_slots: int, sharding: jax.sharding.Sharding, *, num_turns: int) -> None:
        """`num_turns`: see `SchedulerConfig`; so many choices later a slot has its next token."""
        self._sharding, self._num_slots = sharding, num_slots
        self._newest = np.zeros(num_slots, np.int64)
        """For each slot the number of the choice that has made its last token."""
        (tokens,) = zeros((num_slots,), np.dtype(np.int32), sharding)
        self._after: deque[tuple[int, jax.Array]] = deque([(0, tokens)], maxlen=num_turns + 1)
        """The number of each of the latest choices, and the tokens after it."""

    def take(self, slots: Ints, tokens: jax.Array) -> None:
        """Take in a choice, which has made tokens for these slots: all slots' tokens int32[S], on the devices
        of the last stage.
        """
        number = self._after[-1][0] + 1
        self._newest[slots[slots < self._num_slots]] = number
        self._after.append((number, jax.device_put(tokens, self._sharding)))

    def give(self, slots: Ints) -> jax.Array:
        """Return tokens int32[S], of which those of these slots are their last ones. The choice that they
        are of is as old as that allows, so that little is waited for.
        """
        needed = int(self._newest[slots[slots < self._num_slots]].max(initial=0))
        return next(tokens for number, tokens in self._after if number >= needed)


class PipelineCalls(ProgramCalls):
    """Calls the programs of all stages."""

    def __init__(
        self,
        programs: Programs,
        device: PipelineState,
        config: RunnerConfig,
        before: Sequence[StagePrograms],
        num_groups: int,
    ) -> None:
        """`before`: the programs of the stages before the last one. `num_groups`: groups of layers."""
        super().__init__(programs, device, config)
        self._before = list(zip(before, device.before, strict=True))
        self._next = [*(state.sharding for state in device.before[1:]), device.sharding]
        self._tokens = LastTokens(config.max_num_seqs, device.before[0].sharding, num_turns=1 + len(before))
        self._num_groups = num_groups

    def forward(
        self, key: ProgramKey, packed: Ints, *, has_proposed: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """See `ProgramCalls`. Nobody proposes tokens."""
        given: Any = self._tokens.give(row_fields(self._config, key.rows, self._num_groups, packed)[:, SLOT])
        for (programs, state), sharding in zip(self._before, self._next, strict=True):
            state.kv, state.rows, passed = programs.steps[key](
                state.leaves, state.kv, state.rows, packed, given
            )
            given = jax.device_put(passed, sharding)
        device = self._device
        device.kv, device.rows, logits, hidden = self.programs.steps[key](
            device.leaves, device.kv, device.rows, packed, given
        )
        return logits, hidden

    def choose(
        self, logits: jax.Array, packed: Ints, mask: Ints | None, checks: Ints | None = None
    ) -> Chosen:
        """See `ProgramCalls`."""
        chosen = super().choose(logits, packed, mask, checks)
        fields = row_fields(self._config, logits.shape[0], self._num_groups, packed)
        self._tokens.take(fields[fields[:, MAX_SAMPLES] > 0, SLOT], self._device.rows.tokens)
        return chosen

    def write_table_rows(self, packed: Ints) -> None:
        """See `ProgramCalls`. All stages have the same page tables."""
        super().write_table_rows(packed)
        for programs, state in self._before:
            state.rows = programs.table_rows(state.rows, packed)

    def copy_pairs(self, pairs: Ints) -> None:
        """See `ProgramCalls`."""
        super().copy_pairs(pairs)
        for programs, state in self._before:
            state.kv = programs.copy_pages(state.kv, pairs)


def row_fields(config: RunnerConfig, rows: int, num_groups: int, packed: Ints) -> Ints:
    """Return the fields of the rows of a packed buffer for so many rows. `num_groups`: groups of layers."""
    layout = config.layout(ProgramKey(rows, rows, decode_only=True), num_groups)
    return layout.row_views(packed[: layout.rows_size])[1]


class PipelineRunner(ModelRunner):
    """The runner of a model whose layers are cut into stages."""

    device: PipelineState

    def make_calls(self, programs: Programs) -> ProgramCalls:
        """See `ModelRunner`. This compiles the programs of the other stages."""
        before = self.device.compile_before()
        return PipelineCalls(programs, self.device, self.config, before, len(self.device.num_pages))
