"""What a registry holds at one moment: frozen values, which every way out reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.runtime.measuring.instruments import Instrument

Labels = tuple[str, ...]
"""The values of an instrument's labels, in the order of `Instrument.labels`."""


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One value of a histogram, and the span that it was measured in."""

    value: float
    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    at_s: float
    """When it was measured, in Unix time."""


@dataclass(frozen=True, slots=True)
class HistogramPoint:
    """The values of a histogram that have the same labels."""

    count: int
    """How many values there are: the sum of `bucket_counts`."""
    sum: float
    """Of all values."""
    bucket_counts: tuple[int, ...]
    """How many values are in each bucket and in none before it; one more than `Instrument.buckets`."""
    exemplars: tuple[Exemplar | None, ...]
    """For each bucket the newest value that has an exemplar; None where there is none."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One instrument and its values."""

    instrument: Instrument
    points: Mapping[Labels, float | HistogramPoint]
    """Labels to value; a HistogramPoint if the instrument is a histogram."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All metrics of a registry at one moment."""

    at_s: float
    """When it was made, in Unix time."""
    started_at_s: float
    """Since when counters and histograms count, in Unix time."""
    metrics: tuple[Metric, ...]
    """In the order in which their instruments were registered."""
