"""What happened lately: how totals have grown, for rates, and how values are distributed, for percentiles.

Times are monotonic ns. One thread at a time may use an object of this module; whoever owns it has the lock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

KEPT_NS = 60 * 10**9
"""For how long values are remembered."""
_SLOT_NS = 10**9
_NUM_SLOTS = KEPT_NS // _SLOT_NS + 1
_CLOSE_NS = 50_000_000
_BINS_PER_DOUBLING = 8
"""So the width of a bin is 9 % of its values, and a percentile is at most 4.5 % off."""
_SMALLEST = 1e-9
"""Values below count as this."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """How some values are distributed. All but `count` are 0 where there are none."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    """Half of the values are at most this. The percentiles are within 5 % of the exact ones."""
    p90: float = 0.0
    p99: float = 0.0


class RecentTotals:
    """How totals that somebody else counts have grown lately."""

    def __init__(self, now_ns: int, totals: Sequence[int], span_s: float) -> None:
        """Remembers `span_s` seconds. The totals are always given in the same order."""
        self._span_ns = int(span_s * 1e9)
        self._started_ns = now_ns
        self._seen: deque[tuple[int, Sequence[int]]] = deque([(now_ns, totals)])
        """What the totals were at which time, the oldest first. The first is as old as the span, or older."""

    def see(self, now_ns: int, totals: Sequence[int]) -> None:
        """Note the totals of this moment. Of moments that are close together only the last is kept."""
        seen = self._seen
        if len(seen) > 1 and now_ns - seen[-2][0] < _CLOSE_NS:
            seen.pop()
        seen.append((now_ns, totals))
        while len(seen) > 1 and seen[1][0] <= now_ns - self._span_ns:
            seen.popleft()

    def grown(self, now_ns: int) -> tuple[tuple[int, ...], float]:
        """Return by how much each total has grown in the last seconds, and in how many: the span, or less
        after the start, but never less than one.
        """
        since_ns = now_ns - self._span_ns
        before = self._seen[0][1]
        for at_ns, totals in self._seen:
            if at_ns > since_ns:
                break
            before = totals
        newest = self._seen[-1][1]
        seconds = (now_ns - max(since_ns, self._started_ns)) / 1e9
        return tuple(new - old for new, old in zip(newest, before, strict=True)), max(seconds, 1.0)


@dataclass(slots=True)
class _Slot:
    """The values of one second."""

    index: int
    count: int = 0
    sum: float = 0.0
    least: float = math.inf
    most: float = 0.0
    bins: dict[int, int] = field(default_factory=dict)
    """Number of a bin to how many values it has. The bin i has those from 2^(i/8) to 2^((i+1)/8)."""


class RecentValues:
    """How values of the last minute are distributed. They are never negative."""

    def __init__(self) -> None:
        self._slots: list[_Slot | None] = [None] * _NUM_SLOTS
        """One for each second. Each is used again a minute later."""

    def add(self, at_ns: int, value: float, times: int = 1) -> None:
        """Add a value that was measured at this time, `times` times."""
        index = at_ns // _SLOT_NS
        slot = self._slots[index % _NUM_SLOTS]
        if slot is None or slot.index < index:
            slot = self._slots[index % _NUM_SLOTS] = _Slot(index)
        elif slot.index > index:
            return  # that was more than a minute ago
        value = max(value, _SMALLEST)
        i = math.floor(math.log2(value) * _BINS_PER_DOUBLING)
        slot.bins[i] = slot.bins.get(i, 0) + times
        slot.count += times
        slot.sum += value * times
        slot.least = min(slot.least, value)
        slot.most = max(slot.most, value)

    def distribution(self, now_ns: int, seconds: float) -> Distribution:
        """Return the distribution of the values of the last `seconds`, at most 60, but for a first part of a
        second that does not lie in them as a whole.
        """
        first = -(-(now_ns - int(seconds * 1e9)) // _SLOT_NS)
        slots = [slot for slot in self._slots if slot is not None and slot.index >= first]
        count = sum(slot.count for slot in slots)
        if not count:
            return Distribution()
        bins: dict[int, int] = {}
        for slot in slots:
            for i, times in slot.bins.items():
                bins[i] = bins.get(i, 0) + times
        least, most = min(slot.least for slot in slots), max(slot.most for slot in slots)

        def percentile(percent: int) -> float:
            rank = -(-count * percent // 100)  # the value so many values are at most as large as
            for i in sorted(bins):
                rank -= bins[i]
                if rank <= 0:
                    break
            middle: float = 2.0 ** ((i + 0.5) / _BINS_PER_DOUBLING)
            return min(max(middle, least), most)

        mean = sum(slot.sum for slot in slots) / count
        return Distribution(count, mean, percentile(50), percentile(90), percentile(99))
