"""What is asked of a profile, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.errors import InvalidRequest, Violation

DEFAULT_STEPS = 100
MAX_STEPS = 1000
"""The profiler keeps everything in memory until it writes, a hundred bytes for each operation of a step."""
DEFAULT_TIMEOUT_S = 60.0
MIN_TIMEOUT_S = 0.1
MAX_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How much is to be recorded. InvalidRequest names what is out of range."""

    steps: int = DEFAULT_STEPS
    """The recording ends after this many steps, from 1 to MAX_STEPS. A window of decode steps counts as many
    as it holds, so the last one may go beyond."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """It ends after this time even if there were fewer steps, from MIN_TIMEOUT_S to MAX_TIMEOUT_S seconds."""

    def __post_init__(self) -> None:
        bad: list[Violation] = []
        if not 1 <= self.steps <= MAX_STEPS:
            bad.append(Violation("steps", f"must be from 1 to {MAX_STEPS}, not {self.steps}"))
        # Written so that NaN is refused too.
        if not MIN_TIMEOUT_S <= self.timeout_s <= MAX_TIMEOUT_S:
            shown = "not a number" if math.isnan(self.timeout_s) else f"not {self.timeout_s:g}"
            bad.append(
                Violation("timeout", f"must be from {MIN_TIMEOUT_S:g} to {MAX_TIMEOUT_S:g} s, {shown}")
            )
        if bad:
            raise InvalidRequest(bad)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A profile that was written."""

    folder: Path
    """Holds all its files: the trace, and below `plugins/` the .xplane.pb file for TensorBoard and XProf."""
    trace: Path
    """The file that Perfetto opens (https://ui.perfetto.dev)."""
    steps: int
    """Steps of the engine that were recorded from their beginning to their end."""
    num_bytes: int
    """Size of all files in the folder."""
    duration_s: float
    """For how long was recorded."""


class ProfileRun:
    """A profile in the making. Any thread may use it."""

    def __init__(self, folder: Path, future: Future[Profile], end: Callable[[], None]) -> None:
        """`end` ends the recording; it waits for nothing."""
        self.folder = folder
        """Where the profile will be when it is written."""
        self.future = future
        """Done when all is written. It cannot be cancelled, see `stop`. Its exception is ProfileFailed."""
        self._end = end

    def stop(self) -> None:
        """End the recording now. What was recorded is written. Waits for nothing."""
        self._end()

    def result(self, timeout_s: float | None = None) -> Profile:
        """Wait until all is written: for at most `timeout_s` seconds, else TimeoutError. Raises
        ProfileFailed where it could not be written.
        """
        return self.future.result(timeout_s)
