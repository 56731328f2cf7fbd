"""Slots of adapters: a request with an adapter runs only while that has a slot, and there may be fewer slots
than adapters. Pages are shared by requests with the same content of an adapter only.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.requests.adapter import AdapterValues, AdapterWeights
from penstock.runtime.requests.request import Request, StoppingParams
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.adapter_slots import AdapterSlots
from penstock.runtime.scheduling.plan import Plan
from penstock.runtime.scheduling.scheduler import Scheduler
from tests.support.scheduler.fake_runner import FakeRunner, run_alone
from tests.support.scheduler.scheduling import commit, dispatch, make


def weights(digest: str) -> AdapterWeights:
    return AdapterWeights(
        values=AdapterValues(1, 1, np.dtype(np.float32)), digest=digest, rank=1, scaling=1.0, targets=()
    )


def add(scheduler: Scheduler, name: str, digest: str = "", **about: Any) -> None:
    stopping = StoppingParams(max_tokens=about.pop("max_tokens", 4), ignore_eos=True)
    prompt = about.pop("prompt", (100, 101, 102))
    given = weights(digest) if digest else None
    scheduler.add(Request(name, prompt, ResolvedSampling(), stopping, adapter_weights=given, **about), 1)


def names(plan: Plan) -> list[str]:
    return [row.request_id for row in plan.rows]


def loads(plan: Plan) -> list[tuple[int, str]]:
    return [(slot, loaded.digest) for slot, loaded in plan.adapter_loads]


def step(scheduler: Scheduler) -> Plan:
    plan = dispatch(scheduler)
    commit(scheduler, plan)
    scheduler.check()
    return plan


def test_an_adapter_is_written_once_for_all_that_use_it() -> None:
    scheduler = make(max_adapters=2, max_num_batched_tokens=64)
    for name, digest in (("a1", "a"), ("plain", ""), ("b", "b"), ("a2", "a")):
        add(scheduler, name, digest)
    plan = step(scheduler)
    assert loads(plan) == [(1, "a"), (2, "b")]
    slots = {row.request_id: plan.adapter_slots.get(row.slot) for row in plan.rows}
    assert slots == {"a1": 1, "plain": None, "b": 2, "a2": 1}


def test_the_least_recently_used_leaves_when_nobody_uses_it() -> None:
    scheduler = make(max_adapters=2)
    scheduler.name_adapters(frozenset("abc"), frozenset())
    for name, digest in (("a", "a"), ("b", "b"), ("a2", "a")):
        add(scheduler, name, digest, max_tokens=1)
        step(scheduler)
    add(scheduler, "c", "c", max_tokens=1)
    assert loads(step(scheduler)) == [(2, "c")]
    scheduler.name_adapters(frozenset("abc"), frozenset("a"))
    add(scheduler, "b2", "b", max_tokens=1)
    assert loads(step(scheduler)) == [(2, "b")]  # c was used later than a, but a is pinned
    assert scheduler.roster.adapters.num_evicted == 2


def test_one_that_no_name_means_leaves_first_and_is_not_counted() -> None:
    scheduler = make(max_adapters=2)
    scheduler.name_adapters(frozenset("ab"), frozenset())
    for digest in "ab":
        add(scheduler, digest, digest, max_tokens=1)
        step(scheduler)
    scheduler.name_adapters(frozenset("acd"), frozenset())  # b was unloaded, and is the one used last
    add(scheduler, "c", "c", max_tokens=1)
    assert loads(step(scheduler)) == [(2, "c")]
    assert scheduler.roster.adapters.num_evicted == 0
    add(scheduler, "d", "d", max_tokens=1)
    assert loads(step(scheduler)) == [(1, "d")]
    assert scheduler.roster.adapters.num_evicted == 1


def test_who_waits_for_a_slot_is_passed_only_by_those_that_need_none() -> None:
    """A stream of requests for the adapter that is there would keep the slot for ever."""
    scheduler = make(max_adapters=1)
    add(scheduler, "holds", "a", max_tokens=2)
    add(scheduler, "waits", "b", max_tokens=2)
    add(scheduler, "later", "a", max_tokens=2)
    add(scheduler, "plain", max_tokens=3)
    assert names(step(scheduler)) == ["holds", "plain"]
    assert names(step(scheduler)) == ["holds", "plain"]
    plan = step(scheduler)
    assert names(plan) == ["plain", "waits"]
    assert loads(plan) == [(1, "b")]
    step(scheduler)
    plan = step(scheduler)
    assert names(plan) == ["later"]
    assert loads(plan) == [(1, "a")]


def test_those_behind_one_that_is_gone_need_not_wait() -> None:
    scheduler = make(max_adapters=1)
    add(scheduler, "holds", "a")
    add(scheduler, "waits", "b")
    add(scheduler, "later", "a")
    assert names(step(scheduler)) == ["holds"]
    scheduler.abort("waits", "", 2)
    assert names(step(scheduler)) == ["holds", "later"]


def test_who_is_preempted_gives_its_slot_back_and_takes_one_again() -> None:
    scheduler = make(max_adapters=1)
    add(scheduler, "holds", "a")
    add(scheduler, "waits", "b", max_tokens=1)
    step(scheduler)
    scheduler.preempt_all()
    scheduler.check()
    plan = step(scheduler)
    assert (names(plan), loads(plan)) == (["holds"], [])  # first in line, and the adapter is still there
    assert plan.adapter_slots == {plan.rows[0].slot: 1}


def test_pages_are_shared_by_requests_of_one_content_only() -> None:
    prompt = tuple(range(100, 110))
    scheduler = make(max_adapters=2, max_num_batched_tokens=64, prefix_cache_pages=None)
    shared: dict[str, int] = {}
    for name, digest in (("first", "a"), ("plain", ""), ("other", "b"), ("again", "a")):
        add(scheduler, name, digest, prompt=prompt, max_tokens=1)
        shared[name] = step(scheduler).rows[0].start
    assert shared["first"] == shared["plain"] == shared["other"] == 0
    assert shared["again"] > 0


@given(st.randoms(use_true_random=False))
def test_every_request_runs_with_its_own_adapter_and_ends(rng: random.Random) -> None:
    """More adapters than slots, few pages, preemptions, aborts, and shared beginnings: each answer is what
    the request would get alone, and its slot holds its adapter in every step.
    """
    scheduler = make(max_adapters=rng.randint(1, 2), num_pages=12, prefix_cache_pages=None)
    runner, on_device, made = FakeRunner(scheduler.config), dict[int, str](), dict[str, list[int]]()
    waiting = [
        Request(
            f"r{i}",
            (*range(rng.choice([3, 9])), rng.randint(0, 3)),
            ResolvedSampling(),
            StoppingParams(max_tokens=rng.randint(1, 9), ignore_eos=True),
            adapter_weights=weights(digest) if (digest := rng.choice(["", "a", "b", "c"])) else None,
        )
        for i in range(rng.randint(1, 8))
    ]
    wanted = {r.request_id: run_alone(r, scheduler.config.context_limit(r))[0] for r in waiting}
    for _ in range(300):
        if waiting and rng.random() < 0.5:
            request = waiting.pop()
            made[request.request_id] = []
            scheduler.add(request, 1)
        if rng.random() < 0.05:
            scheduler.preempt_all()
        if made and rng.random() < 0.05 and scheduler.abort(gone := rng.choice(list(made)), "", 1):
            del wanted[gone]
        scheduler.check()
        plan = scheduler.schedule(2, max_steps=rng.choice([1, 4]))
        if plan is None:
            if not waiting:
                break
            continue
        on_device.update({slot: loaded.digest for slot, loaded in plan.adapter_loads})
        for slot, request in plan.new_requests:
            assert on_device.get(plan.adapter_slots.get(slot, 0), "") == request.adapter_digest
        for output in scheduler.commit(plan, runner.execute(plan), 2):
            made[output.request_id] += output.token_ids
    assert not scheduler.has_work
    assert {name: made[name] for name in wanted} == wanted


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.booleans()), max_size=60))
def test_users_never_lose_their_slot(moves: list[tuple[str, bool]]) -> None:
    slots, used = AdapterSlots(3), list[str]()
    slots.pinned = frozenset("ab")
    there: dict[str, int] = {}
    for digest, takes in moves:
        if takes and slots.can_take(digest):
            slot, is_new = slots.take(digest)
            assert is_new == (there.get(digest) != slot)
            there = {name: at for name, at in there.items() if at != slot} | {digest: slot}
            used.append(digest)
        elif used and not takes:
            name = used.pop(0)
            assert slots.give(name) == (name not in used)
        slots.check(used)
        assert all(slots.has(name) and there[name] for name in used)
        assert {"a", "b"} & there.keys() == {name for name in "ab" if slots.has(name)}
