"""How many layers are kept, so that no cache holds them, and how many of them a call runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from bench.measures.caches import largest_bytes

T = TypeVar("T")

_AT_LEAST_BYTES = 512 << 20
_CACHES = 4
"""A stack has as many bytes as so many last-level caches."""
_RUN_OPERATIONS = 16e9
"""A run is long enough to be timed, and not much longer, if one layer is enough."""
_MOST_CALLS = 32


def stack_bytes() -> int:
    """Return the least size of all layers together."""
    return max(_AT_LEAST_BYTES, _CACHES * largest_bytes())


def layers_kept(layer_bytes: float, least_bytes: int) -> int:
    return max(1, -(-least_bytes // int(layer_bytes)))


def calls_per_run(kept: int, operations: float) -> int:
    """Tell how many layers a run goes through: all, but not for longer than needed."""
    return int(max(1, min(kept, _MOST_CALLS, -(-_RUN_OPERATIONS // operations))))


def windows(kept: Sequence[T], calls: int) -> Iterator[list[int]]:
    """Yield the layers of one run after another, without end: a run goes on where the one before ended."""
    at = 0
    while True:
        yield [(at + call) % len(kept) for call in range(calls)]
        at = (at + calls) % len(kept)
