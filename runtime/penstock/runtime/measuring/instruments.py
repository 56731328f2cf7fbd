"""Instrument: the definition of one metric, from which every way out makes what it needs."""

from __future__ import annotations

import enum
import itertools
import re
from dataclasses import dataclass

_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")


class Kind(enum.Enum):
    """How the values of an instrument are to be read."""

    COUNTER = "counter"
    """A total since the start, which never falls."""
    GAUGE = "gauge"
    """A state, as it is at the moment of a snapshot."""
    HISTOGRAM = "histogram"
    """Counts of values, by the bucket into which each falls."""


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric. ValueError where the parts do not fit together."""

    name: str
    """OpenTelemetry's form: words in lower case, joined by dots. Prometheus' form is made of it."""
    kind: Kind
    unit: str
    """In UCUM: "s", "By", "1" for a ratio, and a noun in braces, such as "{token}", for what is counted."""
    description: str
    """One sentence, for operators."""
    labels: tuple[str, ...] = ()
    """Names of the labels. Each point has one value for each; an empty value means that the label does not
    apply."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, rising; a value that equals a bound is in that bucket. One more
    bucket has what is above them all."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no name of an instrument")
        if bool(self.buckets) != (self.kind is Kind.HISTOGRAM):
            raise ValueError(f"{self.name}: a histogram has buckets, and nothing else has")
        if any(low >= high for low, high in itertools.pairwise(self.buckets)):
            raise ValueError(f"{self.name}: the buckets do not rise: {self.buckets}")
        if len(set(self.labels)) != len(self.labels):
            raise ValueError(f"{self.name}: a label is named twice: {self.labels}")
