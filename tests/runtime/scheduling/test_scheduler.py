"""Plans computed by hand: chunks, order, page boundaries, slots, preemption and resumption."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.runtime.errors import NonFiniteLogits
from penstock.runtime.requests.request import (
    Finish,
    FinishReason,
    Request,
    StepOutput,
    TokenLogprobs,
    outputs_of,
)
from penstock.runtime.scheduling.plan import PageWrite, Plan, PlanRow, StepResult
from penstock.runtime.scheduling.prefills import LEAST_TOKENS
from penstock.runtime.scheduling.scheduler import Load, Scheduler
from tests.support.scheduler.fake_runner import Rota
from tests.support.scheduler.scheduling import EOS, WORD, add, commit, dispatch, make


def step(scheduler: Scheduler, token: int = 9) -> Plan:
    plan = dispatch(scheduler)
    commit(scheduler, plan, token)
    return plan


def add_prompt(scheduler: Scheduler, name: str, num_prompt: int) -> tuple[int, ...]:
    add(scheduler, name, num_prompt)
    return tuple(range(100, 100 + num_prompt))


def shape(plan: Plan) -> list[tuple[str, int, int]]:
    return [(row.request_id, row.start, row.num_tokens) for row in plan.rows]


def test_an_idle_scheduler_has_no_plan():
    scheduler = make()
    assert not scheduler.has_work
    assert scheduler.schedule(1) is None


def test_a_prompt_is_cut_into_chunks_by_the_budget_and_only_the_last_one_samples():
    scheduler = make(max_num_batched_tokens=4)
    prompt = add_prompt(scheduler, "a", 10)
    assert step(scheduler).rows == (PlanRow("a", 0, 0, 4, prompt[:4], samples=False),)
    assert step(scheduler).rows == (PlanRow("a", 0, 4, 4, prompt[4:8], samples=False),)
    assert step(scheduler).rows == (PlanRow("a", 0, 8, 2, prompt[8:], samples=True),)
    assert step(scheduler).rows == (PlanRow("a", 0, 10, 1, None, samples=True),)
    assert step(scheduler).rows == (PlanRow("a", 0, 11, 1, None, samples=True),)


def test_a_last_chunk_of_one_token_brings_its_token_unlike_a_decode():
    scheduler = make(max_num_batched_tokens=4)
    prompt = add_prompt(scheduler, "a", 5)
    step(scheduler)
    assert step(scheduler).rows == (PlanRow("a", 0, 4, 1, prompt[4:], samples=True),)
    assert step(scheduler).rows == (PlanRow("a", 0, 5, 1, None, samples=True),)


def test_a_chunk_that_does_not_sample_makes_no_output():
    scheduler = make(max_num_batched_tokens=4)
    add(scheduler, "a", 5)
    assert commit(scheduler, dispatch(scheduler)) == []
    assert commit(scheduler, dispatch(scheduler)) == [StepOutput("a", (9,))]


def test_decodes_come_first_then_prefills_underway_then_arrivals_each_in_order():
    scheduler = make(max_num_batched_tokens=6)
    add(scheduler, "a", 2)
    add(scheduler, "b", 9)
    add(scheduler, "c", 4)
    assert shape(step(scheduler)) == [("a", 0, 2), ("b", 0, 4)]
    assert shape(step(scheduler)) == [("a", 2, 1), ("b", 4, 5)]
    assert shape(step(scheduler)) == [("a", 3, 1), ("b", 9, 1), ("c", 0, 4)]
    assert shape(step(scheduler)) == [("a", 4, 1), ("b", 10, 1), ("c", 4, 1)]


def test_several_prefills_underway_share_the_rest_in_order():
    scheduler = make(max_num_batched_tokens=6)
    add(scheduler, "a", 1)
    add(scheduler, "b", 1)
    add(scheduler, "c", 6)
    assert shape(step(scheduler)) == [("a", 0, 1), ("b", 0, 1), ("c", 0, 4)]
    add(scheduler, "d", 9)
    assert shape(step(scheduler)) == [("a", 1, 1), ("b", 1, 1), ("c", 4, 2), ("d", 0, 2)]
    add(scheduler, "e", 1)
    assert shape(step(scheduler)) == [("a", 2, 1), ("b", 2, 1), ("c", 6, 1), ("d", 2, 3)]


def test_decodes_may_use_up_the_budget_but_never_starve_a_prefill():
    scheduler = make(max_num_seqs=3, max_num_batched_tokens=3)
    for name in "abc":
        add(scheduler, name, 2)
    step(scheduler)
    step(scheduler)
    assert shape(step(scheduler)) == [("a", 3, 1), ("b", 2, 1), ("c", 1, 1)]


def test_a_chunk_may_be_limited_below_the_budget_so_that_several_prefills_share_a_step():
    scheduler = make(max_num_batched_tokens=8, max_prefill_chunk=3)
    for name, num_prompt in (("a", 7), ("b", 3), ("c", 4)):
        add(scheduler, name, num_prompt)
    assert shape(step(scheduler)) == [("a", 0, 3), ("b", 0, 3), ("c", 0, 2)]
    assert shape(step(scheduler)) == [("b", 3, 1), ("a", 3, 3), ("c", 2, 2)]
    assert shape(step(scheduler)) == [("b", 4, 1), ("c", 4, 1), ("a", 6, 1)]


def test_prompts_may_have_a_smaller_budget_beside_decodes():
    scheduler = make(max_num_batched_tokens=16, max_model_len=64)
    add(scheduler, "a", 2)
    add(scheduler, "b", 40)
    plan = dispatch(scheduler, prefill_budget=3)
    assert shape(plan) == [("a", 0, 2), ("b", 0, 14)]  # no row decodes yet
    for start in (14, 17):
        plan = dispatch(scheduler, prefill_budget=3)
        assert shape(plan)[1:] == [("b", start, 3)]
    assert shape(dispatch(scheduler, prefill_budget=0))[1:] == [("b", 20, 1)]  # at least one token
    assert shape(dispatch(scheduler, prefill_budget=100))[1:] == [("b", 21, 15)]


def test_many_prompts_at_once_have_a_larger_budget_beside_decodes():
    scheduler = make(max_num_batched_tokens=40, max_model_len=64, max_num_seqs=10, num_pages=200)
    add(scheduler, "a", 2)
    dispatch(scheduler)
    for i in range(12):  # 9 of which have slots
        add(scheduler, f"b{i}", 30)
    assert shape(dispatch(scheduler, prefill_budget=4)) == [("a", 2, 1), ("b0", 0, 12)]
    for i in range(8):
        scheduler.abort(f"b{i + 1}", "", 1)  # "b9" to "b11" are left beside "b0"
    assert shape(dispatch(scheduler, prefill_budget=4)) == [("a", 3, 1), ("b0", 12, 8)]


@pytest.mark.parametrize("kind", ["forks", "prefix", "no pages", "not admitted"])
def test_requests_that_cannot_enter_do_not_enlarge_the_budget(kind):
    """Sixteen such requests wait beside one prompt, whose budget must stay that of a single prompt. Each of
    them is looked at once before.
    """
    scheduler = make(
        max_num_batched_tokens=256, max_model_len=4096, max_num_seqs=32,
        num_pages=1010 if kind == "no pages" else 4000,
        prefix_cache_pages=None if kind == "prefix" else 0,
    )  # fmt: skip
    add(scheduler, "decodes", 2)
    step(scheduler)
    request = Request("long", tuple(range(3900)))
    for output in outputs_of(request, 16 if kind == "forks" else 1):
        scheduler.add(output, 1)
    dispatch(scheduler, prefill_budget=8)
    if kind == "no pages":
        for i in range(16):
            scheduler.add(Request(f"blocked{i}", tuple(range(300 + i))), 1)
    elif kind != "forks":
        for i in range(16):
            scheduler.add(dataclasses.replace(request, request_id=f"sharer{i}"), 1)
    admit = kind != "not admitted"
    if admit:
        dispatch(scheduler, prefill_budget=8)
    for _ in range(3):
        assert shape(dispatch(scheduler, admit=admit, prefill_budget=8))[1][2] == 8


def test_if_steps_are_padded_a_smaller_budget_pads_nothing():
    scheduler = make(
        max_num_batched_tokens=128, max_model_len=999, num_pages=250, step_sizes=(8, 32, 64, 128)
    )
    add(scheduler, "a", 2)
    add(scheduler, "b", 900)
    dispatch(scheduler)
    for budget, num_tokens in ((16, 31), (31, 31), (50, 31), (63, 63), (126, 63), (127, 127)):
        plan = dispatch(scheduler, prefill_budget=budget)
        assert [row.num_tokens for row in plan.rows] == [1, num_tokens]


def test_if_steps_are_padded_prompts_have_enough_tokens_to_be_measured():
    """There are 16 tokens beside 10 decodes. The next smaller step would leave 6 of them, too few to measure
    a pace.
    """
    scheduler = make(
        max_num_batched_tokens=64, max_model_len=999, num_pages=300, max_num_seqs=11, step_sizes=(16, 32, 64)
    )
    for i in range(10):
        add(scheduler, f"a{i}", 2)
    add(scheduler, "b", 900)
    dispatch(scheduler)
    assert shape(dispatch(scheduler, prefill_budget=LEAST_TOKENS))[10][2] == 22


def test_a_long_prompt_leaves_a_part_of_each_step_to_those_behind_it():
    scheduler = make(max_num_batched_tokens=32, max_model_len=900, num_pages=600, max_num_seqs=5)
    add(scheduler, "long", 600)
    assert shape(step(scheduler)) == [("long", 0, 32)]
    add(scheduler, "longer", 800)
    add(scheduler, "a", 5)
    add(scheduler, "b", 9)
    add(scheduler, "c", 9)
    assert shape(step(scheduler)) == [("long", 32, 24), ("longer", 0, 1), ("a", 0, 5), ("b", 0, 2)]
    # A quarter of a step's 31 tokens beside "a", which is 7, is for the others.
    assert shape(step(scheduler))[1:] == [("long", 56, 24), ("longer", 1, 1), ("b", 2, 6)]
    assert shape(step(scheduler))[1:] == [("long", 80, 24), ("longer", 2, 1), ("b", 8, 1), ("c", 0, 5)]
    assert shape(step(scheduler))[2:] == [("long", 104, 25), ("longer", 3, 1), ("c", 5, 4)]


def test_pages_are_written_at_entry_for_the_whole_prompt_and_then_at_each_boundary():
    scheduler = make(max_num_batched_tokens=6)
    add(scheduler, "a", 8)
    assert step(scheduler).page_writes == (PageWrite(0, 0, (0, 1)),)  # 8 positions, 2 pages
    assert step(scheduler).page_writes == ()  # the rest of the prefill
    assert step(scheduler).page_writes == (PageWrite(0, 2, (2,)),)  # position 8 opens the third page
    for _ in range(3):
        assert step(scheduler).page_writes == ()  # positions 9, 10, 11
    assert step(scheduler).page_writes == (PageWrite(0, 3, (3,)),)  # position 12


def test_no_request_overtakes_a_large_one_that_waits_for_pages():
    scheduler = make(num_pages=4, max_num_batched_tokens=16)
    add(scheduler, "a", 8, max_tokens=3)
    step(scheduler)
    add(scheduler, "large", 9)  # 3 pages; 2 are free
    add(scheduler, "small", 1)
    assert shape(step(scheduler)) == [("a", 8, 1)]
    assert scheduler.load().num_waiting == 2
    assert shape(step(scheduler)) == [("a", 9, 1)]  # its third token, the last
    assert shape(step(scheduler)) == [("large", 0, 9), ("small", 0, 1)]


def test_entry_needs_a_slot_and_takes_the_lowest():
    scheduler = make(max_num_seqs=3, max_num_batched_tokens=16)
    for name in "abcd":
        add(scheduler, name, 1)
    plan = step(scheduler)
    assert [(row.request_id, row.slot) for row in plan.rows] == [("a", 0), ("b", 1), ("c", 2)]
    assert [(slot, request.request_id) for slot, request in plan.new_requests] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
    ]
    for name in ("c", "a"):
        scheduler.abort(name, "", 3)
    plan = step(scheduler)
    assert [(row.request_id, row.slot) for row in plan.rows] == [("b", 1), ("d", 0)]
    assert [(slot, request.request_id) for slot, request in plan.new_requests] == [(0, "d")]


def test_a_decode_without_a_page_preempts_the_latest_arrival_which_resumes_with_its_tokens():
    scheduler = make(num_pages=4, page_size=2, max_num_batched_tokens=16)
    add(scheduler, "a", 3)  # pages 0 and 1
    prompt = add_prompt(scheduler, "b", 3)  # pages 2 and 3
    step(scheduler, token=11)
    assert shape(step(scheduler, token=12)) == [("a", 3, 1), ("b", 3, 1)]  # both full now
    add(scheduler, "c", 1)
    plan = step(scheduler, token=13)
    assert plan.preempted == ("b",)
    assert shape(plan) == [
        ("a", 4, 1)
    ]  # "b" is out, and "c" does not slip in though a page and slots are free
    assert plan.page_writes == (PageWrite(0, 2, (2,)),)  # "b" gave up pages 2 and 3
    assert scheduler.active_ids() == ("a", "b", "c")
    assert scheduler.load() == Load(
        num_running=1, num_waiting=2, waiting_prompt_tokens=3 + 1, pages_used=3, pages_cached=0, pages_total=4
    )
    assert shape(step(scheduler, token=14)) == [("a", 5, 1)]  # "b" needs 3 pages for its 5 tokens; 1 is free
    scheduler.abort("a", "", 3)
    plan = step(scheduler, token=15)
    resumed = PlanRow("b", 0, 0, 5, (*prompt, 11, 12), samples=True)
    assert plan.rows[0] == resumed
    assert [request.request_id for _, request in plan.new_requests] == ["b", "c"]
    assert step(scheduler).rows[0] == PlanRow("b", 0, 5, 1, None, samples=True)
    assert scheduler.totals().preemptions == 1


def test_a_decode_that_is_the_latest_arrival_itself_gives_way():
    scheduler = make(num_pages=4, page_size=2, max_num_batched_tokens=16)
    add(scheduler, "a", 3)
    add(scheduler, "b", 4)
    step(scheduler)
    plan = step(scheduler)  # "a" has room for position 3, "b" has none for position 4
    assert (shape(plan), plan.preempted) == ([("a", 3, 1)], ("b",))
    assert scheduler.load().pages_used == 2


def test_a_resumed_request_needs_pages_for_what_it_has_generated_too():
    scheduler = make(num_pages=3, page_size=2)
    add(scheduler, "a", 2)
    add(scheduler, "b", 2)
    step(scheduler)
    assert step(scheduler).preempted == ("b",)  # "a" took the last page
    assert (
        scheduler.load().pages_used == 2
    )  # one is free, enough for the prompt of "b" but not for its 3 tokens
    assert shape(step(scheduler)) == [("a", 3, 1)]


def test_a_victim_may_be_halfway_through_its_prefill():
    scheduler = make(num_pages=4, page_size=2, max_num_batched_tokens=5)
    add(scheduler, "a", 4)
    add(scheduler, "b", 4)
    assert shape(step(scheduler)) == [("a", 0, 4), ("b", 0, 1)]
    plan = step(scheduler)
    assert (shape(plan), plan.preempted) == ([("a", 4, 1)], ("b",))
    scheduler.abort("a", "", 3)
    assert shape(step(scheduler)) == [("b", 0, 4)]  # it begins anew


def test_a_decode_does_not_give_way_while_a_step_in_flight_may_free_pages():
    scheduler = make(num_pages=2, page_size=2)
    add(scheduler, "a", 2, max_tokens=1)
    first = dispatch(scheduler)
    add(scheduler, "b", 2, max_tokens=3)
    step(scheduler)
    assert scheduler.schedule(2) is None  # "b" needs a third page
    commit(scheduler, first)  # ends "a"
    assert step(scheduler).rows == (PlanRow("b", 1, 2, 1, None, samples=True),)
    assert scheduler.totals().preemptions == 0


def test_a_resumed_request_is_chunked_like_any_other():
    scheduler = make(max_num_batched_tokens=4)
    prompt = add_prompt(scheduler, "a", 3)
    for token in (11, 12, 13):
        step(scheduler, token)
    assert scheduler.preempt_all() == ("a",)
    assert step(scheduler).rows == (PlanRow("a", 0, 0, 4, (*prompt, 11), samples=False),)
    assert step(scheduler, 14).rows == (PlanRow("a", 0, 4, 2, (12, 13), samples=True),)
    assert step(scheduler).rows == (PlanRow("a", 0, 6, 1, None, samples=True),)


def test_preempt_all_keeps_the_order_of_arrival():
    scheduler = make(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 1)
    step(scheduler)
    assert scheduler.preempt_all() == ("a", "b")
    scheduler.check()
    assert scheduler.active_ids() == ("a", "b", "c")
    assert scheduler.load() == dataclasses.replace(Load.idle(16), num_waiting=3, waiting_prompt_tokens=3)
    assert scheduler.totals().preemptions == 2
    assert shape(step(scheduler)) == [("a", 0, 2), ("b", 0, 2)]


def test_running_requests_go_on_while_none_is_admitted():
    scheduler = make()
    add(scheduler, "a", 1)
    assert scheduler.schedule(1, admit=False) is None
    step(scheduler)
    add(scheduler, "b", 1)
    plan = dispatch(scheduler, admit=False)
    assert shape(plan) == [("a", 1, 1)]
    commit(scheduler, plan)
    assert shape(dispatch(scheduler)) == [("a", 2, 1), ("b", 0, 1)]


def test_a_decode_goes_on_while_its_token_is_in_flight():
    """Its input is on the device. Only a sequence that will have ended by then gets no further row."""
    scheduler = make()
    add(scheduler, "a", 2)
    add(scheduler, "b", 2, max_tokens=2)
    plans = [dispatch(scheduler) for _ in range(2)]
    assert [shape(plan) for plan in plans] == [[("a", 0, 2), ("b", 0, 2)], [("a", 2, 1), ("b", 2, 1)]]
    assert [output.token_ids for output in commit(scheduler, plans[0], 7)] == [(7,), (7,)]
    plans.append(dispatch(scheduler))
    assert shape(plans[2]) == [("a", 3, 1)]
    assert [output.last for output in commit(scheduler, plans[1], 8)] == [False, True]
    assert [output.request_id for output in commit(scheduler, plans[2], 9)] == ["a"]


def test_a_row_dispatched_past_the_end_is_dropped():
    scheduler = make()
    add(scheduler, "a", 2)
    add(scheduler, "b", 2)
    plans = [dispatch(scheduler) for _ in range(2)]
    (ended, other) = scheduler.commit(plans[0], StepResult([(EOS,), (WORD,)], [(), ()]), 3)
    assert (ended.last, other.last) == (True, False)
    assert scheduler.load().pages_used == 1
    assert commit(scheduler, plans[1]) == [StepOutput("b", (WORD,))]


def test_a_constraint_gets_each_token_once_and_its_completion_ends_the_request():
    scheduler = make()
    rota = Rota(2)
    scheduler.add(Request("a", (100, 101), constraint=rota), 1)
    plans = [dispatch(scheduler, max_steps=8) for _ in range(3)]
    assert [plan.num_steps for plan in plans] == [1, 1, 1]
    assert commit(scheduler, plans[0], 10) == [StepOutput("a", (10,))]
    (ended,) = commit(scheduler, plans[1], 13)
    assert ended.finish == Finish(FinishReason.EOS)
    assert rota.accepted == [10, 13]
    assert commit(scheduler, plans[2]) == []
    assert scheduler.load().pages_used == 0


def test_a_row_that_cannot_go_on_ends_with_its_error_and_the_others_go_on():
    scheduler = make()
    add(scheduler, "a", 2)
    add(scheduler, "b", 2)
    error = NonFiniteLogits()
    failed, other = scheduler.commit(
        dispatch(scheduler), StepResult([(), (WORD,)], [(), ()], errors={0: error}), 3
    )
    assert (failed.error, failed.finish, failed.token_ids) == (error, None, ())
    assert (other.request_id, other.token_ids, other.last) == ("b", (WORD,), False)
    assert scheduler.active_ids() == ("b",)


@pytest.mark.parametrize("cached_pages", [None, 0])
def test_log_probabilities_of_the_prompt_come_with_the_first_token_whatever_the_chunks(cached_pages):
    scheduler = make(max_num_batched_tokens=4, prefix_cache_pages=cached_pages)
    known = [TokenLogprobs(-float(i)) for i in range(1, 7)]
    scheduler.add(Request("a", tuple(range(100, 107)), prompt_logprobs=0), 1)
    first = dispatch(scheduler)
    scheduler.commit(first, StepResult([()], [()], prompt_logprobs={0: known[:4]}), 2)
    scheduler.preempt_all()
    again = dispatch(scheduler)
    if cached_pages == 0:  # without a cache all of them are computed again
        assert again.rows[0].start == 0
        scheduler.commit(again, StepResult([()], [()], prompt_logprobs={0: known[:4]}), 3)
        again = dispatch(scheduler)
    assert again.rows[0].start == 4
    (output,) = scheduler.commit(again, StepResult([(WORD,)], [()], prompt_logprobs={0: known[4:]}), 4)
    assert output.prompt_logprobs == tuple(known)


def test_min_tokens_bans_stops_for_exactly_that_many_tokens_also_after_a_preemption():
    scheduler = make(max_num_batched_tokens=4)
    add(scheduler, "a", 5, min_tokens=3)
    bans = [[row.bans for row in step(scheduler).rows] for _ in range(3)]
    assert bans == [[0], [1], [1]]  # the first chunk samples nothing
    scheduler.preempt_all()
    bans = [[row.bans for row in step(scheduler).rows] for _ in range(4)]
    assert bans == [[0], [1], [0], [0]]  # 7 tokens in two chunks; the last makes token 3


def test_steps_take_turns_in_their_rows():
    """So the next step needs no token of the one that is in flight."""
    scheduler = make(num_turns=2, max_num_batched_tokens=16)
    for name in ("a", "b", "c"):
        add(scheduler, name)
    step(scheduler)  # all enter together, in the slots 0, 1 and 2
    one, other = dispatch(scheduler), dispatch(scheduler)
    assert [shape(plan) for plan in (one, other)] == [[("a", 3, 1), ("c", 3, 1)], [("b", 3, 1)]]
    commit(scheduler, one)
    assert shape(dispatch(scheduler)) == [("a", 4, 1), ("c", 4, 1)]


def test_turns_are_evened_out_when_sequences_end():
    """Otherwise the two that are left would be in one turn, and no step could begin while theirs runs."""
    scheduler = make(num_turns=2, max_num_batched_tokens=16)
    for name in ("a", "b", "c", "d"):
        add(scheduler, name)
    step(scheduler)  # all enter together; "a" and "c" are of one turn
    for name in ("b", "d"):
        scheduler.abort(name, "", 0)
    one, other = dispatch(scheduler), dispatch(scheduler)
    assert sorted(shape(one) + shape(other)) == [("a", 3, 1), ("c", 3, 1)]
    assert len(one.rows) == len(other.rows) == 1


def test_a_turn_without_rows_is_left_out():
    scheduler = make(num_turns=2, max_num_batched_tokens=4)
    add_prompt(scheduler, "a", 10)
    plans = [dispatch(scheduler) for _ in range(4)]
    assert [shape(plan) for plan in plans] == [[("a", 0, 4)], [("a", 4, 4)], [("a", 8, 2)], [("a", 10, 1)]]
