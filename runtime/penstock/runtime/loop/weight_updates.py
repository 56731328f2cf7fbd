"""Weight updates: those that wait for their turn, and what happens to requests when one is applied. No jax:
`Update.install` swaps the weights.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from penstock.runtime.failing import as_exception
from penstock.runtime.loop.guard import Guard
from penstock.runtime.loop.interface import InFlightPolicy, WeightsVersion
from penstock.runtime.loop.live_requests import LiveRequests
from penstock.runtime.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Update:
    """One request for new weights."""

    install: Callable[[], None]
    """Swaps the runner's weights, or raises and leaves them as they are."""
    label: str
    policy: InFlightPolicy
    done: Future[WeightsVersion] = field(default_factory=Future)


class WeightUpdates:
    """The waiting updates in order of arrival, and which weights serve. The engine's thread applies an update
    between two steps. Every method but `apply_due` is called with the engine's lock held.
    """

    def __init__(self, guard: Guard, scheduler: Scheduler, requests: LiveRequests) -> None:
        self.serving = WeightsVersion("initial", 1)
        """The weights that serve now. May be read without the lock."""
        self._guard = guard
        self._scheduler = scheduler
        self._requests = requests
        self._queue: deque[Update] = deque()
        self._applying: Update | None = None
        scheduler.use_weights(self.serving.generation)

    def __bool__(self) -> bool:
        """Whether an update waits."""
        return bool(self._queue)

    def add(self, update: Update) -> None:
        """Puts an update behind all others."""
        self._queue.append(update)

    @property
    def is_due(self) -> bool:
        """Whether the first update is to be applied as soon as no step is in flight. Under the policy WAIT it
        is not, while requests that began on the old weights go on.
        """
        if not self._queue:
            return False
        first = self._queue[0]
        if first.policy is not InFlightPolicy.WAIT or first.done.cancelled():
            return True
        return not self._scheduler.has_started

    def take_all(self) -> list[Update]:
        """Removes and returns all updates that wait."""
        updates = list(self._queue)
        self._queue.clear()
        return updates

    def take_unfinished(self) -> list[Update]:
        """Removes and returns all updates that wait, and the one that was being applied when the engine's
        thread failed.
        """
        return [*self.take_all(), *([] if self._applying is None else [self._applying])]

    def apply_due(self) -> None:
        """Applies the updates that are due. Called on the engine's thread, without the lock and with no step
        in flight.
        """
        while True:
            with self._guard.lock:
                if not self.is_due:
                    return
                update = self._queue.popleft()
            if not update.done.set_running_or_notify_cancel():
                continue  # the caller took it back
            self._applying = update
            settle(update, self._apply(update))
            self._applying = None

    def _apply(self, update: Update) -> WeightsVersion | Exception:
        """Applies an update. Returns the version that serves now, or the error that kept the old one."""
        try:
            update.install()  # without the lock, so that callers need not wait while it copies
        except BaseException as error:  # noqa: BLE001  whatever it was, the old weights serve on
            return as_exception(error)
        with self._guard.lock:
            if update.policy is InFlightPolicy.ABORT:
                message = f"weights were updated to {update.label!r}"
                self._requests.end_all(self._scheduler.started_ids(), message)
            elif update.policy is InFlightPolicy.RECOMPUTE:
                self._scheduler.preempt_all()
            self.serving = WeightsVersion(update.label, self.serving.generation + 1)
            self._scheduler.use_weights(self.serving.generation)
        return self.serving


def refuse(updates: Iterable[Update], error: Exception) -> None:
    """Fails the futures of updates that waited, or of one that was being applied."""
    for update in updates:
        if update.done.running() or update.done.set_running_or_notify_cancel():
            settle(update, error)


def settle(update: Update, outcome: WeightsVersion | Exception) -> None:
    """Sets the outcome of an update whose turn has come.

    To be called without the engine's lock: a future's callbacks run at once and may call the engine. A
    callback that raises is logged, and does not keep the others from being called.
    """
    try:
        if isinstance(outcome, Exception):
            update.done.set_exception(outcome)
        else:
            update.done.set_result(outcome)
    except BaseException:  # see above
        log.exception("a callback of a weight update failed")
