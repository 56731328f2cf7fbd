"""Weight updates, pauses and resumes, which are made between two steps. No jax.

Callers ask `Changes`, on any thread, and get a future. `BetweenSteps` makes what they have asked for, on the
engine's thread, and decides whose turn it is. `ServingWeights` knows which weights serve. A change is made as
soon as its policy allows it and no step is in flight. While any change waits, no new request enters. Two
rules say who may pass whom:

- Updates keep their order, because a later one may replace parts of an earlier one. A pause is urgent: it
  passes an update that waits for running requests, and a pause that does.
- While the weights are replaced in place (a hold), every other change waits for the end of that.

Requests that a pause keeps cannot end before it does, so a change that would wait for them is refused.
Updates are made during a pause as at any other time.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, assert_never

from penstock.runtime.errors import (
    DrainTimeout,
    InvalidRequest,
    PausedWithRequests,
    PauseTakenBack,
    Violation,
    WeightsIncomplete,
)
from penstock.runtime.failing import as_exception
from penstock.runtime.loop.guard import Guard, Life
from penstock.runtime.loop.interface import (
    Applied,
    InFlightPolicy,
    InFlightReport,
    Paused,
    Resumed,
    Runner,
    WeightsBroken,
    WeightsVersion,
)
from penstock.runtime.loop.journal import Recording
from penstock.runtime.loop.requests import LiveRequests
from penstock.runtime.scheduling.scheduler import Scheduler
from penstock.runtime.scheduling.sequence import NEVER_NS

log = logging.getLogger(__name__)

MOST_REMEMBERED = 4096
"""How many versions are remembered, the newest ones."""


class ServingWeights:
    """Changes need the engine's lock; any thread may read this at any time."""

    def __init__(self) -> None:
        self.version = WeightsVersion("initial", 1)
        """The weights that serve now."""
        self.since = dt.datetime.now(dt.UTC)
        """When they went live."""
        self._versions = {self.version.generation: self.version}

    def version_of(self, generation: int) -> WeightsVersion:
        """Return the version of this generation; its label is empty where it is not remembered."""
        return self._versions.get(generation) or WeightsVersion("", generation)

    def go_live(self, label: str) -> None:
        """Serve new weights from now on, as the next generation."""
        version = WeightsVersion(label, self.version.generation + 1)
        self._versions[version.generation] = version
        self._versions.pop(version.generation - MOST_REMEMBERED, None)
        self.since = dt.datetime.now(dt.UTC)
        self.version = version


@dataclass(frozen=True, slots=True, kw_only=True)
class ForRunning:
    """What a change does with the requests that run. Times are in monotonic ns."""

    policy: InFlightPolicy
    timeout_s: float | None
    """With the policy WAIT, how long the change may wait; None: without end."""
    asked_ns: int
    num_requests: int
    """How many requests ran when the change was asked for."""

    @property
    def waits(self) -> bool:
        """Whether the change must wait for the running requests to end."""
        return self.policy is InFlightPolicy.WAIT

    @property
    def deadline_ns(self) -> int | None:
        """When the change has waited too long; None: never."""
        if not self.waits or self.timeout_s is None:
            return None
        return self.asked_ns + int(self.timeout_s * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """New weights."""

    install: Callable[[], None]
    """Swaps the runner's weights, or raises and leaves them as they are."""
    label: str
    is_whole: bool
    """Whether it replaces all weights."""
    running: ForRunning
    done: Future[Applied] = field(default_factory=Future)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hold:
    """No step from here on until the caller ends it, because the runner's weights are replaced in place."""

    is_whole: bool
    """Whether all weights are replaced."""
    running: ForRunning
    done: Future[InFlightReport] = field(default_factory=Future)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pause:
    """No step from here on until a resume."""

    running: ForRunning
    free_kv_cache: bool
    offload_weights: bool
    done: Future[Paused] = field(default_factory=Future)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resume:
    """The end of a pause, if there is one."""

    done: Future[None] = field(default_factory=Future)


Change = Update | Hold | Pause | Resume
Outcome = Applied | InFlightReport | Paused | None
"""What the future of a change is set to; each kind has one of its own."""


def refuse(changes: Iterable[Change], error: Exception) -> None:
    """Fail the futures of changes that waited, or of one that was being made."""
    for change in changes:
        if change.done.running() or change.done.set_running_or_notify_cancel():
            settle(change, error)


def settle(change: Change, outcome: Outcome | Exception) -> None:
    """Set the outcome of a change whose turn has come.

    To be called without the engine's lock: a future's callbacks run at once and may call the engine. A
    callback that raises is logged, and does not keep the others from being called.
    """
    future: Future[Outcome] = change.done  # type: ignore[assignment]  # each kind has an outcome of its own
    try:
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except BaseException:  # see above
        log.exception("a callback of a weight update or a pause failed")


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
        """Put a change behind all others."""
        self._queue.append(change)

    def running(self, policy: InFlightPolicy, timeout_s: float | None) -> ForRunning:
        """Say what a change that is asked for now does with the requests that run now."""
        self._requests.drop_cancelled()
        return ForRunning(
            policy=policy,
            timeout_s=timeout_s,
            asked_ns=time.monotonic_ns(),
            num_requests=self._scheduler.num_started_requests,
        )

    def take_all(self) -> list[Change]:
        """Remove and return all changes that wait."""
        changes, self._queue = self._queue, []
        return changes

    def take_pauses(self) -> list[Change]:
        """Remove and return the pauses that wait."""
        pauses: list[Change] = [change for change in self._queue if isinstance(change, Pause)]
        self._queue = [change for change in self._queue if not isinstance(change, Pause)]
        return pauses

    def take_unfinished(self) -> list[Change]:
        """Remove and return all changes that wait, and the one that was being made when the engine's thread
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
        """Return the first change whose turn has come, with the error if it cannot be made."""
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
        """Make the changes whose turn has come. Called on the engine's thread, without the lock and with no
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
        """Make a change. Returns its outcome, or the error that has kept it from being made."""
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
        """Say from when on no token could be made because of a change: the last step has ended, the change
        was asked for, and the one before was made.
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
        """End a hold: the weights that the runner has now go live. None if no hold is in force."""
        hold, self._hold = self._hold, None
        if hold is None:
            return None
        report, start_ns = hold
        return self._go_live(label, report, start_ns)

    def drop_hold(self) -> None:
        """End a hold, if one is in force, and keep the version of the weights."""
        self._hold = None

    def break_weights(self, reason: str) -> None:
        """End a hold, if one is in force, with weights that cannot serve."""
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
        """Do with the requests that run what the caller chose; `message` goes to those that end."""
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


class Changes:
    """Each change has a future, whose result comes when the engine's thread has made the change, and whose
    error says why it was not made. The future's callbacks run on the engine's thread, or on the thread of
    whoever ends the wait, and must not block.
    """

    def __init__(self, between: BetweenSteps, *, guard: Guard, life: Life, requests: LiveRequests) -> None:
        self._between = between
        self._guard = guard
        self._life = life
        self._requests = requests

    # -- state --

    @property
    def weights(self) -> WeightsVersion:
        """The weights that serve now."""
        return self._between.weights.version

    @property
    def weights_since(self) -> dt.datetime:
        """When these weights went live, in UTC."""
        return self._between.weights.since

    @property
    def weights_problem(self) -> str | None:
        """Why the weights cannot serve, after `break_weights`; None: they can."""
        return self._life.weights_problem

    def version_of(self, generation: int) -> WeightsVersion:
        """Return the version that has or had this generation. The newest few thousand are remembered; the
        label of any other is empty.
        """
        return self._between.weights.version_of(generation)

    @property
    def is_paused(self) -> bool:
        """Whether a pause is in force. Waits for no lock."""
        return self._between.is_paused

    # -- weights --

    def update(
        self,
        install: Callable[[], None],
        label: str,
        policy: InFlightPolicy,
        *,
        drain_timeout_s: float | None = None,
        whole: bool = True,
    ) -> Future[Applied]:
        """Run `install`, which swaps the runner's weights, or raises and leaves them as they are, between
        two steps. `whole`: whether it replaces all weights.

        The future holds what `install` raised, DrainTimeout if the running requests did not end within
        `drain_timeout_s` under the policy WAIT, PausedWithRequests if they cannot because of a pause,
        WeightsIncomplete if the weights are broken and this update is not whole, or Draining or EngineFailure
        if the engine ended first; then nothing has changed. Cancelling the future before the update's turn
        takes the update back. InvalidRequest for a time that is none.
        """
        with self._asking(policy, drain_timeout_s) as running:
            update = Update(install=install, label=label, is_whole=whole, running=running)
            self._between.add(update)
        return update.done

    def hold_for_update(
        self, policy: InFlightPolicy, *, drain_timeout_s: float | None = None, whole: bool = True
    ) -> Future[InFlightReport]:
        """Stop between two steps, so that the caller can replace the runner's weights in place. Once the
        future has its result, no step is made before `release_hold`, `drop_hold` or `break_weights`, of which
        the caller must call one. `whole`: whether all weights are replaced. The future's errors are those of
        `update`.
        """
        with self._asking(policy, drain_timeout_s) as running:
            hold = Hold(is_whole=whole, running=running)
            self._between.add(hold)
        return hold.done

    def release_hold(self, label: str) -> Applied:
        """End a hold: the weights that the runner has now are whole, and go live. Raises EngineDead or
        Draining if the engine has ended meanwhile, and RuntimeError if no hold is in force.
        """
        with self._guard.lock, self._guard.changing():
            self._life.check_running()
            was_broken = self._life.weights_problem is not None
            applied = self._between.release(label)
        if applied is None:
            raise RuntimeError("no hold is in force")
        if was_broken:
            self._life.tell_ready()
        return applied

    def drop_hold(self) -> None:
        """End a hold, if there is one, before any weight was replaced."""
        with self._guard.lock, self._guard.changing():
            self._between.drop_hold()

    def break_weights(self, reason: str) -> None:
        """Say that the runner's weights are partly old and partly new: all requests end with
        WeightsIncomplete, and so does every new one, until an update that is whole goes live. This also ends
        a hold. `reason` says in a few words what failed.
        """
        with self._guard.lock, self._guard.changing():
            if self._life.is_dead or self._life.is_stopping:
                return
            self._between.break_weights(reason)
            self._requests.drop_cancelled()
            self._requests.fail_all(WeightsIncomplete(reason))
        self._life.tell_ready()

    # -- pauses --

    def pause(
        self,
        policy: InFlightPolicy,
        *,
        drain_timeout_s: float | None = None,
        free_kv_cache: bool = False,
        offload_weights: bool = False,
    ) -> Future[Paused]:
        """Stop between two steps until `resume`, and free memory of the device if asked to. New requests
        queue up, and time limits go on. A paused engine can be paused again: that does to the requests which
        the first pause has kept what `policy` says, and frees more.

        The future holds DrainTimeout or PausedWithRequests, as that of `update`; PauseTakenBack if a resume
        came before the pause's turn; or what kept the memory from being freed. Then the engine is as paused
        as before, but requests may have ended or lost their KV. InvalidRequest for a time that is none, and
        for `free_kv_cache` with the policy KEEP.
        """
        if free_kv_cache and policy is InFlightPolicy.KEEP:
            described = "the requests that are kept need the cache"
            raise InvalidRequest([Violation("free_kv_cache", described)])
        with self._asking(policy, drain_timeout_s) as running:
            pause = Pause(running=running, free_kv_cache=free_kv_cache, offload_weights=offload_weights)
            self._between.add(pause)
        return pause.done

    def resume(self) -> Future[None]:
        """Take back the pauses that wait for their turn, and end the one in force, if there is one, after
        what it has freed was restored. If that fails, the future has the error, and the engine stays paused.
        """
        resume = Resume()
        with self._guard.lock:
            self._life.check_running()
            taken_back = self._between.take_pauses()
            self._between.add(resume)
            self._guard.doorbell.ring()
        refuse(taken_back, PauseTakenBack())
        return resume.done

    @contextlib.contextmanager
    def _asking(self, policy: InFlightPolicy, drain_timeout_s: float | None) -> Iterator[ForRunning]:
        """Hold the lock while a change is asked for."""
        if drain_timeout_s is not None and not (math.isfinite(drain_timeout_s) and drain_timeout_s >= 0):
            described = f"must be a time in seconds, not {drain_timeout_s}"
            raise InvalidRequest([Violation("drain_timeout", described)])
        with self._guard.lock, self._guard.changing():
            self._life.check_running()
            yield self._between.running(policy, drain_timeout_s)

    def take_all(self) -> Sequence[Change]:
        """Remove and return all changes that wait; to be called with the engine's lock held."""
        return self._between.take_all()
