"""The changes that callers ask for and that are made between two steps, each with a future. No jax."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from penstock.runtime.loop.interface import Applied, InFlightPolicy, InFlightReport, Paused

log = logging.getLogger(__name__)


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


def refuse(changes: Iterable[Change], error: Exception) -> None:
    """Fails the futures of changes that waited, or of one that was being made."""
    for change in changes:
        if change.done.running() or change.done.set_running_or_notify_cancel():
            settle(change, error)


def settle(change: Change, outcome: Outcome | Exception) -> None:
    """Sets the outcome of a change whose turn has come.

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
