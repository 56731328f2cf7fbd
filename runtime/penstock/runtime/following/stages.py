"""Stages of a model in several processes, each of which has one: the leader the last stage, which chooses
tokens, and each follower one of the others.

In each step every process calls the program of its own stage, and the links to its neighbours
(`execution.own_stage`). The leader passes the tokens of a choice to the first stage when the next step is
called, because only then does it know that there is one. Until a call has been dispatched on both sides, the
calls behind it may wait. So the first stage computes its part of a step before it takes the tokens of the
step before, which the leader has not chosen yet, unless a row of the step has one of them as its input. The
scheduler lets steps take turns in their rows, so that this is rare where there are rows for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from penstock.runtime.execution.backend import Backend
from penstock.runtime.execution.buckets import ProgramKey
from penstock.runtime.execution.device_state import DeviceState
from penstock.runtime.execution.draft_model import DraftModel
from penstock.runtime.execution.own_stage import Links, OwnStage, links_of
from penstock.runtime.execution.pipeline import row_fields
from penstock.runtime.execution.program_set import Programs, StagePrograms
from penstock.runtime.execution.runner import Ints, ModelRunner, ProgramCalls
from penstock.runtime.execution.runner_config import RunnerConfig
from penstock.runtime.execution.step_buffer import MAX_SAMPLES, SLOT
from penstock.runtime.execution.step_programs import Chosen
from penstock.runtime.following.facts import program_facts
from penstock.runtime.following.interface import Call, DispatchLog, Kind
from penstock.runtime.following.leading import LeadingCalls, LeadingRunner
from penstock.runtime.following.repeating import repeat_change
from penstock.runtime.following.sharing import FollowedUpdates
from penstock.runtime.models.stages import Stage
from penstock.runtime.ops.cache_spec import CacheSpec
from penstock.runtime.ops.device_arrays import put_equal


class LastStageCalls(LeadingCalls):
    """The leader's calls, of the programs of the last stage."""

    def __init__(
        self,
        programs: Programs,
        device: DeviceState,
        config: RunnerConfig,
        log: DispatchLog,
        links: Links,
    ) -> None:
        super().__init__(programs, device, config, log)
        self._links = links
        self._has_new_tokens = False
        """Whether tokens were chosen that the first stage has not been passed."""

    def forward(
        self, key: ProgramKey, packed: Ints, *, has_proposed: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """See `ProgramCalls`. Nobody proposes tokens."""
        self._log.append(Call(Kind.FORWARD, key.name, (packed,)))
        device, links = self._device, self._links
        assert links.tokens is not None, "the last stage has tokens"
        assert links.given is not None, "another stage comes before the last one"
        if self._has_new_tokens:
            links.tokens.send(device.rows.tokens)
            self._has_new_tokens = False
        given = links.given.receive(key.tokens)
        device.kv, device.rows, logits, hidden = self.programs.steps[key](
            device.leaves, device.kv, device.rows, packed, given
        )
        return logits, hidden

    def choose(
        self, logits: jax.Array, packed: Ints, mask: Ints | None, checks: Ints | None = None
    ) -> Chosen:
        """See `ProgramCalls`."""
        self._has_new_tokens = True
        return super().choose(logits, packed, mask, checks)


class LastStageRunner(LeadingRunner):
    """The leader's runner, of the last stage."""

    device: OwnStage

    def __init__(
        self,
        graphdef: nnx.GraphDef[Any],
        weights: Any,
        cache: CacheSpec,
        config: RunnerConfig,
        backend: Backend,
        stages: Sequence[Stage],
        log: DispatchLog,
    ) -> None:
        """See `ModelRunner`. `weights`: see `OwnStage`."""
        self._stages, self._backend = stages, backend
        super().__init__(graphdef, weights, cache, config, backend, None, log)

    def make_calls(self, programs: Programs) -> ProgramCalls:
        """See `LeadingRunner`. This compiles the links."""
        links = links_of(self.device.builder(self.device.num_pages), self._backend)
        self._log.begin(program_facts(self, programs))
        return LastStageCalls(programs, self.device, self.config, self._log, links)

    def _make_state(
        self,
        graphdef: nnx.GraphDef[Any],
        weights: Any,
        cache: CacheSpec,
        config: RunnerConfig,
        backend: Backend,
        draft: DraftModel | None,
        text: Any,
    ) -> DeviceState:
        return OwnStage(graphdef, weights, config, backend, self._stages)


class StageRunner(ModelRunner):
    """A follower's runner, of its stage. It makes no steps: see `StageRepeater`."""

    device: OwnStage

    def __init__(
        self,
        graphdef: nnx.GraphDef[Any],
        weights: Any,
        cache: CacheSpec,
        config: RunnerConfig,
        backend: Backend,
        stages: Sequence[Stage],
    ) -> None:
        """See `ModelRunner`. `weights`: see `OwnStage`."""
        self._stages, self._backend = stages, backend
        super().__init__(graphdef, weights, cache, config, backend)

    def compiled_stage(self) -> tuple[StagePrograms, Links]:
        """Compile the programs of the stage, and its links."""
        builder = self.device.builder(self.device.num_pages)
        return builder.compile_stage(), links_of(builder, self._backend)

    def _make_state(
        self,
        graphdef: nnx.GraphDef[Any],
        weights: Any,
        cache: CacheSpec,
        config: RunnerConfig,
        backend: Backend,
        draft: DraftModel | None,
        text: Any,
    ) -> DeviceState:
        return OwnStage(graphdef, weights, config, backend, self._stages)


class StageRepeater:
    """Does a follower's part of the calls of a leader's log, one after the other, on one thread: what
    concerns its stage. All that is made of the last stage's results is the leader's alone.
    """

    def __init__(
        self, runner: StageRunner, programs: StagePrograms, links: Links, updates: FollowedUpdates
    ) -> None:
        self._runner, self._programs, self._links, self._updates = runner, programs, links, updates
        self._keys = {key.name: key for key in programs.steps}
        self._rows = 0
        """Rows of the last step's program."""
        config = runner.config
        self._tokens: jax.Array | None = None
        """The last token of each slot, int32[S]; None where this is not the first stage."""
        if links.tokens is not None:
            self._tokens = put_equal(np.zeros(config.max_num_seqs, np.int32), runner.device.sharding)
        self._new: frozenset[int] | None = None
        """The slots with tokens of a choice that the leader has not passed yet; None: there is none."""

    def repeat(self, call: Call) -> None:
        """Make a call. ValueError for one that the leader's runner cannot have made."""
        device, programs, arrays = self._runner.device, self._programs, call.arrays
        match call.kind:
            case Kind.FORWARD:
                self._forward(call.program, *arrays)
            case Kind.CHOOSE:
                if not self._rows:
                    raise ValueError("no forward came before")
                fields = self._fields(arrays[0])
                chosen = fields[fields[:, MAX_SAMPLES] > 0, SLOT].tolist()
                self._new = (self._new or frozenset()).union(chosen)
            case Kind.TABLE_ROWS:
                device.rows = programs.table_rows(device.rows, *arrays)
            case Kind.COPY_PAGES:
                device.kv = programs.copy_pages(device.kv, *arrays)
            case Kind.ADMIT | Kind.PROMPT_LOGPROBS | Kind.HIDDEN_SUMS:
                pass  # these concern the last stage
            case _:
                repeat_change(call, self._runner, self._updates)

    def _forward(self, program: str, packed: Ints) -> None:
        """Compute the stage's part of a step."""
        if program not in self._keys:
            raise ValueError(f"there is no program {program!r}")
        key, links, device = self._keys[program], self._links, self._runner.device
        self._rows = key.rows
        if self._new is not None and not self._new.isdisjoint(self._fields(packed)[:, SLOT].tolist()):
            self._take_tokens()
        given: Any = self._tokens if links.given is None else links.given.receive(key.tokens)
        device.kv, device.rows, passed = self._programs.steps[key](
            device.leaves, device.kv, device.rows, packed, given
        )
        self._take_tokens()
        assert links.passed is not None, "a follower has not the last stage"
        links.passed.send(passed)

    def _take_tokens(self) -> None:
        """Take the tokens that the leader passes now, if it has chosen some."""
        if self._new is not None and self._links.tokens is not None:
            self._tokens = self._links.tokens.receive(self._runner.config.max_num_seqs)
        self._new = None

    def _fields(self, packed: Ints) -> Ints:
        """Return the fields of the rows of the last step."""
        num_groups = len(self._runner.device.num_pages)
        return row_fields(self._runner.config, self._rows, num_groups, packed)
