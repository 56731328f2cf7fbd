"""What the fake engine writes into its journal about its steps; see tests/service/fake.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from penstock.runtime.loop.interface import StepShape
from penstock.runtime.loop.journal import Journal, Recording
from penstock.runtime.loop.stepping import Done, Planned
from penstock.runtime.requests.request import StepOutput
from penstock.runtime.scheduling.load import Load
from penstock.runtime.scheduling.plan import Plan, PlanRow, StepResult
from tests.service.fake_outputs import Running


class FakeSteps:
    """The engine's own code writes the entries; this class makes the plans that a real scheduler would have
    made. In its first step an output computes all of its prompt that was not cached.
    """

    def __init__(self, journal: Journal, changed: threading.Condition) -> None:
        self.recording = Recording(journal, None, changed)
        self._planned: Planned | None = None
        """The step that is being computed."""
        self._ended: list[tuple[Running, StepOutput]] = []
        """The outputs that this step has ended."""

    def begin(self, step_id: int, running: Sequence[Running], tokens_per_step: int) -> None:
        """Note that a step of these outputs begins."""
        now_ns = time.monotonic_ns()
        rows = tuple(_row(slot, each, tokens_per_step) for slot, each in enumerate(running))
        num_steps = 1 if any(row.token_ids is not None for row in rows) else tokens_per_step
        self._planned = Planned(Plan(step_id, rows, num_steps=num_steps), now_ns, time.monotonic_ns())

    def ended(self, running: Running, output: StepOutput) -> None:
        """Note that an output has ended, in a step or between two."""
        if self._planned is None:
            self.recording.ended(running.request, output, len(running.made))
        else:
            self._ended.append((running, output))

    def commit(self, outputs: Sequence[StepOutput], load: Load) -> None:
        """Note that the step has made these outputs."""
        assert self._planned is not None
        plan, now_ns = self._planned.plan, time.monotonic_ns()
        done = Done(
            planned=self._planned,
            result=StepResult([()] * len(plan.rows), [()] * len(plan.rows)),
            shape=StepShape(tokens=plan.num_tokens, rows=len(plan.rows)),
            packed_ns=now_ns,
            dispatched_ns=now_ns,
            waiting_ns=now_ns,
            waited_ns=now_ns,
        )
        self.recording.committed(done, outputs, load)
        self._planned = None
        ended, self._ended = self._ended, []
        for running, output in ended:
            self.ended(running, output)


def _row(slot: int, running: Running, tokens_per_step: int) -> PlanRow:
    prompt, name = running.request.prompt_token_ids, running.request.request_id
    if running.made:
        start = len(prompt) + len(running.made) - 1
        return PlanRow(name, slot, start, 1, None, samples=True, max_samples=tokens_per_step)
    start = running.timing.cached_prompt_tokens
    return PlanRow(name, slot, start, len(prompt) - start, prompt[start:], samples=True)
