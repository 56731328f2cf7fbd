"""The breakdown of steps against numbers worked out by hand."""

from __future__ import annotations

from bench.steps import StepRecorder, phases_us, summary
from penstock.runtime.interface import StepRecord


def step(step_id, started_us, *, ids=("a",), decode_only=True):
    """1 us to schedule, 2 to dispatch, 3 to wait, 4 to commit."""
    times = [1000 * (started_us + after) for after in (0, 1, 3, 6, 10)]
    return StepRecord(step_id, len(ids), len(ids), decode_only, ids, 0, 1, *times)


def test_phases():
    found = phases_us([step(1, 0), step(2, 15), step(3, 30)])
    assert {name: values[0] for name, values in found.items()} == {
        "schedule": 1.0,
        "dispatch": 2.0,
        "wait": 3.0,
        "commit": 4.0,
        "deliver": 5.0,  # from 10 to 15
    }
    assert found["deliver"] == [5.0, 5.0]


def test_idle_time_is_not_delivery():
    # Nothing of step 2 runs on in step 3, and step 4 is missing.
    records = [step(2, 0), step(3, 500, ids=("b",)), step(5, 1000, ids=("b",))]
    assert phases_us(records)["deliver"] == []


def test_summary_tells_decodes_from_mixed_steps():
    found = summary([step(1, 0, decode_only=False), step(2, 10), step(3, 24)])
    assert found["mixed"]["steps"] == 1
    assert found["decode"] == {
        "steps": 2,
        "schedule_p50_us": 1.0,
        "schedule_p90_us": 1.0,
        "dispatch_p50_us": 2.0,
        "dispatch_p90_us": 2.0,
        "wait_p50_us": 3.0,
        "wait_p90_us": 3.0,
        "commit_p50_us": 4.0,
        "commit_p90_us": 4.0,
        "deliver_p50_us": 4.0,
        "deliver_p90_us": 4.0,
    }


def test_records_are_taken_once():
    recorder = StepRecorder()
    recorder.on_step(step(1, 0))
    assert len(recorder.take()) == 1
    assert recorder.take() == []
