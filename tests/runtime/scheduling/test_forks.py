"""Several outputs of one prompt, computed by hand: which of them wait, which pages are shared and which are
copied. Pages have 4 positions. There is no prefix cache, unless a test says so.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.runtime.errors import InvalidRequest
from penstock.runtime.requests.request import (
    CacheParams,
    Request,
    StoppingParams,
    output_id,
    output_seed,
    outputs_of,
)
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.plan import PageCopy, PageWrite, Plan, PlanRow, StepResult
from penstock.runtime.scheduling.scheduler import Scheduler
from tests.support.scheduler.scheduling import WORD, commit, dispatch, make

A1, A2, A3 = (output_id("a", i) for i in (1, 2, 3))


def prompt_of(num_prompt: int) -> tuple[int, ...]:
    return tuple(range(100, 100 + num_prompt))


def add(
    scheduler: Scheduler,
    n: int,
    num_prompt: int,
    name: str = "a",
    cache: CacheParams | None = None,
    priority: int = 0,
    **stopping: Any,
) -> None:
    request = Request(
        name,
        prompt_of(num_prompt),
        stopping=StoppingParams(**stopping),
        cache=cache or CacheParams(),
        priority=priority,
    )
    for output in outputs_of(request, n):
        scheduler.add(output, 1)


def step(scheduler: Scheduler, token: int = WORD) -> Plan:
    plan = dispatch(scheduler)
    commit(scheduler, plan, token)
    return plan


def shape(plan: Plan) -> list[tuple[str, int, int]]:
    return [(row.request_id, row.start, row.num_tokens) for row in plan.rows]


def end(scheduler: Scheduler, *names: str) -> None:
    for name in names:
        assert scheduler.abort(name, "", 9) is not None
    scheduler.check()


def test_outputs_differ_in_id_and_seed_and_know_the_first():
    request = Request(
        "a", (1, 2), ResolvedSampling(seed=7), cache=CacheParams(bypass=True), prompt_logprobs=1
    )
    first, second = outputs_of(request, 2)
    assert first == request
    assert (second.request_id, second.fork_of) == (A1, "a")
    assert second.sampling.seed == output_seed(7, 1) != 7
    assert (second.cache, second.prompt_logprobs) == (request.cache, None)
    assert second.prompt_token_ids is request.prompt_token_ids
    with pytest.raises(InvalidRequest, match="prompt_logprobs"):
        Request(A1, (1, 2), prompt_logprobs=0, fork_of="a")


# -- what a fork enters with --


def test_the_last_page_of_a_prompt_that_fills_its_pages_is_copied():
    """The prompt has 8 positions. Each fork computes position 7 again, in a copy of page 1. The first output
    opens page 2.
    """
    scheduler = make()
    add(scheduler, 3, 8)
    plan = step(scheduler)
    assert shape(plan) == [("a", 0, 8)]
    assert plan.page_copies == ()
    plan = step(scheduler)
    assert plan.rows == (
        PlanRow("a", 0, 8, 1, None, samples=True),
        PlanRow(A1, 1, 7, 1, (107,), samples=True),
        PlanRow(A2, 2, 7, 1, (107,), samples=True),
    )
    assert plan.page_copies == (PageCopy(1, 3), PageCopy(1, 4))
    assert plan.page_writes == (
        PageWrite(0, 2, (2,)),
        PageWrite(1, 0, (0, 3)),
        PageWrite(2, 0, (0, 4)),
    )
    assert scheduler.load().pages_used == 5
    plan = step(scheduler)
    assert shape(plan) == [("a", 9, 1), (A1, 8, 1), (A2, 8, 1)]
    assert plan.page_copies == ()
    assert scheduler.load().pages_used == 7


def test_for_a_prompt_one_longer_than_full_pages_nothing_is_copied_and_no_fork_waits():
    """The prompt has 9 positions. A fork shares pages 0 and 1, which this step writes before it reads them,
    and computes one position.
    """
    scheduler = make(max_num_batched_tokens=16)
    add(scheduler, 2, 9)
    plan = step(scheduler)
    assert shape(plan) == [("a", 0, 9), (A1, 8, 1)]
    assert plan.page_copies == ()
    assert [write for write in plan.page_writes if write.slot == 1] == [PageWrite(1, 0, (0, 1, 3))]
    assert scheduler.load().pages_used == 4


def test_for_a_prompt_one_shorter_than_full_pages_two_positions_of_the_copy_are_used():
    scheduler = make(max_num_batched_tokens=16)
    add(scheduler, 2, 11)
    assert shape(step(scheduler)) == [("a", 0, 11)]
    plan = step(scheduler)
    assert shape(plan) == [("a", 11, 1), (A1, 10, 1)]
    assert plan.page_copies == (PageCopy(2, 3),)
    assert [write.pages for write in plan.page_writes if write.slot == 1] == [(0, 1, 3)]


def test_a_prompt_of_one_token_leaves_nothing_to_share():
    scheduler = make()
    add(scheduler, 4, 1)
    plan = step(scheduler)
    assert shape(plan) == [("a", 0, 1), (A1, 0, 1), (A2, 0, 1), (A3, 0, 1)]
    assert plan.page_copies == ()
    assert [write.pages for write in plan.page_writes] == [(0,), (1,), (2,), (3,)]


def test_what_a_fork_did_not_compute_is_reported():
    scheduler = make()
    add(scheduler, 2, 8)
    step(scheduler)
    step(scheduler)
    for name, cached in (("a", 0), (A1, 7)):
        output = scheduler.abort(name, "", 5)
        assert output is not None
        assert output.timing is not None
        assert output.timing.cached_prompt_tokens == cached


# -- who waits --


def test_forks_wait_while_the_prompt_is_computed_and_others_pass():
    scheduler = make(max_num_batched_tokens=6, max_prefill_chunk=4)
    add(scheduler, 2, 10)
    add(scheduler, 1, 2, "other")
    assert shape(step(scheduler)) == [("a", 0, 4), ("other", 0, 2)]
    assert shape(step(scheduler)) == [("other", 2, 1), ("a", 4, 4)]
    assert shape(step(scheduler)) == [("other", 3, 1), ("a", 8, 2)]
    plan = step(scheduler)
    assert shape(plan) == [("a", 10, 1), ("other", 4, 1), (A1, 9, 1)]
    assert plan.page_copies == (PageCopy(2, 5),)  # "other" has pages 3 and 4


def test_a_first_output_of_one_token_is_forked_before_its_end_is_known():
    scheduler = make()
    add(scheduler, 3, 6, max_tokens=1)
    plans = [dispatch(scheduler), dispatch(scheduler)]
    assert shape(plans[1]) == [(A1, 5, 1), (A2, 5, 1)]
    for plan in plans:
        commit(scheduler, plan)
    assert not scheduler.has_work


def test_with_fewer_slots_than_outputs_forks_may_share_any_running_outputs_pages():
    scheduler = make(max_num_seqs=2)
    add(scheduler, 3, 6)
    step(scheduler)
    assert shape(step(scheduler)) == [("a", 6, 1), (A1, 5, 1)]
    end(scheduler, "a")
    plan = step(scheduler)
    assert shape(plan) == [(A1, 6, 1), (A2, 5, 1)]
    assert plan.page_copies == (PageCopy(2, 1),)  # to page 1, which the first output has given back


# -- fallbacks --


@pytest.mark.parametrize("max_num_batched_tokens", [4, 6])
def test_if_the_first_output_ends_the_next_computes_the_prompt_and_the_others_wait(max_num_batched_tokens):
    """With room for 6 tokens beside a chunk of 4, the others have already stepped aside for the first."""
    scheduler = make(max_num_batched_tokens=max_num_batched_tokens, max_prefill_chunk=4)
    add(scheduler, 3, 6)
    assert shape(step(scheduler)) == [("a", 0, 4)]
    end(scheduler, "a")
    assert shape(step(scheduler)) == [(A1, 0, 4)]
    assert shape(step(scheduler)) == [(A1, 4, 2)]
    assert shape(step(scheduler)) == [(A1, 6, 1), (A2, 5, 1)]


def test_a_fork_without_a_source_is_like_any_other_request():
    scheduler = make()
    scheduler.add(outputs_of(Request("a", prompt_of(6)), 2)[1], 1)
    assert shape(step(scheduler)) == [(A1, 0, 6)]


def test_a_request_that_reuses_the_first_outputs_id_is_not_forked():
    scheduler = make(max_num_batched_tokens=16)
    _, fork = outputs_of(Request("a", prompt_of(6)), 2)
    scheduler.add(Request("a", (1, 2, 3, 4, 5, 6)), 1)
    scheduler.add(fork, 1)
    assert shape(step(scheduler)) == [("a", 0, 6), (A1, 0, 6)]


def test_a_preempted_fork_computes_its_own_prompt():
    """Of 4 pages the first output takes the last one for its third, and then the fork needs another."""
    scheduler = make(num_pages=4, max_num_batched_tokens=16)
    add(scheduler, 2, 7)
    step(scheduler)
    assert step(scheduler).page_copies == (PageCopy(1, 2),)
    plan = step(scheduler)  # positions 8 and 7: page 3 for the first
    assert shape(plan) == [("a", 8, 1), (A1, 7, 1)]
    plan = step(scheduler)  # the fork has no page for position 8, and is the last
    assert (shape(plan), plan.preempted) == ([("a", 9, 1)], (A1,))
    end(scheduler, "a")
    plan = step(scheduler)
    assert shape(plan) == [(A1, 0, 9)]
    assert plan.page_copies == ()


def test_a_fork_shares_what_the_window_of_its_first_position_holds():
    """The window is 3, so position 5, the last of the prompt, attends to position 3 and what follows. Page 0
    is kept until the first step after the prompt, and page 1 is copied.
    """
    scheduler = make(sliding_window=3, max_num_batched_tokens=16)
    add(scheduler, 2, 6)
    step(scheduler)
    plan = step(scheduler)
    assert shape(plan) == [("a", 6, 1), (A1, 5, 1)]
    assert plan.page_copies == (PageCopy(1, 2),)


def test_pages_that_left_the_window_are_not_shared():
    """The fork finds no slot while the source still has what position 5 attends to, so it computes all."""
    scheduler = make(sliding_window=3, max_num_batched_tokens=16, max_num_seqs=2)
    add(scheduler, 1, 2, "other")
    add(scheduler, 2, 6)
    for _ in range(4):
        step(scheduler)
    end(scheduler, "other")
    plan = step(scheduler)
    assert shape(plan) == [("a", 9, 1), (A1, 0, 6)]
    assert plan.page_copies == ()


def test_forks_wait_for_a_prompt_that_is_longer_than_the_window():
    """The window is 8 and chunks have 8 tokens. Pages before the window are given back while the prompt is
    computed, and the fork does not need them.
    """
    scheduler = make(
        sliding_window=8, max_num_batched_tokens=32, max_prefill_chunk=8, max_model_len=200, num_pages=40
    )
    add(scheduler, 2, 100)
    for start in range(0, 96, 8):
        assert shape(step(scheduler)) == [("a", start, 8)]
    assert shape(step(scheduler)) == [("a", 96, 4)]
    plan = step(scheduler)
    assert shape(plan) == [("a", 100, 1), (A1, 99, 1)]
    assert len(plan.page_copies) == 1


def test_pages_in_the_window_are_shared():
    scheduler = make(sliding_window=6, max_num_batched_tokens=16)
    add(scheduler, 2, 6)
    step(scheduler)
    assert step(scheduler).page_copies == (PageCopy(1, 2),)


@pytest.mark.parametrize("in_prefill", [False, True])
@pytest.mark.parametrize("flush", [Scheduler.flush_prefix_cache, lambda scheduler: scheduler.use_weights(1)])
def test_pages_of_before_a_flush_or_new_weights_are_not_shared(in_prefill, flush):
    scheduler = make(max_num_batched_tokens=4)
    add(scheduler, 3, 6)
    for _ in range(1 if in_prefill else 2):
        step(scheduler)
    flush(scheduler)
    rest = [("a", 4, 2)] if in_prefill else [("a", 6, 1)]
    first = 4 - rest[0][2]
    assert shape(step(scheduler)) == [*rest, (A1, 0, first)]
    assert shape(step(scheduler)) == [("a", 6 + (not in_prefill), 1), (A1, first, 3)]


# -- beside the prefix cache --


@pytest.mark.parametrize("bypass", [False, True])
def test_forks_share_even_if_they_bypass_the_cache(bypass):
    scheduler = make(prefix_cache_pages=None, max_num_batched_tokens=16)
    add(scheduler, 2, 11, cache=CacheParams(bypass=bypass))
    step(scheduler)
    assert step(scheduler).page_copies == (PageCopy(2, 3),)
    end(scheduler, "a", A1)
    add(scheduler, 1, 11, "later")
    assert shape(step(scheduler)) == [("later", 0, 11) if bypass else ("later", 8, 3)]


def test_a_copy_is_published_once_its_own_tokens_fill_it():
    """The first output makes 7s in page 1, and the fork makes 8s in page 2, which is its copy."""
    scheduler = make(prefix_cache_pages=None, max_num_batched_tokens=16)
    add(scheduler, 2, 6)
    for _ in range(4):  # the fork's positions 5, 6 and 7 are in the last three
        plan = dispatch(scheduler)
        sampled = [(7,) if row.request_id == "a" else (8,) for row in plan.rows]
        scheduler.commit(plan, StepResult(sampled, [()] * len(sampled)), 3)
        scheduler.check()
    for name, token, page in (("sevens", 7, 1), ("eights", 8, 2)):
        scheduler.add(Request(name, (*prompt_of(6), token, token, 5)), 1)
        plan = dispatch(scheduler)
        (slot, _), *_ = plan.new_requests
        assert (name, 8, 1) in shape(plan)
        (write,) = (write for write in plan.page_writes if write.slot == slot)
        assert write.pages[:2] == (0, page)


# -- priorities --


def test_a_fork_of_higher_priority_needs_one_page_only():
    scheduler = make(scheduling_policy="priority", num_pages=6, max_num_batched_tokens=32)
    add(scheduler, 1, 5, "low")
    add(scheduler, 1, 2, "lower")
    step(scheduler)
    add(scheduler, 2, 11, priority=1)
    plan = step(scheduler)
    assert plan.preempted == ()
    assert shape(plan) == [("low", 5, 1), ("lower", 2, 1), ("a", 0, 11)]
    plan = step(scheduler)
    assert shape(plan) == [("a", 11, 1), ("low", 6, 1), (A1, 10, 1)]
    assert plan.preempted == ("lower",)
