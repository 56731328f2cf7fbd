"""Sharing of prefixes, computed by hand: which pages are found, promised, published, evicted and flushed.
Pages have 4 positions.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.runtime.requests.request import CacheParams, Request
from penstock.runtime.scheduling.plan import Plan
from penstock.runtime.scheduling.scheduler import Scheduler
from tests.support.scheduler.scheduling import WORD, commit, dispatch, make

PROMPT = tuple(range(100, 110))  # two full pages and two tokens


def add(
    scheduler: Scheduler,
    name: str,
    prompt: tuple[int, ...] = PROMPT,
    cache: CacheParams | None = None,
) -> None:
    scheduler.add(Request(name, prompt, cache=cache or CacheParams()), 1)


def cached(**limits: Any) -> Scheduler:
    return make(**({"prefix_cache_pages": None, "max_num_batched_tokens": 16} | limits))


def step(scheduler: Scheduler, token: int = WORD) -> Plan:
    plan = dispatch(scheduler)
    commit(scheduler, plan, token)
    return plan


def starts(plan: Plan) -> dict[str, int]:
    return {row.request_id: row.start for row in plan.rows}


def finish(scheduler: Scheduler, *names: str) -> None:
    for name in names:
        assert scheduler.abort(name, "", 9) is not None
    scheduler.check()


def test_a_second_request_starts_behind_the_full_pages_of_the_first():
    scheduler = cached()
    add(scheduler, "a")
    step(scheduler)
    add(scheduler, "b", (*PROMPT[:9], 1, 2, 3))
    plan = dispatch(scheduler)
    row = next(row for row in plan.rows if row.request_id == "b")
    assert (row.start, row.token_ids) == (8, (108, 1, 2, 3))
    assert [write.pages for write in plan.page_writes if write.slot == 1] == [(0, 1, 3)]
    assert scheduler.load().pages_used == 4  # 3 of "a", of which "b" shares 2
    output = scheduler.abort("b", "", 5)
    assert output is not None
    assert output.timing is not None
    assert output.timing.cached_prompt_tokens == 8


def test_rows_of_one_step_share_what_that_step_computes():
    scheduler = cached()
    for name in "abc":
        add(scheduler, name)
    plan = step(scheduler)
    assert starts(plan) == {"a": 0, "b": 8, "c": 8}
    assert scheduler.load().pages_used == 3 + 1 + 1


def test_a_whole_cached_prompt_leaves_one_token_to_compute():
    """8 tokens are two pages. The second is computed again in a page of its own, because the logits of its
    last token are needed.
    """
    scheduler = cached()
    add(scheduler, "a", PROMPT[:8])
    step(scheduler)
    add(scheduler, "b", PROMPT[:8])
    plan = step(scheduler)
    assert starts(plan) == {"a": 8, "b": 4}
    add(scheduler, "c", PROMPT)
    assert starts(step(scheduler))["c"] == 8


def test_a_request_that_needs_a_promised_page_waits_and_others_pass():
    scheduler = cached(max_num_batched_tokens=6, max_num_seqs=4, max_prefill_chunk=4)
    add(scheduler, "a")
    add(scheduler, "b")
    add(scheduler, "other", (1, 2))
    assert starts(step(scheduler)) == {"a": 0, "other": 0}
    assert scheduler.active_ids() == ("a", "b", "other")
    assert starts(step(scheduler)) == {"a": 4, "b": 8, "other": 2}  # "a" publishes page 1 in this step
    assert starts(step(scheduler)) == {"a": 8, "b": 9, "other": 3}


def test_if_the_request_that_promised_ends_the_next_computes_the_prefix():
    scheduler = cached(max_num_batched_tokens=4)
    for name in "abc":
        add(scheduler, name)
    assert starts(step(scheduler)) == {"a": 0}
    finish(scheduler, "a")
    assert starts(step(scheduler)) == {"b": 4}  # the first page stays; "c" waits for the second
    assert starts(step(scheduler)) == {"b": 8, "c": 8}


def test_generated_pages_are_shared_once_their_tokens_are_known():
    scheduler = cached()
    add(scheduler, "a", PROMPT[:6])
    plans = [dispatch(scheduler) for _ in range(4)]  # positions 6, 7 and 8 are dispatched
    add(scheduler, "b", (*PROMPT[:6], 11, 12, 5))
    for plan, token in zip(plans[:2], (11, 12), strict=True):
        commit(scheduler, plan, token)
    pool = scheduler.roster.groups.pools[0]
    assert pool.num_published == 1  # position 7 counts once the token sampled at it is known
    commit(scheduler, plans[2], 13)
    assert pool.num_published == 2
    assert starts(dispatch(scheduler))["b"] == 8


def test_pages_of_a_finished_request_stay_until_they_are_needed():
    scheduler = cached(num_pages=4, max_model_len=17)
    add(scheduler, "a")
    step(scheduler)
    finish(scheduler, "a")
    assert scheduler.load().pages_used == 0
    assert scheduler.roster.groups.pools[0].num_cached == 2
    add(scheduler, "b", tuple(range(200, 212)))  # 3 pages: the free ones, then the end of a's prefix
    step(scheduler)
    finish(scheduler, "b")
    add(scheduler, "c")
    assert starts(step(scheduler)) == {"c": 4}


def test_a_preempted_request_resumes_from_what_it_published():
    scheduler = cached()
    add(scheduler, "a", PROMPT[:6])
    for token in (11, 12, 13):
        step(scheduler, token)
    scheduler.preempt_all()
    plan = dispatch(scheduler)
    (row,) = plan.rows
    assert (row.start, row.token_ids, row.samples) == (8, (13,), True)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (CacheParams(), CacheParams(salt="tenant")),
        (CacheParams(salt="one"), CacheParams(salt="other")),
        (CacheParams(bypass=True), CacheParams()),
        (CacheParams(), CacheParams(bypass=True)),
    ],
)
def test_salts_and_bypass_prevent_sharing(first, second):
    scheduler = cached(max_num_batched_tokens=32)
    add(scheduler, "a", cache=first)
    add(scheduler, "b", cache=second)
    assert starts(step(scheduler)) == {"a": 0, "b": 0}
    finish(scheduler, "a", "b")
    add(scheduler, "c", cache=second)
    assert starts(step(scheduler)) == {"c": 0 if second.bypass else 8}


def test_nobody_knows_the_keys_of_another_process():
    """Each cache hashes with a secret of its own, so that nobody can make prompts whose keys collide."""
    first, second = (set(cached().page_keys(Request("a", PROMPT))) for _ in range(2))
    assert len(first) == len(second) == 2
    assert not first & second


def test_no_salt_leads_to_the_pages_of_another():
    """The root key is made of weights' generation, adapter and salt, and no salt may imitate the other
    two.
    """
    scheduler = cached()
    add(scheduler, "a")
    step(scheduler)
    for i, salt in enumerate(("0:0:", "0", "\x00", " ", "1:0:")):
        add(scheduler, f"b{i}", cache=CacheParams(salt=salt))
        assert starts(step(scheduler))[f"b{i}"] == 0
        finish(scheduler, f"b{i}")


def test_equal_tokens_after_different_ones_are_another_page():
    scheduler = cached()
    add(scheduler, "a")
    step(scheduler)
    add(scheduler, "b", (1, *PROMPT[1:]))
    assert starts(step(scheduler))["b"] == 0


def test_a_flush_forgets_all_and_running_requests_publish_nothing_more():
    scheduler = cached()
    add(scheduler, "done")
    step(scheduler)
    finish(scheduler, "done")
    add(scheduler, "runs", tuple(range(200, 206)))
    step(scheduler)
    assert scheduler.flush_prefix_cache() == (2, 1)
    scheduler.check()
    for _ in range(3):
        step(scheduler)
    assert scheduler.roster.groups.pools[0].num_published == 0
    add(scheduler, "again")
    assert starts(step(scheduler))["again"] == 0


@pytest.mark.parametrize("preempts", [False, True])
def test_new_weights_share_nothing_with_the_old(preempts):
    scheduler = cached(max_num_batched_tokens=8)
    add(scheduler, "a")
    step(scheduler)
    if preempts:
        scheduler.preempt_all()
    scheduler.use_weights(1)
    scheduler.check()
    add(scheduler, "b")
    first = starts(step(scheduler))
    # A request that goes on with KV of the old weights promises and publishes nothing; one that begins anew
    # does.
    assert first == ({"a": 0} if preempts else {"a": 8, "b": 0})
    second = starts(step(scheduler))
    assert second == ({"a": 8, "b": 8} if preempts else {"a": 10, "b": 6})


def test_switched_off_there_is_no_cache():
    scheduler = make(prefix_cache_pages=0, max_num_batched_tokens=32)
    add(scheduler, "a")
    add(scheduler, "b")
    assert starts(step(scheduler)) == {"a": 0, "b": 0}
    finish(scheduler, "a", "b")
    assert scheduler.roster.groups.pools[0].num_free == 16


def test_no_more_pages_are_kept_than_allowed():
    scheduler = cached(prefix_cache_pages=3)
    for i in range(3):
        add(scheduler, "a", tuple(range(i * 10, i * 10 + 9)))
        step(scheduler)
        finish(scheduler, "a")
    assert scheduler.roster.groups.pools[0].num_cached == 3


def test_a_higher_priority_does_not_wait_for_a_lower_ones_promise():
    scheduler = cached(max_num_batched_tokens=4, scheduling_policy="priority")
    scheduler.add(Request("low", PROMPT, priority=0), 1)
    assert starts(step(scheduler)) == {"low": 0}
    scheduler.add(Request("high", PROMPT, priority=1), 1)
    assert starts(step(scheduler)) == {"high": 4}  # it shares what is published and computes the rest itself
