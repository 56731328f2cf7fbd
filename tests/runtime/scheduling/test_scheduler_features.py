"""Feature slots: requests with penalties or biases need one while they run, and there may be fewer of them
than slots.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.runtime.errors import ConfigError
from penstock.runtime.requests.request import Request, StoppingParams
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.scheduler import Scheduler
from tests.support.scheduler.scheduling import commit, dispatch, make

FEATURES = {
    "presence": ResolvedSampling(presence_penalty=1.0),
    "frequency": ResolvedSampling(frequency_penalty=-1.0),
    "repetition": ResolvedSampling(repetition_penalty=1.1),
    "bias": ResolvedSampling(logit_bias=((3, 1.0),)),
    "allowed ids": ResolvedSampling(allowed_token_ids=(3, 4)),
    "a banned word": ResolvedSampling(bad_words=((3,),)),
}
PLAIN = ResolvedSampling()
PENALISED = FEATURES["presence"]


def add(scheduler: Scheduler, name: str, sampling: ResolvedSampling, **about: Any) -> None:
    stopping = StoppingParams(max_tokens=about.pop("max_tokens", 4), ignore_eos=True)
    scheduler.add(Request(name, (100, 101, 102), sampling, stopping, **about), 1)


def names(plan: Any) -> list[str]:
    return [row.request_id for row in plan.rows]


@pytest.mark.parametrize("name", FEATURES)
def test_requests_that_need_a_feature_slot(name: str) -> None:
    scheduler = make(feature_slots=1)
    add(scheduler, "plain", PLAIN)
    add(scheduler, "first", FEATURES[name])
    add(scheduler, "second", FEATURES[name])
    plan = dispatch(scheduler)
    assert names(plan) == ["plain", "first"]
    assert plan.feature_slots == {1: 0}


def test_a_request_that_waits_for_one_is_passed_only_by_those_that_need_none() -> None:
    scheduler = make(feature_slots=1)
    add(scheduler, "holds", PENALISED, max_tokens=2)
    add(scheduler, "waits", PENALISED)
    add(scheduler, "later", PENALISED)
    add(scheduler, "plain", PLAIN)
    plan = dispatch(scheduler)
    assert names(plan) == ["holds", "plain"]
    assert plan.feature_slots == {0: 0}
    commit(scheduler, plan)
    plan = dispatch(scheduler)
    assert names(plan) == ["holds", "plain"]
    commit(scheduler, plan)
    plan = dispatch(scheduler)
    assert names(plan) == ["plain", "waits"]
    assert plan.feature_slots == {0: 0}


def test_once_one_is_free_no_request_passes_the_first_that_needs_it() -> None:
    """ "waits" lacks pages then: "plain" holds some, and "late" would take more."""
    scheduler = make(feature_slots=1, num_pages=8)
    add(scheduler, "holds", PENALISED)
    scheduler.add(Request("waits", tuple(range(24)), PENALISED, StoppingParams(max_tokens=4)), 1)
    add(scheduler, "plain", PLAIN, max_tokens=20)
    add(scheduler, "other", PLAIN, max_tokens=8)
    while scheduler.roster.find("holds"):
        commit(scheduler, dispatch(scheduler))
    add(scheduler, "late", PLAIN)
    while scheduler.roster.find("other"):
        plan = dispatch(scheduler)
        assert names(plan) == ["plain", "other"]
        commit(scheduler, plan)
    scheduler.abort("plain", "", 5)
    assert names(dispatch(scheduler)) == ["waits"]


def test_an_aborted_or_preempted_request_gives_it_back() -> None:
    scheduler = make(feature_slots=1)
    add(scheduler, "a", PENALISED)
    commit(scheduler, dispatch(scheduler))
    add(scheduler, "b", PENALISED)
    scheduler.abort("a", "", 5)
    plan = dispatch(scheduler)
    assert (names(plan), plan.feature_slots) == (["b"], {0: 0})
    commit(scheduler, plan)
    scheduler.preempt_all()
    scheduler.check()
    plan = dispatch(scheduler)
    assert (names(plan), plan.feature_slots) == (["b"], {0: 0})


def test_by_priority_a_holder_of_lower_priority_is_preempted() -> None:
    scheduler = make(feature_slots=1, scheduling_policy="priority")
    add(scheduler, "holds", PENALISED)
    add(scheduler, "plain", PLAIN)
    commit(scheduler, dispatch(scheduler))
    add(scheduler, "first", PENALISED, priority=1)
    plan = dispatch(scheduler)
    assert plan.preempted == ("holds",)  # and not "plain", which comes after it
    assert set(names(plan)) == {"first", "plain"}
    assert plan.feature_slots == {0: 0}


def test_no_request_is_preempted_if_that_frees_no_feature_slot() -> None:
    scheduler = make(feature_slots=1, scheduling_policy="priority")
    add(scheduler, "holds", PENALISED, priority=1)
    add(scheduler, "plain", PLAIN)
    commit(scheduler, dispatch(scheduler))
    add(scheduler, "waits", PENALISED, priority=1)
    plan = dispatch(scheduler)
    assert plan.preempted == ()
    assert names(plan) == ["holds", "plain"]


def test_zero_feature_slots_are_refused() -> None:
    with pytest.raises(ConfigError, match="feature_slots must be at least 1"):
        make(feature_slots=0)
