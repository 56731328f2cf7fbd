"""The pages that are kept for running sequences when another one enters. Pages have 4 positions unless a test
says otherwise.
"""

from __future__ import annotations

import random

import pytest

from penstock.runtime.requests.request import Request, StoppingParams
from tests.support.scheduler.scheduling import add, commit, dispatch, make


@pytest.mark.parametrize("cached", [True, False])
def test_under_page_pressure_little_is_prefilled_twice(cached):
    """64 rows would grow to 32k tokens in all, and there are pages for 24k. Without headroom 1.5 times as
    many prompt tokens were computed with a prefix cache, and 1.8 times as many without one.
    """
    rng = random.Random(0)
    scheduler = make(
        max_num_seqs=64, max_num_batched_tokens=512, max_model_len=4096, page_size=16, num_pages=1500,
        prefix_cache_pages=None if cached else 0,
    )  # fmt: skip
    needed = computed = 0
    for i in range(160):
        prompt = tuple(rng.choices(range(10, 30_000), k=rng.randint(200, 800)))
        stopping = StoppingParams(max_tokens=rng.randint(200, 800), ignore_eos=True)
        scheduler.add(Request(f"r{i}", prompt, stopping=stopping), 1)
        needed += len(prompt)
    most_running = 0
    while scheduler.has_work:
        plan = scheduler.schedule(2)
        assert plan is not None
        computed += sum(row.num_tokens for row in plan.rows if row.token_ids is not None)
        most_running = max(most_running, len(plan.rows))
        commit(scheduler, plan, audit=False)
    assert scheduler.totals().preemptions > 0
    assert most_running > 40
    assert needed <= computed <= 1.2 * needed


def test_a_request_waits_while_it_would_take_the_last_pages_of_running_ones():
    """ "a" and "b" may grow by 15 pages in all; an eighth of 24 pages is kept for them."""
    scheduler = make(num_pages=24, max_num_batched_tokens=96, max_model_len=96)
    add(scheduler, "a", 20)
    add(scheduler, "b", 20)
    commit(scheduler, dispatch(scheduler))  # 5 pages each
    add(scheduler, "c", 44)  # 11 pages of the 14 that are left, or of 12 when both have grown
    plan = dispatch(scheduler)
    assert [row.request_id for row in plan.rows] == ["a", "b"]
    commit(scheduler, plan)
    scheduler.abort("b", "", 3)
    assert [row.request_id for row in dispatch(scheduler).rows] == ["a", "c"]


def test_pages_that_running_requests_will_not_need_are_not_kept():
    scheduler = make(num_pages=24, max_num_batched_tokens=96, max_model_len=96)
    add(scheduler, "a", 20, max_tokens=1)
    add(scheduler, "b", 20, max_tokens=1)
    plan = dispatch(scheduler)
    add(scheduler, "c", 56)  # all pages that are left
    assert [row.request_id for row in dispatch(scheduler).rows] == ["c"]
    commit(scheduler, plan)


@pytest.mark.parametrize("num_prompt", [64, 61])
def test_an_idle_scheduler_admits_any_accepted_request(num_prompt):
    scheduler = make(max_num_batched_tokens=64, max_model_len=96)
    add(scheduler, "a", num_prompt)  # all 16 pages
    assert len(dispatch(scheduler).rows) == 1


def test_under_priority_preemption_also_frees_the_headroom():
    """ "high" needs 8 pages beside the headroom of 2, an eighth of 16, so preempting one sequence is not
    enough.
    """
    scheduler = make(scheduling_policy="priority", max_num_batched_tokens=64, max_model_len=64)
    for name, priority in (("stays", 2), ("low", 1), ("lowest", 0)):
        scheduler.add(Request(name, tuple(range(16)), priority=priority), 1)
    commit(scheduler, dispatch(scheduler))
    scheduler.add(Request("high", tuple(range(32)), priority=2), 1)
    plan = dispatch(scheduler)
    assert plan.preempted == ("lowest", "low")
    assert [row.request_id for row in plan.rows] == ["stays", "high"]
