"""What the scheduler counts, against numbers worked out by hand."""

from __future__ import annotations

from penstock.runtime.requests.request import CacheParams, Request, StoppingParams, outputs_of
from penstock.runtime.scheduling.load import LostPages, Totals
from penstock.runtime.scheduling.scheduler import Scheduler
from tests.support.scheduler.fake_runner import Rota
from tests.support.scheduler.scheduling import add, commit, dispatch, make

NOTHING = Totals(
    preemptions=0, recomputed_tokens=0, prefix_queried_tokens=0, prefix_hit_tokens=0, put_off_rows=0
)


def step(scheduler: Scheduler, count: int = 1) -> None:
    for _ in range(count):
        commit(scheduler, dispatch(scheduler))


def recomputed(scheduler: Scheduler) -> int:
    return scheduler.totals().recomputed_tokens


def test_nothing_has_happened_yet() -> None:
    assert make().totals() == NOTHING


def test_positions_count_as_recomputed_when_they_are_computed_again() -> None:
    scheduler = make(max_num_batched_tokens=4)
    add(scheduler, "a", 6)
    step(scheduler, 3)  # positions 0 to 3, 4 and 5, 6: two tokens are known after the prompt
    scheduler.preempt_all()
    assert recomputed(scheduler) == 0, "nothing was computed again yet"
    step(scheduler)
    assert recomputed(scheduler) == 4
    scheduler.preempt_all()  # halfway
    step(scheduler)
    assert recomputed(scheduler) == 8  # positions 0 to 3 for the second time
    step(scheduler)  # positions 4 to 7, of which the last is computed for the first time
    assert recomputed(scheduler) == 11
    step(scheduler, 3)
    assert recomputed(scheduler) == 11
    assert scheduler.totals().preemptions == 2


def test_what_the_prefix_cache_gives_back_is_not_recomputed() -> None:
    scheduler = make(prefix_cache_pages=None)
    add(scheduler, "a", 6)
    step(scheduler, 2)
    scheduler.preempt_all()
    step(scheduler)
    assert recomputed(scheduler) == 3  # 7 were computed, and 4 of them are in a full page


def test_those_preempted_are_told_once_with_what_they_had_computed() -> None:
    scheduler = make()
    add(scheduler, "a", 3)
    add(scheduler, "b", 2)
    step(scheduler, 2)
    scheduler.preempt_all()
    assert scheduler.take_preempted() == [LostPages("a", 4), LostPages("b", 3)]
    assert scheduler.take_preempted() == []
    step(scheduler)
    scheduler.preempt_all()
    dispatch(scheduler)  # nobody has asked, and nothing piles up
    assert scheduler.take_preempted() == []


def test_a_prompt_counts_as_queried_and_hit_when_it_first_enters() -> None:
    scheduler = make(prefix_cache_pages=None)
    add(scheduler, "first", 7, max_tokens=1)
    step(scheduler)
    assert (scheduler.totals().prefix_queried_tokens, scheduler.totals().prefix_hit_tokens) == (7, 0)
    assert scheduler.load().pages_cached == 1
    add(scheduler, "again", 7)
    step(scheduler)
    assert (scheduler.totals().prefix_queried_tokens, scheduler.totals().prefix_hit_tokens) == (14, 4)
    assert scheduler.load().pages_cached == 0  # "again" holds it
    scheduler.preempt_all()
    step(scheduler)
    assert scheduler.totals().prefix_queried_tokens == 14


def test_who_bypasses_the_cache_has_not_queried_it() -> None:
    scheduler = make(prefix_cache_pages=None)
    scheduler.add(Request("a", (7,) * 6, cache=CacheParams(bypass=True)), 1)
    step(scheduler)
    without = make()
    add(without)
    step(without)
    assert scheduler.totals() == without.totals() == NOTHING


def test_forks_find_all_of_the_prompt_but_its_last_token() -> None:
    scheduler = make()  # forks share without a prefix cache too
    for output in outputs_of(Request("a", (7,) * 6, stopping=StoppingParams(5)), 3):
        scheduler.add(output, 1)
    step(scheduler, 2)
    assert (scheduler.totals().prefix_queried_tokens, scheduler.totals().prefix_hit_tokens) == (12, 10)


def test_rows_that_are_put_off_are_counted() -> None:
    scheduler = make()
    for name in "ab":
        scheduler.add(Request(name, (7,), constraint=Rota(5)), 1)
    plan = dispatch(scheduler)
    scheduler.put_off(plan, {0, 1}, {1})
    assert scheduler.totals().put_off_rows == 2
