"""What happened in the last minute: totals for rates, and values for percentiles.

Times are monotonic ns. One thread at a time may use an object of this module; whoever owns it has the lock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

KEPT_NS = 60 * 10**9
"""For how long anything is remembered."""
_TOTAL_SLOT_NS = 250_000_000
_VALUE_SLOT_NS = 10**9
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


class _Slot(Protocol):
    index: int


SlotT = TypeVar("SlotT", bound=_Slot)


class _Ring(Generic[SlotT]):
    """The slots of the last minute. Each is for a short span of time and is used again a minute later."""

    def __init__(self, new: type[SlotT], slot_ns: int) -> None:
        self._new = new
        self._slot_ns = slot_ns
        self._slots: list[SlotT | None] = [None] * (KEPT_NS // slot_ns + 1)

    def at(self, at_ns: int) -> SlotT | None:
        """The slot for this time; None if the time is so long ago that its slot has been used again."""
        index = at_ns // self._slot_ns
        i = index % len(self._slots)
        slot = self._slots[i]
        if slot is not None and slot.index == index:
            return slot
        if slot is not None and slot.index > index:
            return None
        slot = self._slots[i] = self._new()
        slot.index = index
        return slot

    def first_index(self, now_ns: int, seconds: float) -> int:
        """The first slot that lies in the last `seconds` as a whole."""
        return -(-(now_ns - int(seconds * 1e9)) // self._slot_ns)

    def since(self, first_index: int) -> Iterator[SlotT]:
        """The slots from this one on, in no order."""
        return (slot for slot in self._slots if slot is not None and slot.index >= first_index)


@dataclass(slots=True)
class _TotalSlot:
    index: int = 0
    total: float = 0.0


class RecentTotal:
    """What was added up in the last minute."""

    def __init__(self) -> None:
        self._ring = _Ring(_TotalSlot, _TOTAL_SLOT_NS)

    def add(self, at_ns: int, amount: float) -> None:
        """Adds what happened at this time."""
        slot = self._ring.at(at_ns)
        if slot is not None:
            slot.total += amount

    def total(self, now_ns: int, seconds: float) -> float:
        """What was added for the last `seconds`, at most 60, but for a first part of a quarter of a second
        that does not lie in them as a whole.
        """
        return sum(slot.total for slot in self._ring.since(self._ring.first_index(now_ns, seconds)))

    def rate(self, now_ns: int, seconds: float, started_ns: int) -> float:
        """`total` per second, since `started_ns` if that is less long ago. Of less than a second it is what
        was added in it.
        """
        first_ns = self._ring.first_index(now_ns, seconds) * _TOTAL_SLOT_NS
        return self.total(now_ns, seconds) / max((now_ns - max(first_ns, started_ns)) / 1e9, 1.0)


@dataclass(slots=True)
class _ValueSlot:
    index: int = 0
    count: int = 0
    sum: float = 0.0
    least: float = math.inf
    most: float = 0.0
    bins: dict[int, int] = field(default_factory=dict)
    """Number of a bin to how many values it has. The bin i has those from 2^(i/8) to 2^((i+1)/8)."""


class RecentValues:
    """How values of the last minute are distributed. They are never negative."""

    def __init__(self) -> None:
        self._ring = _Ring(_ValueSlot, _VALUE_SLOT_NS)

    def add(self, at_ns: int, value: float, times: int = 1) -> None:
        """Adds a value that was measured at this time, `times` times."""
        slot = self._ring.at(at_ns)
        if slot is None:
            return
        value = max(value, _SMALLEST)
        i = math.floor(math.log2(value) * _BINS_PER_DOUBLING)
        slot.bins[i] = slot.bins.get(i, 0) + times
        slot.count += times
        slot.sum += value * times
        slot.least = min(slot.least, value)
        slot.most = max(slot.most, value)

    def distribution(self, now_ns: int, seconds: float) -> Distribution:
        """Of the values of the last `seconds`, at most 60, but for a first part of a second that does not lie
        in them as a whole.
        """
        slots = list(self._ring.since(self._ring.first_index(now_ns, seconds)))
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
