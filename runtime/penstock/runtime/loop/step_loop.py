"""What the engine's thread does, from its first step to its end. No jax.

Overlap: a step is dispatched before the tokens of the step before it are read, so the device works while the
host commits, delivers and schedules. Weights are swapped, and pauses begin, only while no step is in flight.
If rows have constraints, the model of a step is dispatched first, and its tokens are chosen when those of the
step before are committed, so that masks are made while the model runs.

Failure: whatever is raised on this thread ends the engine. Its last act is to tell every request, and whoever
waits for a weight update or a pause. It does not touch the scheduler again, because that may be what broke.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from penstock.runtime.errors import EngineFailure
from penstock.runtime.failing import engine_failure
from penstock.runtime.loop.changes import BetweenSteps, refuse
from penstock.runtime.loop.guard import Annotate, Guard, Life, StepWatch, unannotated
from penstock.runtime.loop.interface import Runner
from penstock.runtime.loop.journal import Recording
from penstock.runtime.loop.requests import Delivery, LiveRequests
from penstock.runtime.loop.stepping import Done, Planned, Steps
from penstock.runtime.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 3600.0
_MOMENT_S = 0.5


class StepLoop:
    """Runs one scheduler on one runner. The engine's thread calls `run`; other threads may use what
    says so.
    """

    def __init__(
        self,
        runner: Runner[Any],
        steps: Steps[Any],
        scheduler: Scheduler,
        *,
        guard: Guard,
        life: Life,
        delivery: Delivery,
        requests: LiveRequests,
        changes: BetweenSteps,
        recording: Recording,
        annotate: Annotate = unannotated,
    ) -> None:
        self._runner = runner
        self._steps = steps
        self._scheduler = scheduler
        self._guard = guard
        self._life = life
        self._delivery = delivery
        self._requests = requests
        self._changes = changes
        self._recording = recording
        self._annotate = annotate
        self.watch: StepWatch | None = None
        """Is told of the end of each step. Any thread may set it."""
        self.progress = 0
        """Rises by one with every step that is dispatched, and with every step that is committed. Any thread
        may read it."""

    @property
    def has_work(self) -> bool:
        """Whether the engine's thread has something to do. Any thread may ask, and waits for no lock."""
        has_requests = self._scheduler.has_work and not self._changes.stands_still
        return bool(self._steps) or has_requests or not self._delivery.is_done

    def run(self) -> None:
        """Run steps until the engine is shut down, or something breaks."""
        try:
            self._runner.start()
            self._run()
        except BaseException as error:  # noqa: BLE001  a panic in Rust is no Exception; see `failing`
            self._fail(error)

    def _run(self) -> None:
        steps = self._steps
        while not self._life.is_dead:
            planned = self._next_plan()
            if planned is not None:
                steps.dispatch(planned)
                self.progress += 1
            self._choose()  # for the new step, if all tokens that its constraints need are committed
            if steps and (planned is None or steps.is_full):
                self._finish_step()
                while steps.awaits_choice:
                    self._finish_step()
            else:
                self._delivery.deliver()
            self._recording.delivered()
            if planned is None and not steps and self._is_over():
                return

    def _next_plan(self) -> Planned | None:
        """Wait until there is something to do. Returns the next step to dispatch, or None if there is
        something else to do.
        """
        while True:
            self._guard.doorbell.answer()
            if not self._steps:
                self._changes.make_due(self._steps.waited_ns)
            with self._guard.lock:
                if self._guard.broken is not None:
                    raise RuntimeError(f"the scheduler broke on a caller's thread: {self._guard.broken}")
                self._requests.drop_cancelled()
                now_ns = time.monotonic_ns()
                self._delivery.post(self._scheduler.expire(now_ns))
                # While a change is due, no step is dispatched, until those in flight are done.
                is_due = self._changes.is_due
                planned = None if is_due or self._changes.stands_still else self._plan(now_ns)
                has_other_work = self._steps or self._delivery.is_pending or self._life.is_stopping
                if planned is not None or has_other_work:
                    return planned
                if is_due:
                    continue  # the change came after `make_due`, before this thread listened to the doorbell
                wait_ns = self._next_deadline_ns() - time.monotonic_ns()
                self._guard.doorbell.listen()
            if not self._requests.has_cancelled:  # a cancel rings, but did not if it came before `listen`
                self._guard.doorbell.sleep(min(max(wait_ns, 0) / 1e9, _LONGEST_WAIT_S))

    def _plan(self, now_ns: int) -> Planned | None:
        """Plan the next step, if there is one. While a weight update or a pause waits, no new request enters,
        and those that run go on.
        """
        with self._annotate("schedule"):
            plan = self._scheduler.schedule(
                now_ns,
                admit=self._changes.admits,
                max_steps=self._steps.max_steps(self._next_deadline_ns() - now_ns),
                prefill_budget=self._steps.prefill_budget,
                apart_steps=self._steps.apart_steps,
            )
        self._recording.preempted(self._scheduler.take_preempted())
        return None if plan is None else Planned(plan, now_ns, time.monotonic_ns())

    def _next_deadline_ns(self) -> int:
        """Say until when no time limit passes, neither a request's nor a change's, in monotonic ns."""
        return min(self._scheduler.next_deadline_ns, self._changes.next_deadline_ns)

    def _choose(self) -> None:
        """Have the tokens of a step with constraints chosen, if its turn has come. Rows whose masks take too
        long get none.
        """
        put_off = self._steps.choose()
        if put_off is not None:
            with self._guard.lock:
                self._scheduler.put_off(put_off.plan, put_off.rows, put_off.late)

    def _finish_step(self) -> None:
        """Wait for the oldest step in flight, take in its tokens and hand them to their sinks."""
        done = self._steps.wait()
        plan = done.planned.plan
        with self._annotate("emit", step=plan.step_id):
            self._commit(done)
            self.progress += 1
            self._choose()  # for a step that waited for that commit
            self._delivery.deliver()
        watch = self.watch
        if watch is not None:
            watch(done.planned.started_ns, plan.num_steps)

    def _commit(self, done: Done) -> None:
        """Take in the tokens of a step."""
        step = (done.planned.plan, done.result, done.waited_ns)
        # Without the lock: callers need not wait while constraints take in the tokens.
        verdicts = self._scheduler.accept(*step)
        with self._guard.lock:
            self._requests.drop_cancelled()
            outputs = self._scheduler.commit(*step, verdicts)
            if self._recording.is_on:
                self._recording.committed(done, outputs, self._scheduler.load())
            self._delivery.post(outputs)

    def _is_over(self) -> bool:
        with self._guard.lock:  # a shutdown may have posted last outputs since the plan was made
            return self._life.is_stopping and not self._delivery.is_pending

    def _fail(self, error: BaseException) -> None:
        """Fail as the last act of the thread: tell every request and whoever waits for a change, each
        independently of the others.
        """
        log.error("the engine failed", exc_info=error)
        self.give_up(engine_failure(error))
        self._steps.forget()

    def give_up(self, failure: EngineFailure) -> None:
        """End the engine, and tell every request. Any thread may call this, also while the engine's thread
        hangs, which is waited for no longer than a moment. Does nothing if the engine is dead.
        """
        with self._guard.changed:
            self._guard.changed.wait_for(lambda: not self._delivery.is_handing_over, _MOMENT_S)
            if self._life.is_dead:
                return
            watches = self._life.die(failure)
            outputs = self._delivery.fail(failure)
            self._requests.forget_cancelled()
            changes = self._changes.take_unfinished()
        for watch in watches:
            try:
                watch()
            except BaseException:  # the requests are yet to be told
                log.exception("a watch of the engine's life failed")
        self._delivery.hand_over(outputs)
        self._recording.delivered()
        refuse(changes, failure)
