"""The steps on the device: dispatched, their tokens chosen, waited for, measured and shown to an observer.

Only the engine's thread uses this, and without the engine's lock: nothing here touches the scheduler. No jax.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Generic

from penstock.runtime.loop.interface import Observer, Runner, StepRecord, StepT
from penstock.runtime.scheduling.pacing import Pacer
from penstock.runtime.scheduling.plan import Plan, StepResult
from penstock.runtime.scheduling.roster import Load

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan that is to be dispatched; times are monotonic ns."""

    plan: Plan
    started_ns: int
    """When the engine's thread began to make it."""
    scheduled_ns: int


@dataclass(frozen=True, slots=True)
class InFlight(Generic[StepT]):
    """A step that was dispatched and not waited for."""

    planned: Planned
    step: StepT
    dispatched_ns: int
    is_constrained: bool
    """Whether rows under a constraint make a token in it, chosen by now or not."""


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was waited for; times are monotonic ns."""

    planned: Planned
    result: StepResult
    dispatched_ns: int
    waited_ns: int


@dataclass(frozen=True, slots=True)
class PutOff:
    """Rows of a dispatched plan that make no token in it, for `Scheduler.put_off`."""

    plan: Plan
    rows: frozenset[int]
    late: frozenset[int]
    """The rows whose own mask takes long."""


class Steps(Generic[StepT]):
    """The steps in flight, the oldest first."""

    def __init__(
        self,
        runner: Runner[StepT],
        pacer: Pacer,
        observer: Observer | None,
        *,
        most_in_flight: int,
        fixed_windows: bool = False,
    ) -> None:
        """`fixed_windows`: a window's program runs all its steps, whichever rows end within it."""
        self._runner = runner
        self._pacer = pacer
        self._observer = observer
        self._most_in_flight = most_in_flight
        self._fixed_windows = fixed_windows
        self._in_flight: deque[InFlight[StepT]] = deque()
        self._waited_ns = 0

    def __bool__(self) -> bool:
        return bool(self._in_flight)

    @property
    def is_full(self) -> bool:
        """Whether the oldest must be read before another one is dispatched."""
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
        """How many decode steps come between two of rows under a constraint; 0: all step together."""
        return self._pacer.apart_steps

    def dispatch(self, planned: Planned) -> None:
        """Has the runner begin with a plan."""
        step = self._runner.execute_async(planned.plan)
        now_ns = time.monotonic_ns()
        self._in_flight.append(InFlight(planned, step, now_ns, is_constrained=step.awaits_choice))

    def choose(self) -> PutOff | None:
        """Has the tokens of the oldest step with rows under constraints chosen, if that is yet to do: these
        rows saw all tokens before, because the steps ahead of it have no row of theirs. Returns the rows
        whose token is put off, of which the scheduler must know before the next plan is made; None if there
        are none.
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
        result = self._runner.wait(step.step)
        waited_ns = time.monotonic_ns()
        # The device began it when it was dispatched, or when the one before was done.
        elapsed_ns = waited_ns - max(step.dispatched_ns, self._waited_ns)
        plan = step.planned.plan
        if plan.apart:
            self._pacer.constrained(elapsed_ns)
        elif plan.decode_only:
            # A program of fixed length runs all its steps even where every row ended early.
            made = plan.num_steps if self._fixed_windows else max(map(len, result.token_ids), default=1)
            self._pacer.decoded(made, elapsed_ns, constrained=step.is_constrained)
        else:
            self._pacer.prefilled(plan.num_prompt_tokens, elapsed_ns)
        self._waited_ns = waited_ns
        return Done(step.planned, result, step.dispatched_ns, waited_ns)

    @property
    def is_observed(self) -> bool:
        """Whether `observe` does anything."""
        return self._observer is not None

    def observe(self, done: Done, load: Load) -> None:
        """Shows a committed step to the observer; `load` is how busy the scheduler is after it."""
        if self._observer is None:
            return
        planned, plan = done.planned, done.planned.plan
        record = StepRecord(
            step_id=plan.step_id,
            num_rows=len(plan.rows),
            num_tokens=plan.num_tokens,
            decode_only=plan.decode_only,
            request_ids=tuple(row.request_id for row in plan.rows),
            num_waiting=load.num_waiting,
            pages_used=load.pages_used,
            started_ns=planned.started_ns,
            scheduled_ns=planned.scheduled_ns,
            dispatched_ns=done.dispatched_ns,
            waited_ns=done.waited_ns,
            committed_ns=time.monotonic_ns(),
            num_steps=plan.num_steps,
        )
        try:
            self._observer.on_step(record)
        except BaseException:  # who only watches must not end the requests
            log.exception("the observer failed; it will see no more steps")
            self._observer = None

    def forget(self) -> None:
        """Drops what is in flight: nobody will read it."""
        self._in_flight.clear()
