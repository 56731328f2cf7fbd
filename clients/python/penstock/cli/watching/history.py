"""Keeps what a server reported in the last minutes, for the curves."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.client import LoadReport, LoadTotals

SPAN_S = 180.0
"""How far back the curves go, in seconds."""
MOST_POINTS = 4096
"""Of so many reports at most, however often the server says that it is the same time."""


@dataclass(frozen=True, slots=True)
class Point:
    """What one report adds to the curves. Rates are since the report before; None where there was none."""

    at_s: float
    generated_per_s: float | None
    prompt_per_s: float | None
    running: int
    waiting: int
    pages_used: float
    """Share of the KV pages."""


class History:
    """The points of the last minutes."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=MOST_POINTS)
        self._last: LoadReport | None = None

    def add(self, report: LoadReport) -> None:
        """Add the next report. Reports that are older than the last one, as after the server's clock was set
        back, begin anew.
        """
        at_s = report.at.timestamp()
        if self._points and at_s < self._points[-1].at_s:
            self._points.clear()
            self._last = None
        last, self._last = self._last, report
        generated = _rate(last, report, lambda totals: totals.generated_tokens)
        prompt = _rate(last, report, lambda totals: totals.prompt_tokens)
        load = report.load
        used = load.kv_pages_used / load.kv_pages_total if load.kv_pages_total else 0.0
        self._points.append(Point(at_s, generated, prompt, load.running_requests, load.queued_requests, used))
        while self._points[0].at_s < at_s - SPAN_S:
            self._points.popleft()

    def curve(self, value: Callable[[Point], float | None], columns: int) -> Sequence[float | None]:
        """Return means of the values for so many equal parts of the last minutes, the newest part last; None
        for parts without a report. Parts begin at multiples of their length, so that curves do not flicker.
        """
        if not self._points or columns < 1:
            return []
        length_s = SPAN_S / columns
        newest = math.floor(self._points[-1].at_s / length_s)
        found: list[list[float]] = [[] for _ in range(columns)]
        for point in self._points:
            i = columns - 1 - (newest - math.floor(point.at_s / length_s))
            number = value(point)
            if i >= 0 and number is not None:
                found[i].append(number)
        return [sum(part) / len(part) if part else None for part in found]


def _rate(last: LoadReport | None, report: LoadReport, of: Callable[[LoadTotals], int]) -> float | None:
    """Compute the rate between two reports; None if the server was started in between, or counts nothing."""
    if last is None or last.totals is None or report.totals is None:
        return None
    passed_s = (report.at - last.at).total_seconds()
    added = of(report.totals) - of(last.totals)
    if passed_s <= 0 or added < 0 or report.totals.since != last.totals.since:
        return None
    return added / passed_s
