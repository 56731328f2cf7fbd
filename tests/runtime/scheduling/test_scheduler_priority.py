"""The policy "priority" and the sliding window, with plans computed by hand."""

from __future__ import annotations

from typing import Any

from penstock.runtime.requests.request import Request, StoppingParams
from penstock.runtime.scheduling.plan import Plan
from penstock.runtime.scheduling.scheduler import Scheduler
from tests.support.scheduler.scheduling import commit, dispatch, make


def add(scheduler: Scheduler, name: str, priority: int = 0, num_prompt: int = 3, **stopping: Any) -> None:
    prompt = tuple(range(100, 100 + num_prompt))
    scheduler.add(Request(name, prompt, stopping=StoppingParams(**stopping), priority=priority), 1)


def prioritized(**limits: Any) -> Scheduler:
    return make(**({"scheduling_policy": "priority", "max_num_batched_tokens": 16} | limits))


def step(scheduler: Scheduler) -> Plan:
    plan = dispatch(scheduler)
    commit(scheduler, plan)
    return plan


def names(plan: Plan) -> list[str]:
    return [row.request_id for row in plan.rows]


def test_the_highest_priority_enters_first_and_among_equals_the_first_to_arrive():
    scheduler = prioritized(max_num_seqs=2)
    for name, priority in (("a", 0), ("b", -3), ("c", 7), ("d", 7), ("e", 0)):
        add(scheduler, name, priority)
    assert names(step(scheduler)) == ["c", "d"]
    scheduler.abort("d", "", 2)
    assert names(step(scheduler)) == ["c", "a"]


def test_fcfs_ignores_priorities():
    scheduler = make(max_num_seqs=1)
    add(scheduler, "a", 0)
    add(scheduler, "b", 9)
    assert names(step(scheduler)) == ["a"]
    assert step(scheduler).preempted == ()


def test_a_request_without_a_slot_preempts_the_latest_of_the_lowest():
    scheduler = prioritized(max_num_seqs=3)
    for name, priority in (("a", 1), ("b", 0), ("c", 0)):
        add(scheduler, name, priority)
    step(scheduler)
    add(scheduler, "high", 2)
    plan = step(scheduler)
    assert (plan.preempted, names(plan)) == (("c",), ["a", "b", "high"])
    assert [slot for slot, _ in plan.new_requests] == [2]
    add(scheduler, "same", 0)  # not higher than "b", and behind "c"
    assert step(scheduler).preempted == ()
    scheduler.abort("high", "", 3)
    assert names(step(scheduler)) == ["a", "b", "c"]


def test_a_request_without_pages_preempts_as_many_as_it_takes():
    scheduler = prioritized(num_pages=4)
    for name in "abc":
        add(scheduler, name)
    step(scheduler)
    add(scheduler, "high", 1, num_prompt=9)  # 3 pages; one is free
    plan = step(scheduler)
    assert plan.preempted == ("c", "b")
    assert names(plan) == ["a", "high"]


def test_no_request_is_preempted_in_vain():
    scheduler = prioritized(num_pages=4)
    add(scheduler, "equal", 1, num_prompt=8)
    add(scheduler, "low", 0)
    step(scheduler)
    add(scheduler, "large", 1, num_prompt=12)  # 3 pages; without "low" there are 1 or 2
    assert step(scheduler).preempted == ()


def test_a_decode_that_needs_a_page_takes_it_from_the_lowest_even_if_that_came_first():
    scheduler = prioritized(num_pages=2, max_model_len=9)
    add(scheduler, "low", 0, num_prompt=4)
    add(scheduler, "high", 1, num_prompt=3)
    step(scheduler)
    plan = step(scheduler)  # "low" needs a page for position 4 and is last itself
    assert (plan.preempted, names(plan)) == (("low",), ["high"])


def test_a_prefill_of_higher_priority_goes_before_one_underway():
    scheduler = prioritized(max_num_batched_tokens=4)
    add(scheduler, "low", 0, num_prompt=8)
    step(scheduler)
    add(scheduler, "high", 1, num_prompt=6)
    assert [names(step(scheduler)) for _ in range(3)] == [["high"], ["high", "low"], ["high", "low"]]


def test_a_victim_with_a_token_in_flight_resumes_after_its_commit():
    scheduler = prioritized(max_num_seqs=1)
    add(scheduler, "low", 0)
    ahead = dispatch(scheduler)
    add(scheduler, "high", 1, max_tokens=1)
    plan = dispatch(scheduler)
    assert (plan.preempted, names(plan)) == (("low",), ["high"])
    (output,) = commit(scheduler, ahead, 42)
    assert (output.request_id, output.token_ids) == ("low", (42,))
    commit(scheduler, plan)
    assert dispatch(scheduler).rows[0].token_ids == (100, 101, 102, 42)


def test_pages_before_the_window_are_given_back_while_the_sequence_runs():
    """The window is 5 and pages have 4 positions. When position p is next, p - 4 is the first position that
    it reads.
    """
    scheduler = make(sliding_window=5, max_num_batched_tokens=6)
    add(scheduler, "a", num_prompt=14)
    used = []
    for _ in range(8):
        step(scheduler)
        used.append(scheduler.load().pages_used)
    # Computed before each step: 0, 6, 12 (first seen 8: pages 0 and 1 go), 14, 15, 16 (12: page 2), 17, 18.
    # All 4 pages of the prompt are taken at entry; position 16 opens the fifth.
    assert used == [4, 4, 2, 2, 2, 2, 2, 2]


def test_with_a_window_long_outputs_fit_few_pages():
    scheduler = make(sliding_window=4, num_pages=8, max_model_len=32)
    add(scheduler, "a", num_prompt=4)
    add(scheduler, "b", num_prompt=4)
    most = 0
    for _ in range(27):
        assert step(scheduler).preempted == ()
        most = max(most, scheduler.load().pages_used)
    assert most <= 4


def test_pages_that_leave_the_window_can_still_be_shared():
    scheduler = make(sliding_window=4, prefix_cache_pages=None, max_num_batched_tokens=32)
    add(scheduler, "a", num_prompt=13)
    for _ in range(4):
        step(scheduler)
    assert scheduler.roster.groups.pools[0].num_cached == 3
    add(scheduler, "b", num_prompt=13)
    rows = {row.request_id: row.start for row in step(scheduler).rows}
    assert rows["b"] == 12
