"""Windows of several decode steps, computed by hand: when there is one, how long it is, and which of its
results are dropped.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.runtime.requests.request import Finish, FinishReason, Request, StepOutput, TokenLogprobs
from penstock.runtime.scheduling.plan import Plan, StepResult
from penstock.runtime.scheduling.scheduler import Scheduler
from tests.support.scheduler.fake_runner import Rota
from tests.support.scheduler.scheduling import EOS, WORD, add, commit, dispatch, make

SECOND = 10**9


def started(*requests: dict[str, Any], **limits: Any) -> Scheduler:
    """Make a scheduler with requests "a", "b", ... of 3 prompt tokens, which have made one token each."""
    scheduler = make(**({"max_num_batched_tokens": 16} | limits))
    for name, options in zip("abcd", requests, strict=False):
        add(scheduler, name, **options)
    commit(scheduler, dispatch(scheduler))
    return scheduler


def window(plan: Plan) -> tuple[int, list[tuple[str, int, int]]]:
    return plan.num_steps, [(row.request_id, row.start, row.max_samples) for row in plan.rows]


def give(scheduler: Scheduler, plan: Plan, *tokens: tuple[int, ...], now_ns: int = 3) -> list[StepOutput]:
    outputs = scheduler.commit(plan, StepResult(tokens, [()] * len(tokens)), now_ns)
    scheduler.check()
    return outputs


def test_a_window_gives_each_row_its_tokens_at_once_and_the_next_one_follows_on():
    scheduler = started({}, {})
    first = dispatch(scheduler, max_steps=4)
    second = dispatch(scheduler, max_steps=4)
    assert window(first) == (4, [("a", 3, 4), ("b", 3, 4)])
    assert window(second) == (4, [("a", 7, 4), ("b", 7, 4)])
    assert give(scheduler, first, (1 + WORD,) * 4, (2 + WORD,) * 4) == [
        StepOutput("a", (1 + WORD,) * 4),
        StepOutput("b", (2 + WORD,) * 4),
    ]


def test_a_row_has_no_more_samples_than_tokens_it_may_make():
    scheduler = started({"max_tokens": 3}, {"max_tokens": 6})
    plan = dispatch(scheduler, max_steps=8)
    assert window(plan) == (5, [("a", 3, 2), ("b", 3, 5)])
    assert scheduler.schedule(2, max_steps=8) is None  # both will have ended
    outputs = give(scheduler, plan, (7, 8), (7, 8, 9, 10, 11))
    assert [output.finish for output in outputs] == [Finish(FinishReason.MAX_TOKENS)] * 2


def test_pages_for_the_whole_window_are_reserved_first():
    scheduler = started({})
    plan = dispatch(scheduler, max_steps=8)  # positions 3 to 10; the first page has 0 to 3
    assert [(write.first_index, write.pages) for write in plan.page_writes] == [(1, (1, 2))]


def test_a_window_is_shortened_rather_than_preempt():
    scheduler = started({}, {}, num_pages=4, max_model_len=16)
    plan = dispatch(scheduler, max_steps=8)  # 2 pages are free: each row has room for positions 3 to 7
    assert window(plan) == (5, [("a", 3, 5), ("b", 3, 5)])
    commit(scheduler, plan)
    plan = dispatch(scheduler, max_steps=8)  # no page is free, and both rows need one
    assert (window(plan), plan.preempted) == ((1, [("a", 8, 1)]), ("b",))


@pytest.mark.parametrize("event", ["arrives", "prefills", "constrained"])
def test_no_window_while_there_is_something_else_to_do(event):
    scheduler = started({})
    if event == "constrained":
        scheduler.add(Request("b", (1, 2), constraint=Rota(9)), 1)
        commit(scheduler, dispatch(scheduler), 10)
    else:
        add(scheduler, "b", num_prompt=3 if event == "arrives" else 30)
        if event == "prefills":
            commit(scheduler, dispatch(scheduler))
    plan = dispatch(scheduler, max_steps=8)
    assert plan.num_steps == 1
    assert [row.request_id for row in plan.rows] == ["a", "b"]


def beside_a_constraint(*requests: dict[str, Any], **limits: Any) -> Scheduler:
    """Return `started`, and a request "c" that decodes under a constraint."""
    scheduler = started(*requests, **limits)
    scheduler.add(Request("c", (1, 2), constraint=Rota(20)), 1)
    commit(scheduler, dispatch(scheduler), 10)
    return scheduler


def test_rows_under_a_constraint_have_steps_of_their_own_between_the_windows_of_the_others():
    scheduler = beside_a_constraint({}, {})
    plans = [dispatch(scheduler, max_steps=4, apart_steps=6) for _ in range(5)]
    assert [(plan.num_steps, [row.request_id for row in plan.rows]) for plan in plans] == [
        (4, ["a", "b"]),
        (2, ["a", "b"]),
        (1, ["c"]),
        (4, ["a", "b"]),
        (2, ["a", "b"]),
    ]
    assert [plan.apart for plan in plans] == [False, False, True, False, False]
    assert [row.start for plan in plans for row in plan.rows if row.request_id == "a"] == [4, 8, 10, 14]


@pytest.mark.parametrize("reason", ["arrives", "no pages", "nobody else", "together"])
def test_all_rows_step_together_if_there_can_be_no_window(reason):
    limits = {"no pages": {"num_pages": 4, "max_model_len": 16}}.get(reason, {})
    requests: list[dict[str, Any]] = [{"max_tokens": 2} if reason == "nobody else" else {}]
    scheduler = beside_a_constraint(*requests, **limits)
    if reason == "no pages":  # "a" has room for one more token, and "c" for two
        for token in (10, 11, 11):
            commit(scheduler, dispatch(scheduler), token)
    if reason == "arrives":
        add(scheduler, "b")
    plan = dispatch(scheduler, max_steps=4, apart_steps=0 if reason == "together" else 4)
    assert (plan.num_steps, plan.apart) == (1, False)
    assert "c" in [row.request_id for row in plan.rows]


def test_there_is_a_window_while_only_requests_that_cannot_enter_wait():
    scheduler = started({}, max_num_seqs=1)
    add(scheduler, "b")
    assert dispatch(scheduler, max_steps=4).num_steps == 4
    scheduler = started({})
    add(scheduler, "b")
    assert dispatch(scheduler, max_steps=4, admit=False).num_steps == 4


def test_banned_samples_are_counted_over_the_window():
    scheduler = started({"min_tokens": 4}, {})
    plan = dispatch(scheduler, max_steps=8)
    assert [(row.bans, row.max_samples) for row in plan.rows] == [(3, 8), (0, 8)]
    # The first four tokens do not end "a", the fifth does, and what follows it does not count.
    (a, b) = give(scheduler, plan, (EOS, EOS, EOS, EOS), (7,) * 8)
    assert (a.token_ids, a.finish) == ((EOS,) * 4, Finish(FinishReason.EOS, token_id=EOS))
    assert (len(b.token_ids), b.finish) == (8, None)


@pytest.mark.parametrize("token", [EOS, 5])
def test_a_row_that_ended_early_is_cut_after_its_end(token):
    scheduler = started({"stop_token_ids": (5,)})
    scheduler.roster.running[0].request = Request("a", (1,), logprobs=0)
    plan, ahead = dispatch(scheduler, max_steps=4), dispatch(scheduler, max_steps=4)
    values = [TokenLogprobs(-float(i)) for i in range(4)]
    result = StepResult([(WORD, token, WORD, WORD)], [values])
    (output,) = scheduler.commit(plan, result, 3)
    assert (output.token_ids, output.logprobs) == ((WORD, token), tuple(values[:2]))
    assert output.finish is not None
    assert give(scheduler, ahead, (1, 2, 3, 4)) == []
    assert scheduler.load().pages_used == 0


def test_an_abort_while_a_window_is_in_flight_drops_all_of_it():
    scheduler = started({}, {})
    plan = dispatch(scheduler, max_steps=4)
    scheduler.abort("a", "", 3)
    assert [output.request_id for output in give(scheduler, plan, (1,) * 4, (2,) * 4)] == ["b"]


def test_all_tokens_of_a_window_that_ran_into_the_time_limit_are_kept():
    scheduler = started({"time_limit_s": 1.0})
    plan = dispatch(scheduler, max_steps=4)
    (output,) = give(scheduler, plan, (7, 7, 7, 7), now_ns=9 * SECOND)
    assert (output.token_ids, output.finish) == ((7,) * 4, Finish(FinishReason.TIME_LIMIT))


def test_a_row_that_goes_on_must_have_all_its_samples():
    scheduler = started({})
    plan = dispatch(scheduler, max_steps=4)
    with pytest.raises(RuntimeError, match="a goes on with 3 of 4 samples"):
        scheduler.commit(plan, StepResult([(7, 7, 7)], [()]), 3)


def test_a_request_preempted_with_a_window_in_flight_comes_back_with_its_tokens():
    scheduler = started({})
    plan = dispatch(scheduler, max_steps=4)
    scheduler.preempt_all()
    assert scheduler.schedule(3, max_steps=4) is None
    give(scheduler, plan, (11, 12, 13, 14))
    assert dispatch(scheduler).rows[0].token_ids == (100, 101, 102, WORD, 11, 12, 13, 14)


def test_windows_have_the_lengths_that_programs_have():
    """The longest of these lengths that fits is chosen, so that no program runs steps that are not wanted."""
    scheduler = started({"max_tokens": 12}, window_steps=(1, 2, 4, 8))
    lengths = [dispatch(scheduler, max_steps=most).num_steps for most in (7, 3, 8, 8)]
    assert lengths == [4, 2, 4, 1]  # 11 tokens are left; after two windows 5, and at last 1
