"""The queue in which requests that cannot enter yet step aside, compared with one in which all stand in line.

If each waiting request were looked at in every step, it would have to be passed over exactly while it stands
aside here.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from penstock.runtime.requests.request import CacheParams, Request, StoppingParams, outputs_of
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.admission import Admission
from penstock.runtime.scheduling.pages import Prefix
from penstock.runtime.scheduling.plan import Draft, Plan, StepResult
from penstock.runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from penstock.runtime.scheduling.sequence import Sequence
from tests.support.scheduler.scheduling import EOS, WORD, add, commit, dispatch, make


class EverybodyInLine(Scheduler):
    """The same policy without stepping aside: before each step all waiting requests are put in line, and so
    each is looked at when it is the next.
    """

    def schedule(self, *args: Any, **kwargs: Any) -> Plan | None:
        waiting = self.roster.waiting
        for event in waiting.awaited:
            waiting.happened(event)
        return super().schedule(*args, **kwargs)


class Pair:
    """Both schedulers, with the same traffic."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.both = (Scheduler(config), EverybodyInLine(config))
        self.in_flight: deque[Plan] = deque()
        self.now_ns = 1

    def schedule(self, admit: bool, max_steps: int) -> None:
        self.now_ns += 1
        ours, naive = [s.schedule(self.now_ns, admit=admit, max_steps=max_steps) for s in self.both]
        assert ours == naive
        self.both[0].check()
        if ours is not None:
            self.in_flight.append(ours)

    def commit(self, rng: random.Random) -> None:
        plan = self.in_flight.popleft()
        sampled = [
            (rng.choice([WORD, WORD, WORD, EOS]),) * r.max_samples if r.samples else () for r in plan.rows
        ]
        # The device ends a row at EOS unless it is banned; all samples of a row are the same token here.
        sampled = [
            tokens[: row.bans + 1] if tokens[:1] == (EOS,) else tokens
            for tokens, row in zip(sampled, plan.rows, strict=True)
        ]
        for scheduler in self.both:
            scheduler.commit(plan, StepResult(sampled, [()] * len(sampled)), self.now_ns)

    def event(self, rng: random.Random) -> None:
        kind = rng.choices(
            ["arrive", "schedule", "commit", "abort", "preempt_all", "flush", "weights"],
            [6, 12, 9, 2, 1, 1, 1],
        )[0]
        active = self.both[0].active_ids()
        if kind == "arrive":
            for request in random_outputs(rng):
                for scheduler in self.both:
                    scheduler.add(request, self.now_ns)
        elif kind == "schedule" and len(self.in_flight) < 2:
            self.schedule(rng.random() < 0.8, rng.choice([1, 1, 4]))
        elif kind == "commit" and self.in_flight:
            self.commit(rng)
        elif kind == "abort" and active:
            name = rng.choice(active)
            for scheduler in self.both:
                scheduler.abort(name, "", self.now_ns)
        elif kind == "preempt_all":
            for scheduler in self.both:
                scheduler.preempt_all()
        elif kind == "flush":
            for scheduler in self.both:
                scheduler.flush_prefix_cache()
        elif kind == "weights" and not self.in_flight:
            for scheduler in self.both:
                scheduler.use_weights(2)


def random_outputs(rng: random.Random) -> list[Request]:
    """Make the outputs of a request. Most prompts begin like others, and differ from different places on."""
    tree = [random.Random(branch).choices(range(10, 50), k=40) for branch in range(2)]
    trunk = tree[0][: rng.choice([8, 16, 40])] + tree[1]
    prompt = (*trunk[: rng.randint(1, len(trunk))], *rng.choices(range(10, 50), k=rng.randint(0, 6)))
    request = Request(
        f"r{rng.getrandbits(64)}",
        prompt,
        ResolvedSampling(presence_penalty=rng.choice([0.0, 0.0, 1.0])),
        stopping=StoppingParams(max_tokens=rng.randint(1, 12), min_tokens=rng.choice([0, 0, 1])),
        cache=CacheParams(rng.choice(["", "", "", "salt"]), rng.random() < 0.1),
        priority=rng.randint(-1, 1),
    )
    return outputs_of(request, rng.choice([1, 1, 2, 4]))


@settings(max_examples=30, deadline=None)  # no deadline: the machine that runs this may be busy
@given(seed=st.integers(0, 2**32 - 1), num_events=st.integers(20, 100))
def test_plans_are_those_of_a_queue_in_which_all_stand_in_line(seed, num_events):
    """There are pages for all requests, because a request that stands aside may learn later that cached pages
    were evicted than one that is looked at in every step.
    """
    rng = random.Random(seed)
    max_num_seqs = rng.randint(1, 8)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.randint(0, 24),
        max_model_len=128,
        page_size=rng.randint(2, 8),
        num_pages=4000,
        eos_token_ids=frozenset({EOS}),
        max_queued_requests=10_000,
        feature_slots=rng.choice([None, 1, 2]),
        max_prefill_chunk=rng.choice([None, rng.randint(1, 16)]),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        prefix_cache_pages=rng.choice([None, None, None, 0]),
    )
    note(repr(config))
    pair = Pair(config)
    for _ in range(num_events):
        pair.event(rng)
    for _ in range(10_000):
        if not pair.both[0].has_work:
            break
        if pair.in_flight:
            pair.commit(rng)
        pair.schedule(True, 1)
    for scheduler in pair.both:
        assert not scheduler.has_work
        scheduler.check()


def looked_at_by(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keep a list that gets the id of each waiting sequence whenever it is asked whether it may enter."""
    looked_at: list[str] = []
    find_prefix = Admission.find_prefix

    def look(admission: Admission, seq: Sequence, draft: Draft) -> Prefix | None:
        looked_at.append(seq.request_id)
        return find_prefix(admission, seq, draft)

    monkeypatch.setattr(Admission, "find_prefix", look)
    return looked_at


def test_a_request_that_awaits_a_prefix_is_looked_at_twice_however_long_it_waits(monkeypatch):
    """It is looked at once when it is the next in line, and once when the last page in common is
    published.
    """
    scheduler = make(
        prefix_cache_pages=None, max_num_seqs=80, max_num_batched_tokens=100, max_prefill_chunk=4,
        max_model_len=512, num_pages=1000,
    )  # fmt: skip
    looked_at = looked_at_by(scheduler, monkeypatch)
    shared = tuple(range(100, 300))
    for i in range(60):
        scheduler.add(Request(f"r{i}", (*shared, 1000 + i, 7)), 1)
    for _ in range(49):
        plan = dispatch(scheduler)
        assert [row.request_id for row in plan.rows] == ["r0"]
        commit(scheduler, plan)
    assert sorted(looked_at) == sorted(f"r{i}" for i in range(60))
    looked_at.clear()
    plan = dispatch(scheduler)  # the 50th chunk publishes the last page in common
    assert len(plan.rows) == 1 + 48  # 100 - 4 tokens of budget, two for each
    assert {row.start for row in plan.rows[1:]} == {200}
    assert looked_at == [f"r{i}" for i in range(1, 49)]


@pytest.mark.parametrize("num_started", [0, 3])
def test_while_none_is_admitted_only_requests_that_ran_before_are_looked_at(monkeypatch, num_started):
    scheduler = make(num_pages=1000)
    for i in range(num_started):
        add(scheduler, f"started{i}")
    if num_started:
        commit(scheduler, dispatch(scheduler))
        scheduler.preempt_all()
    for i in range(50):
        add(scheduler, f"new{i}")
    looked_at = looked_at_by(scheduler, monkeypatch)
    plan = scheduler.schedule(2, admit=False, max_steps=8)
    assert not [name for name in looked_at if name.startswith("new")]
    assert (plan is None) == (num_started == 0)


def test_a_request_aborted_while_it_stands_aside_does_not_come_back():
    scheduler = make(prefix_cache_pages=None, max_num_batched_tokens=5, max_prefill_chunk=4)
    for name in ("a", "b", "c"):
        add(scheduler, name, 12)
    commit(scheduler, dispatch(scheduler))
    waiting = scheduler.roster.waiting
    assert waiting.first() is None
    assert scheduler.load().num_waiting == 2
    scheduler.abort("b", "", 2)
    add(scheduler, "b", 1)
    scheduler.check()
    assert [seq.request_id for seq in waiting] == ["c", "b"]
    scheduler.abort("a", "", 2)  # its promise falls, so those that waited for it are in line again
    assert waiting.first() is scheduler.roster.find("c")
    scheduler.check()
