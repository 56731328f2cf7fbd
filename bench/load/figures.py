"""What is said about one level of load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.load.process import Cpu
from bench.load.streams import Seen


@dataclass(frozen=True, slots=True)
class Level:
    """What came of one number of streams."""

    name: str
    streams: int
    seconds: float
    seen: Seen
    cpu: Cpu
    """Of the server, in this time."""
    client_s: float
    """The client's own processor time."""
    memory_bytes: float = 0.0
    """How much more memory the server has than before the level, for each stream."""


COLUMNS = (
    "load",
    "streams",
    "messages/s",
    "tokens/s",
    "tokens per message",
    "p50, ms",
    "p99, ms",
    "event loop, µs",
    "host, µs",
    "front processes, µs",
    "all, µs",
    "kB per stream",
)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed; NaN if there are
    none.
    """
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def row(level: Level) -> str:
    """Write a line of the table. Times of the processor are for one message."""
    seen, each = level.seen, 1e6 / max(level.seen.messages, 1)
    all_s = level.cpu.host + level.cpu.model + level.cpu.fronts
    figures = [
        f"{seen.messages / level.seconds:,.0f}",
        f"{seen.tokens / level.seconds:,.0f}",
        f"{seen.tokens / max(seen.messages, 1):.2f}",
        f"{1e3 * percentile(seen.gaps, 0.5):.1f}",
        f"{1e3 * percentile(seen.gaps, 0.99):.1f}",
        f"{level.cpu.loop * each:,.1f}",
        f"{level.cpu.host * each:,.1f}",
        f"{level.cpu.fronts * each:,.1f}",
        f"{all_s * each:,.1f}",
        f"{level.memory_bytes / 1024:,.0f}",
    ]
    return "| " + " | ".join([level.name, str(level.streams), *figures]) + " |"


def head() -> str:
    """Write the first two lines of the table."""
    return f"| {' | '.join(COLUMNS)} |\n|---|" + "---:|" * (len(COLUMNS) - 1)
