"""Tells where the time of an engine's steps goes, from its step records. Pure functions, except for the
recorder.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from penstock.cli.measuring.stats import percentile
from penstock.runtime.loop.interface import StepRecord

PHASES = ("schedule", "pack", "dispatch", "wait", "commit", "deliver", "idle")


class StepRecorder:
    """An Observer that keeps the records until they are taken."""

    def __init__(self) -> None:
        self._records: list[StepRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self._records.append(record)

    def take(self) -> list[StepRecord]:
        """Return the records so far and forget them. To be called while no request runs."""
        records, self._records = self._records, []
        return records


def phases_us(records: Sequence[StepRecord]) -> list[dict[str, float]]:
    """Return the microseconds of each phase of each step. A phase that cannot be computed for a step is left
    out.

    schedule: making the plan. pack: filling the buffer for the device. dispatch: calling the program. wait:
    for the result. commit: deciding what ended. deliver: from there to the next plan (sinks, the journal,
    bookkeeping). idle: how long the device had no work before this step. It is a lower bound: the
    host learns that a step ended when it reads the step's tokens. Where the step before was still unread at
    the dispatch, the host cannot know whether the device still worked on it, and `idle` is left out. An
    engine that dispatches a step before it reads the one before normally does everything but `wait` while the
    device works. Gaps in which no request ran belong to no phase.
    """
    records = sorted(records, key=lambda record: record.dispatched_ns)
    starts = [record.started_ns for record in records]
    found: list[dict[str, float]] = []
    for i, record in enumerate(records):
        phases = {
            "schedule": (record.scheduled_ns - record.started_ns) / 1e3,
            "pack": (record.packed_ns - record.scheduled_ns) / 1e3,
            "dispatch": (record.dispatched_ns - record.packed_ns) / 1e3,
            "wait": (record.waited_ns - record.waiting_ns) / 1e3,
            "commit": (record.committed_ns - record.waited_ns) / 1e3,
        }
        after = bisect_left(starts, record.committed_ns)
        if after < len(records) and _continues(record, records[after]):
            phases["deliver"] = (starts[after] - record.committed_ns) / 1e3
        if i and _continues(records[i - 1], record) and records[i - 1].waited_ns <= record.dispatched_ns:
            phases["idle"] = (record.dispatched_ns - records[i - 1].waited_ns) / 1e3
        found.append(phases)
    return found


def _continues(before: StepRecord, after: StepRecord) -> bool:
    """Say whether a request ran in both steps, so that the engine cannot have waited for work between
    them.
    """
    return not set(before.request_ids).isdisjoint(after.request_ids)


def summary(records: Sequence[StepRecord]) -> dict[str, dict[str, float]]:
    """Return for each kind of step ("decode", "mixed", or "proposed", of those that check proposed tokens):
    the number of dispatches, of steps (a dispatch may be a window of several), and p50, p90, p99 and the
    largest value of each phase of a dispatch in microseconds.
    """
    records = sorted(records, key=lambda record: record.dispatched_ns)
    phases = phases_us(records)
    found: dict[str, dict[str, float]] = {}
    for kind in ("decode", "mixed", "proposed"):
        chosen = [pair for pair in zip(records, phases, strict=True) if _kind(pair[0]) == kind]
        if not chosen:
            continue
        found[kind] = {"dispatches": len(chosen), "steps": sum(record.num_steps for record, _ in chosen)}
        for phase in PHASES:
            if values := [each[phase] for _, each in chosen if phase in each]:
                found[kind] |= {f"{phase}_p{p}_us": round(percentile(values, p), 1) for p in (50, 90, 99)}
                found[kind][f"{phase}_max_us"] = round(max(values), 1)
    return found


def _kind(record: StepRecord) -> str:
    return "proposed" if record.speculated else "decode" if record.decode_only else "mixed"


def accepted_by_position(records: Sequence[StepRecord]) -> list[tuple[int, int]]:
    """Say for each position of proposals how many tokens were proposed there, and how many of these
    accepted.
    """
    found: list[tuple[int, int]] = []
    for record in records:
        for one in record.speculated:
            found += [(0, 0)] * (len(one.proposed) - len(found))
            for i, (proposed, accepted) in enumerate(zip(one.proposed, one.accepted, strict=True)):
                found[i] = found[i][0] + proposed, found[i][1] + accepted
    return found
