"""Where the time of an engine's steps goes, from its own step records. Pure, but for the recorder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from penstock.cli.bench_stats import percentile
from penstock.runtime.interface import StepRecord

PHASES = ("schedule", "dispatch", "wait", "commit", "deliver")


class StepRecorder:
    """An Observer that keeps the records until they are taken."""

    def __init__(self) -> None:
        self._records: list[StepRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self._records.append(record)

    def take(self) -> list[StepRecord]:
        """The records so far, once; call it while no request runs."""
        records, self._records = self._records, []
        return records


def phases_us(records: Sequence[StepRecord]) -> dict[str, list[float]]:
    """Microseconds of each phase, one value per step.

    schedule: making the plan. dispatch: packing and calling the program. wait: for its result. commit: what
    ended. deliver: from there to the start of the next step (sinks, bookkeeping), without the gaps in which
    nothing was running.
    """
    found = {
        "schedule": [(r.scheduled_ns - r.started_ns) / 1e3 for r in records],
        "dispatch": [(r.dispatched_ns - r.scheduled_ns) / 1e3 for r in records],
        "wait": [(r.waited_ns - r.dispatched_ns) / 1e3 for r in records],
        "commit": [(r.committed_ns - r.waited_ns) / 1e3 for r in records],
    }
    found["deliver"] = [
        (after.started_ns - before.committed_ns) / 1e3
        for before, after in pairwise(records)
        if after.step_id == before.step_id + 1 and set(after.request_ids) & set(before.request_ids)
    ]
    return found


def summary(records: Sequence[StepRecord]) -> dict[str, dict[str, float]]:
    """Per kind of step ("decode", "mixed") their number and p50 and p90 of each phase in microseconds."""
    found: dict[str, dict[str, float]] = {}
    for kind, decode_only in (("decode", True), ("mixed", False)):
        steps = [record for record in records if record.decode_only is decode_only]
        if steps:
            found[kind] = {"steps": len(steps)} | {
                f"{phase}_p{percent}_us": round(percentile(values, percent), 1)
                for phase, values in phases_us(steps).items()
                if values
                for percent in (50, 90)
            }
    return found
