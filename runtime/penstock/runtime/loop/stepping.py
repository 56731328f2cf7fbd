"""The steps on the device: this module dispatches them, has their tokens chosen, waits for them and measures
them. No jax.

Only the engine's thread uses this, and without the engine's lock: nothing here touches the scheduler.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from dataclasses import dataclass
from typing import Generic

from penstock.runtime.loop.guard import Annotate, unannotated
from penstock.runtime.loop.interface import Runner, StepShape, StepT
from penstock.runtime.scheduling.pacing import Pacer
from penstock.runtime.scheduling.plan import Plan, StepResult


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan that is to be dispatched. Times are in monotonic ns."""

    plan: Plan
    started_ns: int
    """When the engine's thread began to make it."""
    scheduled_ns: int
    """When the plan was complete."""


@dataclass(frozen=True, slots=True)
class InFlight(Generic[StepT]):
    """A step that was dispatched and that the host has not waited for yet."""

    planned: Planned
    step: StepT
    dispatched_ns: int
    is_constrained: bool
    """Whether rows under a constraint make a token in this step, whether it is chosen already or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A step that the host has waited for. Times are in monotonic ns."""

    planned: Planned
    result: StepResult
    shape: StepShape | None
    """The program that ran; None where the runner does not say."""
    packed_ns: int
    """When the step's buffer was packed."""
    dispatched_ns: int
    waiting_ns: int
    """When the host began to wait."""
    waited_ns: int
    """When the tokens were on the host."""


@dataclass(frozen=True, slots=True)
class PutOff:
    """Rows of a dispatched plan that make no token in it, for `Scheduler.put_off`."""

    plan: Plan
    rows: frozenset[int]
    late: frozenset[int]
    """The rows whose own mask takes long."""


class Steps(Generic[StepT]):
    """The steps in flight, oldest first."""

    def __init__(
        self,
        runner: Runner[StepT],
        pacer: Pacer,
        *,
        most_in_flight: int,
        fixed_windows: bool = False,
        annotate: Annotate = unannotated,
    ) -> None:
        """`fixed_windows`: whether a window's program always runs all its steps, even when all rows have
        ended.
        """
        self._runner = runner
        self._pacer = pacer
        self._most_in_flight = most_in_flight
        self._fixed_windows = fixed_windows
        self._annotate = annotate
        self._in_flight: deque[InFlight[StepT]] = deque()
        self.waited_ns = 0
        """When the last step that was waited for had ended, in monotonic ns."""

    def __bool__(self) -> bool:
        return bool(self._in_flight)

    @property
    def is_full(self) -> bool:
        """Whether the oldest step must be waited for before another one is dispatched."""
        return len(self._in_flight) >= self._most_in_flight

    def max_steps(self, ns_to_deadline: int) -> int:
        """How many decode steps the next dispatch may hold."""
        steps_ahead = sum(step.planned.plan.num_steps for step in self._in_flight)
        return self._pacer.max_steps(ns_to_deadline, steps_ahead)

    @property
    def prefill_budget(self) -> int | None:
        """Most prompt tokens of the next dispatch beside decodes; None: no limit."""
        return self._pacer.prefill_budget

    @property
    def apart_steps(self) -> int:
        """See `Pacer.apart_steps`."""
        return self._pacer.apart_steps

    def dispatch(self, planned: Planned) -> None:
        """Makes the runner begin with a plan."""
        step = self._runner.execute_async(planned.plan)
        now_ns = time.monotonic_ns()
        self._in_flight.append(InFlight(planned, step, now_ns, is_constrained=step.awaits_choice))

    def choose(self) -> PutOff | None:
        """Has the tokens chosen of the oldest step with rows under constraints, if they are not chosen yet.
        All earlier tokens of these rows are committed by then, because the steps ahead of it have no row of
        theirs.

        Returns the rows whose token is put off, which the scheduler must know before it makes the next plan;
        None if there are none.
        """
        for i, step in enumerate(self._in_flight):
            if step.is_constrained:
                if not step.step.awaits_choice:
                    return None
                chosen = self._runner.choose(step.step)
                self._in_flight[i] = dataclasses.replace(step, step=chosen)
                return PutOff(step.planned.plan, chosen.skipped, chosen.late) if chosen.skipped else None
        return None

    def wait(self) -> Done:
        """Waits for the oldest step, which is then no longer in flight."""
        step = self._in_flight.popleft()
        waiting_ns = time.monotonic_ns()
        with self._annotate("wait", step=step.planned.plan.step_id):
            result = self._runner.wait(step.step)
        waited_ns = time.monotonic_ns()
        # The device began this step when it was dispatched, or when the step before it was done.
        elapsed_ns = waited_ns - max(step.dispatched_ns, self.waited_ns)
        plan = step.planned.plan
        if plan.encodes:
            pass  # how long the pictures took is not known, so the time says nothing about the tokens
        elif plan.apart:
            self._pacer.constrained(elapsed_ns)
        elif plan.decode_only:
            # A program of fixed length runs all its steps, even when every row has ended.
            made = plan.num_steps if self._fixed_windows else max(map(len, result.token_ids), default=1)
            self._pacer.decoded(made, elapsed_ns, constrained=step.is_constrained)
        else:
            self._pacer.prefilled(plan.num_prompt_tokens, elapsed_ns)
        self.waited_ns = waited_ns
        return Done(
            planned=step.planned,
            result=result,
            shape=step.step.shape,
            packed_ns=step.step.packed_ns,
            dispatched_ns=step.dispatched_ns,
            waiting_ns=waiting_ns,
            waited_ns=waited_ns,
        )

    def forget(self) -> None:
        """Drops the steps in flight, which nobody will wait for."""
        self._in_flight.clear()
