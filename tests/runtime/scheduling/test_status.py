"""Where outputs stand, on plans computed by hand: pages have 4 positions, and a step has 4 tokens."""

from __future__ import annotations

from typing import Any

from penstock.runtime import Engine
from penstock.runtime.requests.request import Request, StoppingParams
from penstock.runtime.scheduling.scheduler import Scheduler
from penstock.runtime.scheduling.status import OutputStatus, Phase
from tests.support.collector import Collector, at_gate, submit
from tests.support.models.toy import toy_engine
from tests.support.scheduler.scheduling import commit, dispatch, make


def add(scheduler: Scheduler, name: str, num_prompt: int, priority: int = 0, **more: Any) -> None:
    prompt = tuple(range(100, 100 + num_prompt))
    stopping = StoppingParams(max_tokens=50)
    scheduler.add(Request(name, prompt, stopping=stopping, priority=priority, **more), 70)


def step(scheduler: Scheduler) -> None:
    commit(scheduler, dispatch(scheduler))


def phases(scheduler: Scheduler) -> list[tuple[str, Phase, int, int]]:
    return [
        (status.request_id, status.phase, status.num_computed, status.num_generated)
        for status in scheduler.oldest(100)
    ]


def test_an_output_waits_is_prefilled_and_decodes() -> None:
    scheduler = make(max_num_seqs=1, max_num_batched_tokens=4)
    add(scheduler, "a", 6)
    add(scheduler, "b", 2)
    seen = [phases(scheduler)]
    for _ in range(4):
        step(scheduler)
        seen.append(phases(scheduler))
    assert [of[0] for of in seen] == [
        ("a", Phase.WAITING, 0, 0),
        ("a", Phase.PREFILL, 4, 0),
        ("a", Phase.DECODE, 6, 1),
        ("a", Phase.DECODE, 7, 2),
        ("a", Phase.DECODE, 8, 3),
    ]
    assert {of[1] for of in seen} == {("b", Phase.WAITING, 0, 0)}


def test_a_preempted_output_waits_and_then_computes_all_of_it_again() -> None:
    scheduler = make(max_num_seqs=1, max_num_batched_tokens=4, scheduling_policy="priority")
    add(scheduler, "low", 4)
    step(scheduler)
    step(scheduler)
    add(scheduler, "high", 4, priority=3, received_ns=60)
    step(scheduler)
    low, high = scheduler.oldest(2)
    assert low == OutputStatus("low", Phase.WAITING, 70, 4, 0, 2, 0, 1)
    assert high == OutputStatus("high", Phase.DECODE, 60, 4, 4, 1, 3, 0)
    scheduler.abort("high", "", 2)
    step(scheduler)
    assert phases(scheduler) == [("low", Phase.PREFILL, 4, 2)]
    step(scheduler)
    assert phases(scheduler) == [("low", Phase.DECODE, 6, 3)]


def test_the_first_to_arrive_are_told_whoever_runs() -> None:
    scheduler = make(max_num_seqs=1, scheduling_policy="priority")
    for i in range(5):
        add(scheduler, str(i), 2, priority=i)
    step(scheduler)
    assert [status.request_id for status in scheduler.oldest(3)] == ["0", "1", "2"]
    assert scheduler.oldest(0) == []
    assert [status.phase for status in scheduler.oldest(9)] == [Phase.WAITING] * 4 + [Phase.DECODE]


def ids(engine: Engine) -> list[str]:
    return [status.request_id for status in engine.oldest_outputs(10)]


def test_an_engine_tells_of_no_output_that_was_cancelled() -> None:
    """The engine's thread is held while it is asked, so it cannot have dropped the output by itself."""
    engine = toy_engine()
    gate = at_gate(engine)
    submit(engine, Collector(), "other")
    assert ids(engine) == ["held", "other"]
    engine.cancel("held")
    assert ids(engine) == ["other"]
    gate.open()
    engine.shutdown()
    assert ids(engine) == []
