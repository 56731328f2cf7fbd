"""The steps on the device: dispatched, their tokens chosen, waited for, measured and shown to an observer.

Only the engine's thread uses this, without its lock: nothing here touches the scheduler.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from dataclasses import dataclass

from penstock.runtime.interface import Observer, StepRecord
from penstock.runtime.pacing import Pacer
from penstock.runtime.plan import Plan, StepResult
from penstock.runtime.roster import Load
from penstock.runtime.runner import ModelRunner, PendingStep

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A step on the device; times are monotonic ns."""

    plan: Plan
    pending: PendingStep
    started_ns: int
    scheduled_ns: int
    dispatched_ns: int
    is_constrained: bool
    """Whether rows under a constraint make a token."""


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was waited for."""

    step: Dispatched
    result: StepResult
    waited_ns: int


class Steps:
    """Those in flight, the oldest first."""

    def __init__(
        self,
        runner: ModelRunner,
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
        self._in_flight: deque[Dispatched] = deque()
        self._waited_ns = 0

    def __bool__(self) -> bool:
        return bool(self._in_flight)

    @property
    def is_full(self) -> bool:
        """Whether the oldest must be read before another one is dispatched."""
        return len(self._in_flight) >= self._most_in_flight

    def max_steps(self, ns_to_deadline: int) -> int:
        """How many decode steps the next dispatch may hold."""
        steps_ahead = sum(step.plan.num_steps for step in self._in_flight)
        return self._pacer.max_steps(ns_to_deadline, steps_ahead)

    @property
    def prefill_budget(self) -> int | None:
        """Most prompt tokens of the next dispatch beside decodes; None: no limit."""
        return self._pacer.prefill_budget

    @property
    def apart_steps(self) -> int:
        """How many decode steps come between two of rows under a constraint; 0: all step together."""
        return self._pacer.apart_steps

    def dispatch(self, plan: Plan, started_ns: int, scheduled_ns: int) -> None:
        pending = self._runner.execute_async(plan)
        self._in_flight.append(
            Dispatched(
                plan,
                pending,
                started_ns,
                scheduled_ns,
                time.monotonic_ns(),
                is_constrained=pending.unchosen is not None,
            )
        )

    def choose(self) -> tuple[Plan, frozenset[int], frozenset[int]] | None:
        """Have the tokens of the oldest step with rows under constraints chosen, if that is yet to do: these
        saw all tokens before, because steps ahead of it have none of theirs. Returns the step, its rows whose
        token is put off, and those of them whose own mask takes long, for `Scheduler.put_off` before the next
        plan is made; None if there are none.
        """
        for i, step in enumerate(self._in_flight):
            if step.is_constrained:
                if step.pending.unchosen is None:
                    return None
                chosen = self._runner.choose(step.pending)
                self._in_flight[i] = dataclasses.replace(step, pending=chosen)
                return (step.plan, chosen.skipped, chosen.late) if chosen.skipped else None
        return None

    def wait(self) -> Done:
        """Wait for the oldest, which is then no longer in flight."""
        step = self._in_flight.popleft()
        result = self._runner.wait(step.pending)
        waited_ns = time.monotonic_ns()
        # The device began it when it was dispatched, or when the one before was done.
        elapsed_ns = waited_ns - max(step.dispatched_ns, self._waited_ns)
        if step.plan.apart:
            self._pacer.constrained(elapsed_ns)
        elif step.plan.decode_only:
            # A program of fixed length runs all its steps even where every row ended early.
            made = step.plan.num_steps if self._fixed_windows else max(map(len, result.token_ids), default=1)
            self._pacer.decoded(made, elapsed_ns, constrained=step.is_constrained)
        else:
            self._pacer.prefilled(step.plan.num_prompt_tokens, elapsed_ns)
        self._waited_ns = waited_ns
        return Done(step, result, waited_ns)

    @property
    def is_observed(self) -> bool:
        """Whether `observe` does anything."""
        return self._observer is not None

    def observe(self, done: Done, load: Load) -> None:
        """Show a step that was committed to the observer; `load` is what came of it."""
        if self._observer is None:
            return
        step, plan = done.step, done.step.plan
        record = StepRecord(
            step_id=plan.step_id,
            num_rows=len(plan.rows),
            num_tokens=plan.num_tokens,
            decode_only=plan.decode_only,
            request_ids=tuple(row.request_id for row in plan.rows),
            num_waiting=load.num_waiting,
            pages_used=load.pages_used,
            started_ns=step.started_ns,
            scheduled_ns=step.scheduled_ns,
            dispatched_ns=step.dispatched_ns,
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
        """Nobody will read what is in flight."""
        self._in_flight.clear()
