"""Defines what one attempt to send a batch is, and what can come of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

MOST_ANSWER_BYTES = 64 * 1024
"""The largest answer that is read. A collector's has some hundred bytes at most."""
MOST_CHARS = 200
"""How much of a collector's own words a log line quotes."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The collector has taken the batch, or some of it: `answer` is its message, not decoded yet."""

    answer: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """The collector was not reached, or has refused the batch."""

    why: str
    may_retry: bool = False
    """Whether the same batch may be sent again, by OTLP's rules."""
    retry_after_s: float | None = None
    """How long the collector wants to be left alone; None if it does not say."""


class Transport(Protocol):
    """Sends batches, one at a time."""

    def attempt(self, batch: bytes, timeout_s: float) -> Taken | Failed:
        """Send a batch once. Raises nothing."""

    def close(self) -> None:
        """End for good, from any thread. An attempt that is under way fails soon."""


def quoted(text: str) -> str:
    """A collector's own words, cut short, without anything that could move a cursor."""
    return ascii(text[:MOST_CHARS]) if text else ""
