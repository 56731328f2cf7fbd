"""Pages of layers with and without a window, computed by hand: which ones a sequence takes, gives back and
shares in each group. Pages have 4 positions.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.runtime.errors import ConfigError, ExceedsKVCapacity
from penstock.runtime.requests.request import Request, StoppingParams, outputs_of
from penstock.runtime.scheduling.plan import PageCopy, PageWrite, Plan
from penstock.runtime.scheduling.scheduler import Scheduler
from penstock.runtime.scheduling.scheduler_config import GroupLimits
from tests.support.scheduler.scheduling import add, commit, dispatch, make

FULL, WINDOWED = 0, 1


def grouped(*, windowed: int = 16, window: int = 8, **limits: Any) -> Scheduler:
    """Make a scheduler with a second group of layers, of this window and so many pages."""
    sizes = {"max_num_batched_tokens": 16, "max_model_len": 200, "num_pages": 64}
    return make(**{**sizes, "further_groups": (GroupLimits(windowed, window),), **limits})


def step(scheduler: Scheduler) -> Plan:
    plan = dispatch(scheduler)
    commit(scheduler, plan)
    return plan


def prompt(scheduler: Scheduler, name: str, tokens: tuple[int, ...], n: int = 1) -> None:
    request = Request(name, tokens, stopping=StoppingParams(max_tokens=20, ignore_eos=True))
    for output in outputs_of(request, n, []):
        scheduler.add(output, 1)


def used(scheduler: Scheduler) -> list[int]:
    """Pages that sequences hold, in each group."""
    return [pool.num_used for pool in scheduler.roster.groups.pools]


def starts(plan: Plan) -> dict[str, int]:
    return {row.request_id: row.start for row in plan.rows}


def test_each_group_has_pages_and_tables_of_its_own():
    scheduler = grouped()
    add(scheduler, "a", 6)
    assert step(scheduler).page_writes == (PageWrite(0, 0, (0, 1), FULL), PageWrite(0, 0, (0, 1), WINDOWED))
    assert step(scheduler).page_writes == ()
    assert step(scheduler).page_writes == ()
    assert step(scheduler).page_writes == (PageWrite(0, 2, (2,), FULL), PageWrite(0, 2, (2,), WINDOWED))


def test_layers_with_a_window_hold_no_more_than_the_window_and_a_chunk():
    """A prompt of 100 tokens takes 25 pages of the first group. Those of the second are a window of 8 and a
    chunk of 16, wherever in a page they begin, and at last a window and the page that is written.
    """
    scheduler = grouped(windowed=7)
    add(scheduler, "a", 100, max_tokens=50)
    held = []
    while scheduler.has_work:
        step(scheduler)
        held.append(used(scheduler))
    assert held[:6] == [[25, 7], *[[25, 6]] * 5]  # chunks of 16 end before the last page of what they hold
    assert [full for full, _ in held[6:-1]] == [-(-(100 + made) // 4) for made in range(49)]
    assert {windowed for _, windowed in held[6:-1]} == {2, 3}
    assert scheduler.totals().preemptions == 0


def test_the_load_counts_the_pages_of_all_groups():
    scheduler = grouped(windowed=16, prefix_cache_pages=None)
    add(scheduler, "a", 13)
    step(scheduler)
    load = scheduler.load()
    assert (load.pages_total, load.pages_used) == (64 + 16, 4 + 4)
    assert scheduler.abort("a", "", 5) is not None
    load = scheduler.load()
    assert (load.pages_used, load.pages_cached) == (0, 3 + 3)
    assert scheduler.flush_prefix_cache() == (6, 0)


@pytest.mark.parametrize(("windowed", "fits"), [(3, False), (4, True)])
def test_a_request_must_fit_each_group(windowed, fits):
    """A window of 8 needs 4 pages, as for a model in which all layers have it."""
    scheduler = grouped(windowed=windowed)
    if fits:
        add(scheduler, "a", 100)
    else:
        with pytest.raises(ExceedsKVCapacity):
            add(scheduler, "a", 100)


def test_a_prefix_is_found_if_the_window_before_its_end_is_there():
    """Of "a", the first 8 pages are known. Its window, which reaches 7 positions back from position 32, was
    given back and is cached.
    """
    scheduler = grouped(prefix_cache_pages=None)
    tokens = tuple(range(100, 134))
    prompt(scheduler, "a", tokens)
    while scheduler.has_work:
        step(scheduler)
    prompt(scheduler, "b", tokens)
    plan = step(scheduler)
    assert starts(plan) == {"b": 32}
    full, windowed = plan.page_writes
    assert len(full.pages) == len(windowed.pages) == 9
    assert used(scheduler) == [9, 2 + 1]


def test_without_the_window_a_shorter_prefix_is_found():
    """Pages 6 and 7 are needed to go on from position 32. Without page 7 the longest prefix has 28 positions,
    and needs pages 5 and 6; without page 5 it has 20, and needs pages 3 and 4.
    """
    scheduler = grouped(prefix_cache_pages=None)
    tokens = tuple(range(100, 134))
    prompt(scheduler, "a", tokens)
    while scheduler.has_work:
        step(scheduler)
    pool = scheduler.roster.groups.pools[WINDOWED]
    keys = list(scheduler.page_keys(Request("b", tokens)))
    for page, start in ((7, 28), (5, 20), (4, 16), (0, 16), (1, 16), (2, 0)):
        lost = pool.lookup(keys[page])
        assert lost is not None
        pool.retain([lost])
        del pool._index[keys[page]]
        pool._keys[lost] = None
        pool.release([lost])
        prompt(scheduler, f"b{page}", tokens)
        waiting = scheduler.roster.find(f"b{page}")
        assert waiting is not None
        found = scheduler.roster.cache.match(waiting)
        assert found.num_computed == start, f"without page {page}"


def test_forks_share_and_copy_in_each_group():
    """The prompt has 30 positions, the fork computes the last, and its window begins at position 22. So it
    shares pages 5 and 6 of the second group, and page 7 is copied in both.
    """
    scheduler = grouped()
    prompt(scheduler, "a", tuple(range(30)), n=2)
    for _ in range(2):
        step(scheduler)
    plan = step(scheduler)
    (fork,) = set(starts(plan)) - {"a"}
    assert starts(plan) == {"a": 30, fork: 29}
    first, second = (table.tables for table in scheduler.roster.running)
    assert [copy.group for copy in plan.page_copies] == [FULL, WINDOWED]
    for group, copy in enumerate(plan.page_copies):
        assert copy == PageCopy(first[group].pages[7], second[group].pages[7], group)
    assert first[FULL].pages[:7] == second[FULL].pages[:7]
    assert first[WINDOWED].pages[5:7] == second[WINDOWED].pages[5:7]
    assert second[WINDOWED].num_dropped == 5


def test_a_decode_that_finds_no_page_in_one_group_preempts():
    """Two rows of 7 tokens hold all 4 pages of the second group, and position 8 opens a third page."""
    scheduler = grouped(windowed=4, window=12, max_model_len=17)
    add(scheduler, "a", 7)
    add(scheduler, "b", 7)
    for _ in range(2):
        step(scheduler)
    plan = step(scheduler)
    assert plan.preempted == ("b",)
    assert starts(plan) == {"a": 8}
    assert used(scheduler) == [3, 3]


def test_a_prefill_whose_old_pages_are_held_by_another_preempts_for_its_next_position():
    """At position 16 "a" gives back its first two pages, but "b", which began behind them, still holds them.
    So all 6 pages of the second group are taken: two by "a" alone, two by "b" alone, and these two by "b".
    """
    scheduler = grouped(windowed=6, prefix_cache_pages=None, max_num_batched_tokens=5, max_prefill_chunk=4)
    tokens = tuple(range(100, 130))
    prompt(scheduler, "a", tokens)
    prompt(scheduler, "b", tokens[:8] + tuple(range(200, 222)))
    assert starts(step(scheduler)) == {"a": 0}
    for start in (4, 8, 12):
        assert starts(step(scheduler)) == {"a": start, "b": 7 + start // 4}
        assert used(scheduler)[WINDOWED] == 6
    plan = step(scheduler)
    assert plan.preempted == ("b",)
    assert [(row.request_id, row.start, row.num_tokens) for row in plan.rows] == [("a", 16, 4)]


def test_a_prompt_enters_when_each_group_has_room():
    scheduler = grouped(windowed=7, max_prefill_chunk=8)
    add(scheduler, "a", 30)
    add(scheduler, "b", 30)
    assert starts(step(scheduler)) == {"a": 0}  # of the second group each needs 5 pages
    for start in (8, 16, 24):
        assert starts(step(scheduler)) == {"a": start}
    assert set(starts(step(scheduler))) == {"a"}
    assert used(scheduler)[FULL] < 16
    assert scheduler.abort("a", "", 5) is not None
    assert starts(step(scheduler)) == {"b": 0}


def test_further_groups_have_windows():
    with pytest.raises(ConfigError, match="further_groups must have pages and a window"):
        grouped(further_groups=(GroupLimits(3, None),))
