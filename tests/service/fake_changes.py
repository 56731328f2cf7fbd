"""Pauses and updates of the fake engine: what waits for its running requests, and which weights serve."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from penstock.runtime.errors import DrainTimeout
from penstock.runtime.loop.interface import InFlightPolicy, InFlightReport, WeightsVersion

Make = Callable[[InFlightReport], Any]
"""Makes a change, given what became of the running requests, and returns the future's result."""


@dataclass
class Change:
    """One that waits for its turn."""

    policy: InFlightPolicy
    make: Make
    running: int
    """How many requests ran when it was asked for."""
    timeout_s: float | None
    asked_s: float = field(default_factory=time.monotonic)
    done: Future[Any] = field(default_factory=Future)

    @property
    def waits(self) -> bool:
        return self.policy is InFlightPolicy.WAIT and not self.done.cancelled()


class FakeChanges:
    """All changes of one engine, in order. Used with the engine's lock held, except for `settle`."""

    def __init__(self) -> None:
        self.queue: list[Change] = []
        self.is_paused = False
        self.made: list[InFlightPolicy] = []
        """The policies of the changes that were made."""
        self.versions = {1: WeightsVersion("initial", 1)}
        self.weights = self.versions[1]
        self.since = dt.datetime(2026, 11, 22, 6, 30, tzinfo=dt.UTC)
        self._settled: list[tuple[Future[Any], Any]] = []

    @property
    def has_settled(self) -> bool:
        """Whether `settle` has anything to do."""
        return bool(self._settled)

    @property
    def holds_admission(self) -> bool:
        """Whether a change waits for the running requests to end."""
        return any(change.waits for change in self.queue)

    def add(
        self, policy: InFlightPolicy, running: int, make: Make, timeout_s: float | None = None
    ) -> Future[Any]:
        change = Change(policy, make, running, timeout_s)
        self.queue.append(change)
        return change.done

    def make_due(self, num_running: int, end_all: Callable[[], None]) -> None:
        """Make the changes whose turn has come. Those that must wait keep the later ones waiting."""
        while self.queue:
            change = self.queue[0]
            if change.waits and num_running:
                if change.timeout_s is None or time.monotonic() - change.asked_s < change.timeout_s:
                    return
                self.queue.pop(0)
                self._settled.append((change.done, DrainTimeout(change.timeout_s)))
                continue
            self.queue.pop(0)
            if not change.done.set_running_or_notify_cancel():
                continue
            name = {"wait": "waited", "abort": "aborted", "keep": "kept", "recompute": "recomputed"}
            report = InFlightReport(**{name[change.policy.value]: change.running})
            if change.policy is InFlightPolicy.ABORT:
                end_all()
            self.made.append(change.policy)
            try:
                self._settled.append((change.done, change.make(report)))
            except Exception as error:  # noqa: BLE001 -- told to whoever waits
                self._settled.append((change.done, error))

    def go_live(self, label: str) -> WeightsVersion:
        self.weights = WeightsVersion(label, self.weights.generation + 1)
        self.versions[self.weights.generation] = self.weights
        self.since += dt.timedelta(seconds=1)
        return self.weights

    def settle(self) -> None:
        """Set the results of what was made. Called without the lock."""
        settled, self._settled = self._settled, []
        for done, outcome in settled:
            if isinstance(outcome, Exception):
                done.set_exception(outcome)
            else:
                done.set_result(outcome)
