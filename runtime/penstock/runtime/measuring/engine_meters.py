"""EngineMeters: everything that is measured of one engine, folded from the entries of its journal.

Folding takes 20 us for a step of 64 rows, on the journal's thread. What parts of the engine keep anyway is
asked for at each snapshot (`engine_state`). Before a snapshot the journal is flushed, so what a caller has
seen is in it. If entries were dropped, the outputs that run are forgotten: their tokens count on, but no time
is made up for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from penstock.runtime.loop.journal import Cancelled, Ended, Entry, Journal, Queued, StepRecord
from penstock.runtime.measuring import engine_state
from penstock.runtime.measuring.engine_metrics import (
    EngineLatencies,
    EngineMetrics,
    EngineRates,
    EngineTotals,
)
from penstock.runtime.measuring.engine_state import BuildInfo, Sources
from penstock.runtime.measuring.output_meters import OutputMeters
from penstock.runtime.measuring.recent import RecentTotals
from penstock.runtime.measuring.registry import Registry
from penstock.runtime.measuring.step_meters import StepMeters

RATES_S = 10.0
LATENCIES_S = 60.0


class _Counted(NamedTuple):
    """The totals that rates are made of."""

    prompt_tokens: int
    generated_tokens: int
    ended: int
    steps: int
    rows: int
    computed_tokens: int
    padding_tokens: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    proposed_tokens: int
    accepted_tokens: int


class EngineMeters:
    """Reads a journal into a registry, and sums up what is in it. Any thread may ask for `metrics`."""

    def __init__(self, registry: Registry, journal: Journal, sources: Sources, build: BuildInfo) -> None:
        """Register all instruments of an engine but those of weight updates, and begin to read."""
        self._journal = journal
        self._sources = sources
        self._lock = threading.Lock()
        """Over what is folded here: one thread reads the journal, and others ask for metrics."""
        self._started_ns = time.monotonic_ns()
        self._outputs = OutputMeters(registry, build.model)
        self._steps = StepMeters(registry)
        self._dropped = 0
        self._recent = RecentTotals(self._started_ns, self._counted(), RATES_S)
        registry.on_snapshot(journal.flush)
        engine_state.show(registry, sources, build)
        journal.read_by(self.read)

    def read(self, entries: Sequence[Entry]) -> None:
        """Take the next entries of the journal, on its thread."""
        outputs, steps = self._outputs, self._steps
        with self._lock:
            for entry in entries:
                if isinstance(entry, StepRecord):
                    steps.step(entry)
                    outputs.step(entry)
                elif isinstance(entry, Queued):
                    outputs.queued(entry)
                elif isinstance(entry, Ended):
                    outputs.ended(entry)
                elif isinstance(entry, Cancelled):
                    outputs.cancelled(entry)
            self._recent.see(time.monotonic_ns(), self._counted())
            dropped = self._sources.dropped_entries()
            if dropped != self._dropped:
                self._dropped = dropped
                outputs.forget()

    def _counted(self) -> _Counted:
        outputs, steps, scheduler = self._outputs.totals, self._steps.totals, self._sources.totals()
        return _Counted(
            prompt_tokens=outputs.prompt_tokens,
            generated_tokens=outputs.generated_tokens,
            ended=sum(outputs.ended.values()),
            steps=sum(steps.steps.values()),
            rows=steps.rows,
            computed_tokens=steps.computed_tokens,
            padding_tokens=steps.padding_tokens,
            prefix_queried_tokens=scheduler.prefix_queried_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            proposed_tokens=sum(steps.proposed.values()),
            accepted_tokens=sum(steps.accepted.values()),
        )

    def metrics(self, *, flush: bool = True) -> EngineMetrics:
        """Report what the engine does now, and has done until now; without `flush` until a moment ago, as far
        as the journal was read.
        """
        if flush:
            self._journal.flush()
        load = self._sources.load()
        with self._lock:
            now_ns = time.monotonic_ns()
            age_s = (now_ns - self._started_ns) / 1e9
            now_s = time.time()
            return EngineMetrics(
                at_s=now_s,
                started_at_s=now_s - age_s,
                load=load,
                totals=self._totals(),
                rates=self._rates(now_ns),
                latencies=self._latencies(now_ns),
            )

    def _totals(self) -> EngineTotals:
        outputs, steps, scheduler = self._outputs, self._steps, self._sources.totals()
        return EngineTotals(
            prompt_tokens=outputs.totals.prompt_tokens,
            generated_tokens=outputs.totals.generated_tokens,
            cached_tokens=outputs.totals.cached_tokens,
            recomputed_tokens=scheduler.recomputed_tokens,
            prefix_queried_tokens=scheduler.prefix_queried_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            preemptions=scheduler.preemptions,
            ended=dict(outputs.totals.ended),
            steps=dict(steps.totals.steps),
            step_rows=steps.totals.rows,
            computed_tokens=steps.totals.computed_tokens,
            padding_tokens=steps.totals.padding_tokens,
            step_time_s=steps.totals.parts_s(),
            proposed_tokens=sum(steps.totals.proposed.values()),
            accepted_tokens=sum(steps.totals.accepted.values()),
            put_off_rows=scheduler.put_off_rows,
            compiles_after_warmup=self._sources.compiles_after_warmup(),
            dropped_entries=self._sources.dropped_entries(),
        )

    def _rates(self, now_ns: int) -> EngineRates:
        grown, seconds = self._recent.grown(now_ns)
        recent = _Counted(*grown)
        return EngineRates(
            prompt_tokens_per_s=recent.prompt_tokens / seconds,
            generated_tokens_per_s=recent.generated_tokens / seconds,
            ended_per_s=recent.ended / seconds,
            steps_per_s=recent.steps / seconds,
            rows_per_step=_share(recent.rows, recent.steps),
            padding_share=_share(recent.padding_tokens, recent.padding_tokens + recent.computed_tokens),
            prefix_hit_share=_share(recent.prefix_hit_tokens, recent.prefix_queried_tokens),
            accepted_share=_share(recent.accepted_tokens, recent.proposed_tokens),
        )

    def _latencies(self, now_ns: int) -> EngineLatencies:
        outputs = self._outputs
        return EngineLatencies(
            time_to_first_token=outputs.recent_first_token.distribution(now_ns, LATENCIES_S),
            inter_token=outputs.recent_inter_token.distribution(now_ns, LATENCIES_S),
            queue=outputs.recent_queue.distribution(now_ns, LATENCIES_S),
            end_to_end=outputs.recent_duration.distribution(now_ns, LATENCIES_S),
        )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
