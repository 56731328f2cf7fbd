"""Stages of a model in several processes, each of which has one: the leader the last stage, which chooses
tokens, and each follower one of the others.

In each step every process calls the program of its own stage, and the links to its neighbours
(`execution.own_stage`). So hidden states go from stage to stage, and a stage begins a step when the one
before has passed it, whatever the other stages do.

The tokens that the last stage has chosen go back to the first one with the leader's call of the next step
that reads them, in its buffer (`LastTokens`). A link for them would hold up the other stages: a process makes
its calls in their order, so between two of its own steps the first stage would wait for the end of a step
that is two stages ahead. The leader reads the tokens anyway. Where it does not have one yet, it waits for it
before it logs the call, and stages that have other rows go on.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from penstock.runtime.execution.buckets import ProgramKey
from penstock.runtime.execution.device_state import DeviceState
from penstock.runtime.execution.own_stage import Links, OwnStage
from penstock.runtime.execution.pipeline import row_fields
from penstock.runtime.execution.program_set import Programs, StagePrograms
from penstock.runtime.execution.runner import Ints, ModelRunner, ProgramCalls
from penstock.runtime.execution.runner_config import RunnerConfig
from penstock.runtime.execution.step_buffer import FEEDBACK, MAX_SAMPLES, NUM_TOKENS, SLOT
from penstock.runtime.execution.step_programs import Chosen
from penstock.runtime.following.facts import program_facts
from penstock.runtime.following.interface import Call, DispatchLog, Kind
from penstock.runtime.following.leading import LeadingCalls, LeadingRunner
from penstock.runtime.following.repeating import repeat_change
from penstock.runtime.following.sharing import FollowedUpdates
from penstock.runtime.ops.device_arrays import put_equal


class LastTokens:
    """The last token of each slot, on the host."""

    def __init__(self, num_slots: int, *, num_stages: int) -> None:
        self._tokens = np.zeros(num_slots, np.int32)
        self._newest = np.zeros(num_slots, np.int64)
        """For each slot the number of the choice that has made its last token; 0 before the first."""
        self._num_read = 0
        self._unread: deque[tuple[NDArray[np.intp], Ints, jax.Array]] = deque()
        """Of the latest choices: the rows that made a token, their slots, and the tokens of all rows."""
        self._num_stages = num_stages

    def take(self, fields: Ints, tokens: jax.Array) -> None:
        """Take in a choice: the fields of its rows, and their tokens int32[1, R] on the device."""
        (rows,) = np.nonzero(fields[:, MAX_SAMPLES])
        slots = fields[rows, SLOT]
        self._unread.append((rows, slots, tokens))
        self._newest[slots] = self._num_read + len(self._unread)
        # With another step dispatched, so many are in flight at most. What was chosen before is known.
        while len(self._unread) > self._num_stages + 1:
            self._read()

    def give(self, slots: Ints) -> Ints:
        """Return the last tokens of these slots, int32[len(slots)]. This blocks until they are known."""
        needed = self._newest[slots].max(initial=0)
        while self._num_read < needed:
            self._read()
        return self._tokens[slots]

    def _read(self) -> None:
        """Take in the oldest choice that is not read."""
        rows, slots, tokens = self._unread.popleft()
        self._num_read += 1
        self._tokens[slots] = np.asarray(tokens)[0, rows]


class LastStageCalls(LeadingCalls):
    """The leader's calls, of the programs of the last stage."""

    def __init__(
        self,
        programs: Programs,
        device: DeviceState,
        config: RunnerConfig,
        log: DispatchLog,
        links: Links,
        *,
        num_stages: int,
    ) -> None:
        super().__init__(programs, device, config, log)
        self._links = links
        self._tokens = LastTokens(config.max_num_seqs, num_stages=num_stages)

    def forward(
        self, key: ProgramKey, packed: Ints, *, has_proposed: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """See `ProgramCalls`. Nobody proposes tokens. The buffer gets the tokens that the first stage would
        otherwise have to know. If a step in flight is about to choose one, this waits for it.
        """
        device, links = self._device, self._links
        assert links.given is not None, "another stage comes before the last one"
        _, fields, _, tokens = self._config.layout(key, len(device.num_pages)).views(packed)
        slots = np.repeat(fields[:, SLOT], fields[:, NUM_TOKENS])  # of each token
        (places,) = np.nonzero(tokens[: len(slots)] == FEEDBACK)
        tokens[places] = self._tokens.give(slots[places])
        self._log.append(Call(Kind.FORWARD, key.name, (packed,)))
        given = links.given.receive(key.tokens)
        device.kv, device.rows, logits, hidden = self.programs.steps[key](
            device.leaves, device.kv, device.rows, packed, given
        )
        return logits, hidden

    def choose(
        self, logits: jax.Array, packed: Ints, mask: Ints | None, checks: Ints | None = None
    ) -> Chosen:
        """See `ProgramCalls`."""
        chosen = super().choose(logits, packed, mask, checks)
        num_groups = len(self._device.num_pages)
        self._tokens.take(row_fields(self._config, logits.shape[0], num_groups, packed), chosen.tokens)
        return chosen


class LastStageRunner(LeadingRunner):
    """The leader's runner, of the last stage."""

    device: OwnStage

    def make_calls(self, programs: Programs) -> ProgramCalls:
        """See `LeadingRunner`. This compiles the links."""
        device, links = self.device, self.device.links()
        self._log.begin(program_facts(self, programs))
        return LastStageCalls(programs, device, self.config, self._log, links, num_stages=device.num_stages)


class StageRepeater:
    """Does a follower's part of the calls of a leader's log, one after the other, on one thread: what
    concerns its stage. All that is made of the last stage's results is the leader's alone.
    """

    def __init__(
        self, runner: ModelRunner, programs: StagePrograms, links: Links, updates: FollowedUpdates
    ) -> None:
        self._runner, self._programs, self._links, self._updates = runner, programs, links, updates
        self._keys = {key.name: key for key in programs.steps}
        no_tokens = np.zeros(runner.config.max_num_seqs, np.int32)
        self._no_tokens = put_equal(no_tokens, runner.device.sharding)
        """What the first stage has in place of each slot's last token: the buffers have those."""

    def repeat(self, call: Call) -> None:
        """Make a call. ValueError for one that the leader's runner cannot have made."""
        device, programs, arrays = self._runner.device, self._programs, call.arrays
        match call.kind:
            case Kind.FORWARD:
                self._forward(call.program, *arrays)
            case Kind.TABLE_ROWS:
                device.rows = programs.table_rows(device.rows, *arrays)
            case Kind.COPY_PAGES:
                device.kv = programs.copy_pages(device.kv, *arrays)
            case Kind.CHOOSE | Kind.ADMIT | Kind.PROMPT_LOGPROBS | Kind.HIDDEN_SUMS:
                pass  # these concern the last stage
            case _:
                repeat_change(call, self._runner, self._updates)

    def _forward(self, program: str, packed: Ints) -> None:
        """Compute the stage's part of a step."""
        if program not in self._keys:
            raise ValueError(f"there is no program {program!r}")
        key, links, device = self._keys[program], self._links, self._runner.device
        given: Any = self._no_tokens if links.given is None else links.given.receive(key.tokens)
        device.kv, device.rows, passed = self._programs.steps[key](
            device.leaves, device.kv, device.rows, packed, given
        )
        assert links.passed is not None, "a follower has not the last stage"
        links.passed.send(passed)
