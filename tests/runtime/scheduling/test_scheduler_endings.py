"""Aborts in every state, time limits and tokens in flight, and what outputs, timing and memory show of
them.
"""

from __future__ import annotations

import pytest

from penstock.runtime.requests.request import (
    Finish,
    FinishReason,
    Request,
    RequestTiming,
    StepOutput,
    TokenLogprobs,
)
from penstock.runtime.scheduling.plan import StepResult
from penstock.runtime.scheduling.scheduler import FINISHED_MEMORY, Load, Scheduler
from tests.support.scheduler.scheduling import EOS, WORD, add, commit, dispatch, make

SECOND = 10**9
IDLE = Load(
    num_running=0, num_waiting=0, waiting_prompt_tokens=0, pages_used=0, pages_cached=0, pages_total=16
)


def step(scheduler: Scheduler, token: int = WORD, now_ns: int = 3) -> list[StepOutput]:
    return commit(scheduler, dispatch(scheduler), token, now_ns)


def test_expire_ends_late_requests_whether_they_run_or_wait():
    scheduler = make(max_num_seqs=2)
    add(scheduler, "runs", now_ns=SECOND, time_limit_s=2.0)
    add(scheduler, "unlimited")
    add(scheduler, "waits", now_ns=SECOND, time_limit_s=2.0)
    add(scheduler, "later", now_ns=SECOND, time_limit_s=3.0)
    step(scheduler)
    assert scheduler.next_deadline_ns == 3 * SECOND
    assert scheduler.expire(3 * SECOND - 1) == []
    outputs = scheduler.expire(3 * SECOND)
    scheduler.check()
    assert [(output.request_id, output.finish) for output in outputs] == [
        ("runs", Finish(FinishReason.TIME_LIMIT)),
        ("waits", Finish(FinishReason.TIME_LIMIT)),
    ]
    assert outputs[0].timing is not None
    assert outputs[0].timing.finished_ns == 3 * SECOND
    assert scheduler.active_ids() == ("unlimited", "later")
    assert scheduler.next_deadline_ns == 4 * SECOND
    assert [output.request_id for output in scheduler.expire(9 * SECOND)] == ["later"]
    assert scheduler.next_deadline_ns > 10**6 * SECOND
    assert scheduler.expire(99 * SECOND) == []


def waiting(scheduler: Scheduler) -> None:
    add(scheduler)


def preempted(scheduler: Scheduler) -> None:
    add(scheduler)
    step(scheduler)
    scheduler.preempt_all()


def half_prefilled(scheduler: Scheduler) -> None:
    add(scheduler, num_prompt=20)
    step(scheduler)


def decoding(scheduler: Scheduler) -> None:
    add(scheduler)
    step(scheduler)
    step(scheduler)


@pytest.mark.parametrize("state", [waiting, preempted, half_prefilled, decoding])
def test_abort_frees_everything_at_once_in_every_state(state):
    scheduler = make()
    state(scheduler)
    assert scheduler.has_work
    output = scheduler.abort("a", "client left", 7)
    assert output is not None
    assert output[:4] == ("a", (), (), Finish(FinishReason.ABORTED, message="client left"))
    scheduler.check()
    assert scheduler.load() == IDLE
    assert (scheduler.has_work, scheduler.active_ids(), scheduler.finished("a")) == (False, (), True)
    assert scheduler.abort("a", "", 8) is None
    assert scheduler.schedule(9) is None


def test_abort_hits_one_exact_id_only():
    scheduler = make()
    add(scheduler, "req-10")
    for name in ("req-1", "", "req-100"):
        assert scheduler.abort(name, "", 2) is None
    assert scheduler.active_ids() == ("req-10",)


def test_a_stop_string_found_outside_ends_a_request_by_abort():
    scheduler = make()
    add(scheduler)
    step(scheduler)
    output = scheduler.abort("a", "", 7, reason=FinishReason.STOP, stop="END")
    assert output is not None
    assert output.finish == Finish(FinishReason.STOP, stop="END")


def test_a_token_in_flight_is_dropped_when_its_request_is_gone_even_if_the_id_is_back():
    scheduler = make()
    add(scheduler)
    add(scheduler, "b")
    plan = dispatch(scheduler)
    scheduler.abort("a", "", 3)
    add(scheduler, "a", num_prompt=2)
    assert [output.request_id for output in commit(scheduler, plan, EOS)] == ["b"]
    assert scheduler.active_ids() == ("a",)
    plan = dispatch(scheduler)
    assert (plan.rows[0].start, plan.rows[0].num_tokens) == (0, 2)


def test_a_token_in_flight_survives_a_preemption():
    scheduler = make()
    add(scheduler)
    plan = dispatch(scheduler)
    scheduler.preempt_all()
    assert scheduler.schedule(3) is None  # it would sample the same position twice
    assert commit(scheduler, plan, 42) == [StepOutput("a", (42,))]
    assert dispatch(scheduler).rows[0].token_ids == (100, 101, 102, 42)


def test_a_token_in_flight_may_end_a_preempted_request():
    scheduler = make()
    add(scheduler)
    plan = dispatch(scheduler)
    scheduler.preempt_all()
    (output,) = commit(scheduler, plan, EOS)
    assert output.finish == Finish(FinishReason.EOS, token_id=EOS)
    assert scheduler.load() == IDLE


def test_finished_ids_are_remembered_for_a_while_and_not_while_in_use_again():
    scheduler = make()
    add(scheduler, "again")
    assert not scheduler.finished("again")
    scheduler.abort("again", "", 2)
    for i in range(FINISHED_MEMORY - 1):
        add(scheduler, f"r{i}")
        scheduler.abort(f"r{i}", "", 2)
    assert scheduler.finished("again")
    add(scheduler, "again")
    assert not scheduler.finished("again")
    scheduler.abort("again", "", 2)  # now it is the newest of the ended ids
    add(scheduler, "last")
    scheduler.abort("last", "", 2)
    assert scheduler.finished("again")
    assert not scheduler.finished("r0")
    assert scheduler.finished("r1")


def test_timing_has_the_first_time_of_each_event():
    scheduler = make(max_num_batched_tokens=4)
    add(scheduler, num_prompt=5, now_ns=10, max_tokens=3)
    for now_ns in (20, 30):  # the first chunk samples nothing
        commit(scheduler, dispatch(scheduler, now_ns), now_ns=now_ns + 5)
    scheduler.preempt_all()
    for now_ns in (40, 50):
        commit(scheduler, dispatch(scheduler, now_ns), now_ns=now_ns + 5)
    (output,) = commit(scheduler, dispatch(scheduler, 60), now_ns=65)
    assert output.timing == RequestTiming(
        received_ns=10, arrived_ns=10, scheduled_ns=20, first_token_ns=35, finished_ns=65, preemptions=1
    )


def test_an_event_that_never_happened_has_no_time():
    scheduler = make()
    add(scheduler, now_ns=10)
    output = scheduler.abort("a", "", 12)
    assert output is not None
    assert output.timing == RequestTiming(received_ns=10, arrived_ns=10, finished_ns=12)


def test_outputs_carry_the_generation_that_made_their_tokens():
    scheduler = make()
    scheduler.use_weights(4)
    add(scheduler)
    plan = dispatch(scheduler)
    scheduler.use_weights(5)
    assert commit(scheduler, plan)[0].weights_generation == 4
    assert step(scheduler, EOS)[0].weights_generation == 5
    add(scheduler)
    output = scheduler.abort("a", "", 3)
    assert output is not None
    assert output.weights_generation == 5


def test_only_requests_that_ask_get_log_probabilities():
    scheduler = make()
    for name, logprobs in (("no", None), ("yes", 0)):
        scheduler.add(Request(name, (100,), logprobs=logprobs), 1)
    values = [TokenLogprobs(-0.5), TokenLogprobs(-1.5, ((9, -1.5),))]
    plan = dispatch(scheduler)
    outputs = scheduler.commit(plan, StepResult([(WORD,), (WORD,)], [(value,) for value in values]), 3)
    assert [output.logprobs for output in outputs] == [(), (values[1],)]
    plan = dispatch(scheduler)
    outputs = scheduler.commit(plan, StepResult([(EOS,), (EOS,)], [(value,) for value in values]), 3)
    assert [output.logprobs for output in outputs] == [(), (values[1],)]
