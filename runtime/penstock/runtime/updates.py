"""Weight updates that wait for their turn. No jax: `install` is what swaps the weights."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from penstock.runtime.interface import InFlightPolicy, WeightsVersion

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Update:
    """One request for new weights."""

    install: Callable[[], None]
    """Swaps the runner's weights, or raises and leaves them."""
    label: str
    policy: InFlightPolicy
    done: Future[WeightsVersion] = field(default_factory=Future)


class UpdateQueue:
    """In order of arrival; guarded by the engine's lock."""

    def __init__(self) -> None:
        self._queue: deque[Update] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, update: Update) -> None:
        self._queue.append(update)

    def is_due(self, has_started: bool) -> bool:
        """Whether the first is to be applied as soon as no step is in flight; `has_started`: whether requests
        have begun on the old weights, for whom the policy WAIT waits.
        """
        if not self._queue:
            return False
        first = self._queue[0]
        return not (has_started and first.policy is InFlightPolicy.WAIT) or first.done.cancelled()

    def take(self) -> Update:
        return self._queue.popleft()

    def take_all(self) -> tuple[Update, ...]:
        updates = tuple(self._queue)
        self._queue.clear()
        return updates


def refuse(updates: Iterable[Update], error: Exception) -> None:
    """Tell the callers of updates that waited, or of one that was being applied."""
    for update in updates:
        if update.done.running() or update.done.set_running_or_notify_cancel():
            settle(update, error)


def settle(update: Update, outcome: WeightsVersion | Exception) -> None:
    """Tell the caller of an update whose turn has come.

    To be called without the engine's lock: a future's callbacks run at once and may call the engine. One that
    raises is logged; it must not keep the others from being told.
    """
    try:
        if isinstance(outcome, Exception):
            update.done.set_exception(outcome)
        else:
            update.done.set_result(outcome)
    except BaseException:  # see above
        log.exception("a callback of a weight update failed")
