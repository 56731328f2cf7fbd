"""The breakdown of steps into phases, against numbers worked out by hand."""

from __future__ import annotations

from bench.measures.steps import StepRecorder, accepted_by_position, phases_us, summary
from bench.probes.host import table
from penstock.runtime.loop.interface import StepRecord
from penstock.runtime.scheduling.load import Load
from penstock.runtime.scheduling.plan import Plan, PlanRow, Speculated


def record(step_id, times_us, *, ids=("a",), decode_only=True, num_steps=1):
    """Make a record from times in microseconds: started, scheduled, packed, dispatched, waiting, waited,
    committed.
    """
    tokens = 1 if decode_only else 2
    rows = tuple(PlanRow(name, slot, 0, tokens, None, True) for slot, name in enumerate(ids))
    times = [1000 * time for time in times_us]
    plan = Plan(step_id, rows, num_steps=num_steps)
    return StepRecord._make([plan, (), Load.idle(1), None, *times, times[-1], ()])


def step(step_id, started_us, **more):
    """Make a record of a step that takes 1 us to schedule, 1 to pack, 1 to dispatch, 3 to wait and 4 to
    commit.
    """
    return record(step_id, [started_us + after for after in (0, 1, 2, 3, 3, 6, 10)], **more)


def test_one_step_after_another():
    first, second = phases_us([step(1, 0), step(2, 15)])
    # Delivered from 10 to 15; the device idles from 6, when the first was read, to 18.
    host = {"schedule": 1.0, "pack": 1.0, "dispatch": 1.0, "wait": 3.0, "commit": 4.0}
    assert first == {**host, "deliver": 5.0}
    assert second == {**host, "idle": 12.0}


def test_overlapped_steps():
    # 0-3 plan and dispatch 1; 3-6 the same for 2; wait for 1 until 10, commit to 12; deliver to 13;
    # 13-16 plan and dispatch 3; wait for 2 until 20, commit to 22.
    records = [
        record(1, [0, 1, 2, 3, 6, 10, 12]),
        record(2, [3, 4, 5, 6, 16, 20, 22]),
        record(3, [13, 14, 15, 16, 22, 30, 32]),
    ]
    first, second, third = phases_us(records)
    host = {"schedule": 1.0, "pack": 1.0, "dispatch": 1.0, "wait": 4.0, "commit": 2.0}
    assert first == {**host, "deliver": 1.0}
    assert second == host
    assert third["wait"] == 8.0
    assert "idle" not in third


def test_idle_is_unknown_where_the_device_may_have_ended_long_before_the_host_looked():
    # Step 1 is dispatched at 3. The host dispatches step 2 only at 906 and then reads step 1 without a wait:
    # the device may have stood still for most of that time, so no value may claim that it worked.
    records = [record(1, [0, 1, 2, 3, 906, 907, 909]), record(2, [3, 4, 5, 906, 909, 912, 914])]
    second = phases_us(records)[1]
    assert second["dispatch"] == 901.0
    assert "idle" not in second


def test_time_without_requests_is_none_of_it():
    first, second = phases_us([step(2, 0), step(3, 500, ids=("b",))])
    assert "deliver" not in first
    assert "idle" not in second


def test_summary_tells_decodes_from_mixed_steps():
    found = summary([step(1, 0, decode_only=False), step(2, 10), step(3, 24, num_steps=8)])
    assert (found["mixed"]["dispatches"], found["mixed"]["deliver_p50_us"]) == (1, 0.0)
    decode = found["decode"]
    assert (decode["dispatches"], decode["steps"]) == (2, 9)
    assert (decode["schedule_p50_us"], decode["wait_p90_us"], decode["deliver_p90_us"]) == (1.0, 3.0, 4.0)
    # Idle before step 2: from 6 to 13; before step 3: from 16 to 27.
    assert (decode["idle_p50_us"], decode["idle_p90_us"]) == (9.0, 10.6)
    assert (decode["idle_p99_us"], decode["idle_max_us"]) == (11.0, 11.0)


def test_host_table():
    lines = table(phases_us([step(1, 0), step(2, 15)])).splitlines()
    cells = {line[:24].strip(): line[24:].split() for line in lines}
    assert cells["commit"] == ["4.0"] * 3
    assert cells["host, all"] == ["12.0"] * 3  # of the first step: 1 + 1 + 1 + 4 + 5


def test_accepted_by_position():
    one, other = Speculated("lookup", (3, 2), (3, 1)), Speculated("lookup", (2, 1, 1), (0, 0, 0))
    records = [step(1, 0)._replace(speculated=found) for found in ((one,), (), (other,))]
    assert accepted_by_position(records) == [(5, 3), (3, 1), (1, 0)]
    assert {kind: found["steps"] for kind, found in summary(records).items()} == {"decode": 1, "proposed": 2}


def test_records_are_taken_once():
    recorder = StepRecorder()
    recorder.on_step(step(1, 0))
    assert len(recorder.take()) == 1
    assert recorder.take() == []
