"""Which requests and which configurations the scheduler accepts, and what its audit notices."""

from __future__ import annotations

import pytest

from penstock.runtime.errors import (
    ConfigError,
    DuplicateRequestId,
    ExceedsKVCapacity,
    PromptTooLong,
    QueueFull,
)
from penstock.runtime.scheduling.plan import StepResult
from penstock.runtime.scheduling.scheduler import Load, Scheduler
from penstock.runtime.scheduling.sequence import PageTable
from tests.support.scheduler.scheduling import LIMITS, add, commit, dispatch, make


def step(scheduler: Scheduler) -> None:
    commit(scheduler, dispatch(scheduler))


def test_prompts_must_leave_room_for_one_token():
    scheduler = make(max_model_len=8)
    add(scheduler, "fits", 7)
    with pytest.raises(PromptTooLong, match="8 tokens; at most 7"):
        add(scheduler, "long", 8)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "needed"),
    [
        (4, 5, None),  # 9 tokens, of which the last needs no KV: all 8 positions
        (4, 6, 9),
        (8, 1, None),
        (9, 1, 9),
        (8, None, None),
        (9, None, 9),
    ],
)
def test_a_request_that_could_never_fit_is_refused(num_prompt, max_tokens, needed):
    scheduler = make(num_pages=2)  # 8 positions
    if needed is None:
        add(scheduler, "a", num_prompt, max_tokens=max_tokens)
    else:
        with pytest.raises(ExceedsKVCapacity) as caught:
            add(scheduler, "a", num_prompt, max_tokens=max_tokens)
        assert (caught.value.needed_tokens, caught.value.capacity_tokens) == (needed, 8)


def test_max_tokens_beyond_the_context_need_no_pages_beyond_it():
    add(make(num_pages=2, max_model_len=9), "a", 4, max_tokens=1000)
    with pytest.raises(ExceedsKVCapacity):
        add(make(num_pages=2, max_model_len=10), "a", 4, max_tokens=1000)


def test_an_id_is_unique_while_it_is_active():
    scheduler = make()
    add(scheduler, "a", 1)
    with pytest.raises(DuplicateRequestId):
        add(scheduler, "a", 1)
    step(scheduler)
    with pytest.raises(DuplicateRequestId):
        add(scheduler, "a", 1)
    scheduler.abort("a", "", 3)
    add(scheduler, "a", 1)


def test_only_waiting_requests_fill_the_queue():
    scheduler = make(max_queued_requests=2)
    add(scheduler, "a", 1)
    add(scheduler, "b", 1)
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        add(scheduler, "c", 1)
    step(scheduler)
    add(scheduler, "c", 1)
    assert scheduler.load() == Load(
        num_running=2, num_waiting=1, waiting_prompt_tokens=1, pages_used=2, pages_cached=0, pages_total=16
    )


def test_a_plan_is_committed_once_with_one_result_for_each_row():
    scheduler = make()
    add(scheduler, "a", 1)
    plan = dispatch(scheduler)
    commit(scheduler, plan)
    with pytest.raises(KeyError):
        commit(scheduler, plan)
    plan = dispatch(scheduler)
    with pytest.raises(ValueError, match="zip"):
        scheduler.commit(plan, StepResult([], []), 3)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"scheduling_policy": "lifo"}, "scheduling_policy must be one of fcfs, priority, not 'lifo'"),
        ({"prefix_cache_pages": -1}, "prefix_cache_pages must be at least 0, not -1"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, not 0"),
    ],
)
def test_options_are_refused_by_name(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make(**options)


@pytest.mark.parametrize("name", sorted(LIMITS.keys() - {"eos_token_ids"} | {"max_prefill_chunk"}))
def test_limits_are_refused_by_name(name):
    least = 2 if name == "max_model_len" else 1
    with pytest.raises(ConfigError, match=f"{name} must be at least {least}, not {least - 1}"):
        make(**{name: least - 1})
    smallest = {"max_num_seqs": 1, name: least}
    assert getattr(make(**smallest).config, name) == least


def test_every_wrong_limit_is_listed():
    with pytest.raises(ConfigError) as caught:
        make(page_size=0, num_pages=-1, max_num_batched_tokens=3)
    message = str(caught.value)
    assert "page_size must be at least 1, not 0; num_pages must be at least 1, not -1" in message
    assert "max_num_batched_tokens, 3, must be at least max_num_seqs, 4" in message


def aside(waiting, event):
    """Return the first in line, marked as if it had stepped aside, but still in line."""
    waiting.first().awaits = event
    return waiting.first()


DAMAGES = {
    "not all the active ones": lambda r: r.running.append(r.waiting.first()),
    "has no slot": lambda r: setattr(r.running[0], "slot", None),
    "not each slot once": lambda r: setattr(r.running[0], "slot", 1),
    "the running are not in order of rank": lambda r: r.running.reverse(),
    "a line is not in order of rank": lambda r: r.waiting._new.reverse(),
    "the waiting prompts' tokens drifted": lambda r: setattr(r.waiting, "prompt_tokens", 0),
    "whose requests have started drifted": lambda r: setattr(r.waiting, "num_started", 1),
    "a has started: True, not {False}": lambda r: setattr(r.running[0], "has_started", False),
    "2 should wait, each once, not 3": lambda r: r.waiting._aside.update({b"": [aside(r.waiting, b"")]}),
    "c awaits what will not happen": lambda r: r.waiting.step_aside(r.waiting.first(), r.running[0]),
    "d awaits what nobody promised": lambda r: r.waiting.step_aside(list(r.waiting)[1], b"key"),
    "among the running": lambda r: setattr(r.running[0], "status", r.waiting.first().status),
    "a computed too far": lambda r: setattr(r.running[0], "num_computed", 4),
    "a computed beyond its limit": lambda r: setattr(r.running[0], "max_computed", 1),
    "prefills beyond its tokens": lambda r: setattr(r.running[0], "prefill_until", 4),
    "computed beyond its pages": lambda r: setattr(r.running[0], "covered", 1),
    "among the waiting": lambda r: setattr(r.waiting.first(), "status", r.running[0].status),
    "c waits but holds pages or a slot": lambda r: setattr(r.waiting.first(), "slot", 3),
    "d waits but holds pages or a slot": lambda r: setattr(list(r.waiting)[1], "tables", (PageTable([5]),)),
    "has computed positions": lambda r: setattr(r.waiting.first(), "num_computed", 1),
    "c waits but publishes pages": lambda r: setattr(r.waiting.first().sharing, "publish_at", 4),
    "is not 16 pages": lambda r: r.running[0].tables[0].pages.extend([9]),
}


@pytest.mark.parametrize("complaint", sorted(DAMAGES))
def test_the_audit_notices(complaint):
    scheduler = make(max_num_seqs=2)
    for name in "abcd":
        add(scheduler, name, 2)
    step(scheduler)
    DAMAGES[complaint](scheduler.roster)
    with pytest.raises(AssertionError, match=complaint):
        scheduler.check()
