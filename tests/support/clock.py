"""A clock that moves only when the test moves it."""

from __future__ import annotations


class Clock:
    """Gives the time `now`, in seconds."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
