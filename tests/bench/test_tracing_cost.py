"""The probes of what traces and metrics cost give them what an engine would."""

from __future__ import annotations

from bench.probes.watching import metrics
from bench.probes.watching.tracing import Load, measured, recorded
from penstock.runtime.loop.journal import Ended, StepRecord
from penstock.service.telemetry.options import TraceLevel

LOAD = Load(streams=4, prompt=8, tokens=10, steps=100)


def test_all_streams_run_in_every_step():
    batches, num_requests = recorded(LOAD, batch_steps=20, traced=True)
    entries = [entry for batch in batches for entry in batch]
    steps = [entry for entry in entries if isinstance(entry, StepRecord)]
    assert (len(batches), len(steps), {step.num_rows for step in steps}) == (5, 100, {4})
    assert sum(isinstance(entry, Ended) for entry in entries) == num_requests
    assert num_requests >= 4 * 100 // 10


def test_each_level_has_more_spans_than_the_one_before():
    numbers = [measured(LOAD, level)[0].num_spans for level in TraceLevel]
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 0


def test_metrics_have_all_of_it():
    folding_s, snapshot_s, meters = metrics.measured(LOAD, traced=True)
    totals = meters.metrics().totals
    assert min(folding_s, snapshot_s) > 0
    assert (sum(totals.steps.values()), totals.step_rows, totals.generated_tokens) == (100, 400, 400)
    assert totals.ended["max_tokens"] >= 4 * 100 // 10
