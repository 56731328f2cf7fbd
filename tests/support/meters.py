"""Meters that read entries which a test gives them, and what they show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.runtime.loop.journal import Journal
from penstock.runtime.measuring.engine_meters import EngineMeters
from penstock.runtime.measuring.engine_state import BuildInfo, Sources
from penstock.runtime.measuring.instruments import Instrument
from penstock.runtime.measuring.registry import Registry
from penstock.runtime.measuring.snapshot import HistogramPoint, Labels
from penstock.runtime.scheduling.load import Load, Totals

BUILD = BuildInfo(
    version="1.2",
    jax="0.9",
    platform="cpu",
    model="toy",
    dtype="bfloat16",
    quantization="none",
    kv_cache_dtype="bfloat16",
)
NO_TOTALS = Totals(
    preemptions=0, recomputed_tokens=0, prefix_queried_tokens=0, prefix_hit_tokens=0, put_off_rows=0
)


@dataclass
class Engine:
    """What a toy engine keeps; a test may change it at any time."""

    load: Load = field(default_factory=lambda: Load.idle(10))
    totals: Totals = NO_TOTALS
    generation: int = 1
    broken: bool = False
    paused: bool = False
    compiles: int = 0
    dropped: int = 0
    memory: Mapping[str, int] = field(default_factory=lambda: {"weights": 1000})

    def sources(self) -> Sources:
        return Sources(
            load=lambda: self.load,
            totals=lambda: self.totals,
            weights_generation=lambda: self.generation,
            are_weights_broken=lambda: self.broken,
            is_paused=lambda: self.paused,
            compiles_after_warmup=lambda: self.compiles,
            dropped_entries=lambda: self.dropped,
            memory=lambda: self.memory,
        )


class Meters:
    """Meters of a toy engine."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine or Engine()
        self.registry = Registry()
        self.meters = EngineMeters(self.registry, Journal(), self.engine.sources(), BUILD)
        self.read = self.meters.read

    def points(self, instrument: Instrument) -> dict[Labels, float | HistogramPoint]:
        (metric,) = [m for m in self.registry.snapshot().metrics if m.instrument is instrument]
        return dict(metric.points)

    def value(self, instrument: Instrument, *labels: str) -> float:
        """Return the value of a counter or gauge."""
        value = self.points(instrument)[labels]
        assert not isinstance(value, HistogramPoint)
        return value

    def histogram(self, instrument: Instrument, *labels: str) -> HistogramPoint:
        """Return the values of a histogram that have these labels; none if there are no such labels."""
        empty = (0,) * (len(instrument.buckets) + 1)
        point = self.points(instrument).get(labels, HistogramPoint(0, 0.0, empty, (None,) * len(empty)))
        assert isinstance(point, HistogramPoint)
        return point

    def all_points(self) -> dict[str, dict[Labels, float | HistogramPoint]]:
        """Everything, by the names of instruments."""
        return {m.instrument.name: dict(m.points) for m in self.registry.snapshot().metrics}
