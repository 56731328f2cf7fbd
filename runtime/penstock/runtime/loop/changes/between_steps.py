"""Makes weight updates, pauses and resumes between two steps, and decides whose turn it is. No jax.

A change is made as soon as its policy allows it and no step is in flight. While any change waits, no new
request enters. Two rules say who may pass whom:

- Updates keep their order, because a later one may replace parts of an earlier one. A pause is urgent: it
  passes an update that waits for running requests, and a pause that does.
- While the weights are replaced in place (a hold), every other change waits for the end of that.

Requests that a pause keeps cannot end before it does, so a change that would wait for them is refused.
Updates are made during a pause as at any other time.
"""

from __future__ import annotations

import time
from typing import Any, assert_never

from penstock.runtime.errors import DrainTimeout, PausedWithRequests, WeightsIncomplete
from penstock.runtime.failing import as_exception
from penstock.runtime.loop.changes.change import (
    Change,
    ForRunning,
    Hold,
    Outcome,
    Pause,
    Resume,
    Update,
    settle,
)
from penstock.runtime.loop.changes.serving_weights import ServingWeights
from penstock.runtime.loop.guard import Guard
from penstock.runtime.loop.interface import (
    Applied,
    InFlightPolicy,
    InFlightReport,
    Paused,
    Resumed,
    Runner,
    WeightsBroken,
)
from penstock.runtime.loop.life import Life
from penstock.runtime.loop.live_requests import LiveRequests
from penstock.runtime.loop.recording import Recording
from penstock.runtime.scheduling.scheduler import Scheduler
from penstock.runtime.scheduling.stopping import NEVER_NS


class BetweenSteps:
    """The changes that wait, in order of arrival, and what the last ones have left: which weights serve, and
    whether steps are made. Every method but `make_due` is called with the engine's lock held.
    """

    def __init__(
        self,
        runner: Runner[Any],
        scheduler: Scheduler,
        *,
        guard: Guard,
        life: Life,
        requests: LiveRequests,
        recording: Recording,
    ) -> None:
        self.weights = ServingWeights()
        """The weights that serve. May be read without the lock."""
        self.is_paused = False
        """Whether a pause is in force. May be read without the lock."""
        self._runner = runner
        self._scheduler = scheduler
        self._guard = guard
        self._life = life
        self._requests = requests
        self._recording = recording
        self._queue: list[Change] = []
        self._making: Change | None = None
        self._hold: tuple[InFlightReport, int] | None = None
        """While a hold is in force: its report, and since when no token could be made, in monotonic ns."""
        self._made_ns = 0
        """When the last change was made."""
        scheduler.use_weights(self.weights.version.generation)

    # -- the queue --

    def add(self, change: Change) -> None:
        """Puts a change behind all others."""
        self._queue.append(change)

    def running(self, policy: InFlightPolicy, timeout_s: float | None) -> ForRunning:
        """What a change that is asked for now does with the requests that run now."""
        self._requests.drop_cancelled()
        return ForRunning(
            policy=policy,
            timeout_s=timeout_s,
            asked_ns=time.monotonic_ns(),
            num_requests=self._scheduler.num_started_requests,
        )

    def take_all(self) -> list[Change]:
        """Removes and returns all changes that wait."""
        changes, self._queue = self._queue, []
        return changes

    def take_pauses(self) -> list[Change]:
        """Removes and returns the pauses that wait."""
        pauses: list[Change] = [change for change in self._queue if isinstance(change, Pause)]
        self._queue = [change for change in self._queue if not isinstance(change, Pause)]
        return pauses

    def take_unfinished(self) -> list[Change]:
        """Removes and returns all changes that wait, and the one that was being made when the engine's thread
        failed.
        """
        return [*self.take_all(), *([] if self._making is None else [self._making])]

    # -- what the loop asks --

    @property
    def stands_still(self) -> bool:
        """Whether no step is made, whoever waits. May be asked without the lock."""
        return self.is_paused or self._hold is not None

    @property
    def admits(self) -> bool:
        """Whether new requests may enter: no change waits for those that run."""
        return not self._queue

    @property
    def is_due(self) -> bool:
        """Whether a change is to be made as soon as no step is in flight."""
        return bool(self._queue) and self._find_due() is not None

    @property
    def next_deadline_ns(self) -> int:
        """When the next change will have waited too long, in monotonic ns."""
        deadlines = (change.running.deadline_ns for change in self._queue if not isinstance(change, Resume))
        return min((deadline for deadline in deadlines if deadline is not None), default=NEVER_NS)

    # -- whose turn it is --

    def _find_due(self) -> tuple[Change, Exception | None] | None:
        """The first change whose turn has come, with the error if it cannot be made."""
        now_ns = time.monotonic_ns()
        after_update = False
        for change in self._queue:
            is_update = isinstance(change, Update | Hold)
            if change.done.cancelled():
                return change, None
            is_blocked = self._hold is not None or (is_update and after_update)
            if isinstance(change, Resume):
                if not is_blocked:
                    return change, None
                continue
            running = change.running
            has_to_wait = running.waits and self._scheduler.has_started
            if not is_blocked and not has_to_wait:
                return change, None
            if not is_blocked and self.is_paused:
                return change, PausedWithRequests(self._scheduler.num_started_requests)
            if running.deadline_ns is not None and now_ns >= running.deadline_ns:
                return change, DrainTimeout(running.timeout_s or 0.0)
            after_update |= is_update
        return None

    def make_due(self, idle_since_ns: int) -> None:
        """Makes the changes whose turn has come. Called on the engine's thread, without the lock and with no
        step in flight. `idle_since_ns`: when the last step had ended, in monotonic ns.
        """
        while True:
            with self._guard.lock:
                if not self._queue:
                    return
                self._requests.drop_cancelled()
                due = self._find_due()
                if due is None:
                    return
                change, error = due
                self._queue.remove(change)
            if not change.done.set_running_or_notify_cancel():
                continue  # the caller took it back
            self._making = change
            settle(change, self._make(change, idle_since_ns) if error is None else error)
            self._making = None

    # -- how they are made --

    def _make(self, change: Change, idle_since_ns: int) -> Outcome | Exception:
        """Makes a change. Returns its outcome, or the error that has kept it from being made."""
        try:
            match change:
                case Update():
                    return self._update(change, self._start_ns(change.running, idle_since_ns))
                case Hold():
                    return self._begin_hold(change, self._start_ns(change.running, idle_since_ns))
                case Pause():
                    return self._pause(change)
                case Resume():
                    return self._resume()
                case _:
                    assert_never(change)
        finally:
            self._made_ns = time.monotonic_ns()

    def _start_ns(self, running: ForRunning, idle_since_ns: int) -> int:
        """From when on no token could be made because of a change: the last step has ended, the change was
        asked for, and the one before was made.
        """
        return max(idle_since_ns, running.asked_ns, self._made_ns)

    def _update(self, update: Update, start_ns: int) -> Applied | Exception:
        problem = self._life.weights_problem
        if problem is not None and not update.is_whole:
            return WeightsIncomplete(problem)
        try:
            update.install()  # without the lock, so that callers need not wait while it copies
        except BaseException as error:  # noqa: BLE001  whatever it was, the old weights serve on
            return as_exception(error)
        with self._guard.lock:
            message = f"weights were updated to {update.label!r}"
            report = self._treat_running(update.running, message)
            applied = self._go_live(update.label, report, start_ns)
        if problem is not None:
            self._life.tell_ready()
        return applied

    def _begin_hold(self, hold: Hold, start_ns: int) -> InFlightReport | Exception:
        problem = self._life.weights_problem
        if problem is not None and not hold.is_whole:
            return WeightsIncomplete(problem)
        with self._guard.lock:
            report = self._treat_running(hold.running, "weights are being updated")
            self._hold = report, start_ns
        return report

    def release(self, label: str) -> Applied | None:
        """Ends a hold: the weights that the runner has now go live. None if no hold is in force."""
        hold, self._hold = self._hold, None
        if hold is None:
            return None
        report, start_ns = hold
        return self._go_live(label, report, start_ns)

    def drop_hold(self) -> None:
        """Ends a hold, if one is in force, and keeps the version of the weights."""
        self._hold = None

    def break_weights(self, reason: str) -> None:
        """Ends a hold, if one is in force, with weights that cannot serve."""
        self._life.weights_problem = reason
        self._hold = None
        self._recording.changed(WeightsBroken(reason))

    def _pause(self, pause: Pause) -> Paused | Exception:
        with self._guard.lock:
            report = self._treat_running(pause.running, "the server was paused")
            if pause.free_kv_cache:
                self._scheduler.flush_prefix_cache()
        freed = 0
        try:
            if pause.offload_weights:
                freed += self._runner.offload_weights()
            if pause.free_kv_cache:
                freed += self._runner.free_kv_cache()
        except Exception as error:  # noqa: BLE001  the caller hears of it
            self.is_paused |= freed > 0  # no step can be made without what was freed
            return error
        self.is_paused = True
        paused = Paused(report, freed)
        with self._guard.lock:
            self._recording.changed(paused)
        return paused

    def _resume(self) -> Exception | None:
        if not self.is_paused:
            return None
        try:
            self._runner.restore_weights()
            self._runner.restore_kv_cache()
        except Exception as error:  # noqa: BLE001  still paused, so that it can be tried again
            return error
        self.is_paused = False
        with self._guard.lock:
            self._recording.changed(Resumed())
        return None

    def _treat_running(self, running: ForRunning, message: str) -> InFlightReport:
        """Does with the requests that run what the caller chose; `message` goes to those that end."""
        scheduler = self._scheduler
        self._requests.drop_cancelled()
        num_started, num_kept = scheduler.num_started_requests, scheduler.num_running_requests
        match running.policy:
            case InFlightPolicy.WAIT:
                return InFlightReport(waited=running.num_requests)
            case InFlightPolicy.ABORT:
                self._requests.end_all(scheduler.started_ids(), message)
                return InFlightReport(aborted=num_started)
            case InFlightPolicy.KEEP:
                # Those that were preempted before have no KV to go on with.
                return InFlightReport(kept=num_kept, recomputed=num_started - num_kept)
            case InFlightPolicy.RECOMPUTE:
                scheduler.preempt_all()
                self._recording.preempted(scheduler.take_preempted())
                return InFlightReport(recomputed=num_started)
            case _:
                assert_never(running.policy)

    def _go_live(self, label: str, report: InFlightReport, start_ns: int) -> Applied:
        previous = self.weights.version
        self._life.weights_problem = None
        self.weights.go_live(label)
        self._scheduler.use_weights(self.weights.version.generation)
        self._recording.preempted(self._scheduler.take_preempted())
        applied = Applied(
            version=self.weights.version,
            previous=previous,
            in_flight=report,
            paused_ns=time.monotonic_ns() - start_ns,
            applied_at=self.weights.since,
        )
        self._recording.changed(applied)
        return applied
