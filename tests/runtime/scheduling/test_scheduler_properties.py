"""Random arrivals, steps, aborts, time limits, preemptions, flushes and weight updates on a fake runner that
reads through the page tables.

After every event `tests.support.scheduler.traffic` checks the plan and the accounts. At the end every request
must have made the tokens that the same model makes alone on a list, without a scheduler, pages, chunks,
windows, sharing or preemptions. So outputs are the same with overlapped steps or without, in windows of any
length, cached or not, whatever other requests there are.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import Field, dataclass, fields
from typing import Any

from hypothesis import example, given, note, settings
from hypothesis import strategies as st

from penstock.runtime.requests.request import CacheParams, Request, StoppingParams, outputs_of
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.plan import Plan, PlanRow, drafted_tokens
from penstock.runtime.scheduling.scheduler_config import GroupLimits, SchedulerConfig
from penstock.runtime.scheduling.sequence import Sequence
from tests.support.scheduler.fake_runner import EOS, VOCAB, Rota
from tests.support.scheduler.proposing import Guesses, lies
from tests.support.scheduler.traffic import Tracked, Traffic


def random_pages(rng: random.Random) -> int:
    return rng.choice([rng.randint(1, 5), rng.randint(5, 16), 30])


def random_groups(rng: random.Random, first: int | None) -> tuple[GroupLimits, ...]:
    """Make groups of layers beside the first one, whose window is `first`."""
    windows = [rng.randint(1, min(first or 12, 12)) for _ in range(rng.choice([0, 0, 1, 1, 2]))]
    return tuple(GroupLimits(random_pages(rng), window) for window in windows)


def random_config(rng: random.Random, *, always_state: bool = False) -> SchedulerConfig:
    max_num_seqs = rng.randint(1, 5)
    num_pages = random_pages(rng)
    window = rng.choice([None, None, rng.randint(1, 12)])
    has_state = always_state or rng.random() < 0.4
    num_snapshots = rng.choice([0, 1, 2, rng.randint(1, 8)]) if has_state else 0
    num_snapshots = max(num_snapshots, always_state)
    cached = rng.choice([None, None, 0, rng.randint(1, num_pages)])
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.randint(0, 8),
        max_model_len=rng.choice([rng.randint(2, 12), rng.randint(12, 40), 40]),
        page_size=rng.randint(1, 4),
        num_pages=num_pages,
        eos_token_ids=EOS,
        max_queued_requests=rng.randint(1, 8),
        feature_slots=rng.choice([None, rng.randint(1, max_num_seqs)]),
        max_prefill_chunk=rng.choice([None, rng.randint(1, 6)]),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        prefix_cache_pages=0 if has_state and not num_snapshots else cached,
        sliding_window=window,
        further_groups=random_groups(rng, window),
        has_state=has_state,
        num_snapshots=num_snapshots,
        window_steps=rng.choice([(), (), (1, 2, 4), (1, 3)]),
        max_proposed_tokens=rng.randint(1, 6),
        max_rows=max_num_seqs + rng.randint(0, 9),
        vocab_size=VOCAB,
        drafted_tokens=rng.choice([0, 0, rng.randint(1, 6)]),
    )


def random_prompt(rng: random.Random) -> tuple[int, ...]:
    """Make a prompt; about half of the prompts begin like others."""
    beginning: list[int] = []
    if rng.random() < 0.6:
        beginning = random.Random(rng.randint(0, 1)).choices(range(VOCAB), k=24)[: rng.randint(1, 24)]
    return (*beginning, *rng.choices(range(VOCAB), k=rng.randint(0 if beginning else 1, 12)))


def random_request(rng: random.Random) -> Request:
    max_tokens = rng.choice([None, rng.randint(1, 20)])
    min_tokens = rng.choice([0, 0, rng.randint(1, 5)])
    stopping = StoppingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens if max_tokens is None else min(min_tokens, max_tokens),
        stop_token_ids=tuple(rng.choices(range(VOCAB), k=rng.randint(0, 2))),
        ignore_eos=rng.random() < 0.5,
        time_limit_s=rng.choice([None, None, None, rng.randint(1, 9)]),
    )
    return Request(
        f"r{rng.randint(0, 20)}",
        random_prompt(rng),
        stopping=stopping,
        logprobs=rng.choice([None, 0, 2]),
        cache=CacheParams(rng.choice(["", "", "salt"]), rng.random() < 0.1),
        sampling=ResolvedSampling(seed=rng.randrange(2**64), presence_penalty=rng.choice([0.0, 0.0, 1.0])),
        priority=rng.randint(-1, 1),
        max_proposed_tokens=rng.choice([None, None, rng.randint(0, 4)]),
    )


def random_outputs(rng: random.Random) -> list[Request]:
    """Return the outputs of one request, as the engine submits them."""
    n = rng.choice([1, 1, 1, rng.randint(2, 4)])
    limits = [rng.randint(1, 20) for _ in range(n)]
    constraints = [Rota(limit) for limit in limits] if rng.random() < 0.2 else []
    return outputs_of(random_request(rng), n, constraints)


@dataclass(frozen=True)
class Event:
    """Something that happens to the scheduler. A test that fails prints the events that led to the
    failure.
    """

    kind: str
    requests: tuple[Request, ...] = ()
    name: str = ""
    stop: bool = False
    """Whether a stop string ended the request."""
    recompute: bool = False
    num: int = 0
    """The number of plans, or of seconds."""
    ahead: int = 0
    admit: bool = True
    limits: tuple[int, int | None, int] = (1, None, 0)
    """The most decode steps, the prefill budget and the apart_steps of the plans that are made."""
    meanwhile: tuple[Event, ...] = ()

    def __str__(self) -> str:
        """Return the kind of the event, and the fields that differ from their defaults."""
        told = [f"{each.name}={getattr(self, each.name)}" for each in fields(self) if self.differs(each)]
        told += [f"({event})" for event in self.meanwhile]
        return " ".join([self.kind, *told, *map(describe, self.requests)])

    def differs(self, each: Field[Any]) -> bool:
        return each.name not in ("kind", "requests", "meanwhile") and getattr(self, each.name) != each.default


def describe(request: Request) -> str:
    """Return the parts of a request that matter to the scheduler."""
    stopping, sampling = request.stopping, request.sampling
    told = {
        "prompt": request.prompt_token_ids,
        "max": stopping.max_tokens,
        "min": stopping.min_tokens,
        "stop": stopping.stop_token_ids,
        "ignore_eos": stopping.ignore_eos,
        "time_limit_s": stopping.time_limit_s,
        "logprobs": request.logprobs,
        "salt": request.cache.salt,
        "bypass": request.cache.bypass,
        "seed": sampling.seed,
        "penalties": sampling.has_penalties,
        "priority": request.priority,
        "constraint": request.constraint,
        "fork_of": request.fork_of,
        "max_proposed": request.max_proposed_tokens,
    }
    return f"[{request.request_id!r} {' '.join(f'{k}={v}' for k, v in told.items() if v)}]"


def draw_limits(rng: random.Random) -> tuple[int, int | None, int]:
    return (
        rng.choice([1, 1, 8, rng.randint(2, 7)]),
        rng.choice([None, None, rng.randint(1, 6)]),
        rng.choice([0, rng.randint(1, 12)]),
    )


def draw_arrivals(rng: random.Random, num: int) -> Event:
    return Event("arrive", tuple(output for _ in range(num) for output in random_outputs(rng)))


def draw_abort(traffic: Traffic, rng: random.Random) -> Event:
    return Event("abort", name=rng.choice(sorted(traffic.active)), stop=rng.random() < 0.5)


def draw_calls(traffic: Traffic, rng: random.Random) -> Iterator[Event]:
    """Draw what other threads do while constraints accept tokens: they may use ids that were in use until
    then.
    """
    for _ in range(rng.choice([0, 0, 1, 3])):
        if traffic.active and rng.random() < 0.6:
            yield draw_abort(traffic, rng)
        else:
            yield draw_arrivals(rng, 1)


def draw_ahead(traffic: Traffic, rng: random.Random) -> int:
    """Draw how many steps are in flight when the next one is dispatched."""
    return rng.randint(0, most_in_flight(traffic) - 1)


def most_in_flight(traffic: Traffic) -> int:
    return 1 + traffic.config.num_turns


def draw_event(traffic: Traffic, rng: random.Random) -> Event:
    kind = rng.choices(
        [
            "arrive",
            "run",
            "dispatch",
            "commit",
            "abort",
            "wait",
            "preempt_all",
            "flush",
            "update",
            "drain",
            "fail",
        ],
        [8, 10, 4, 3, 2, 2, 1, 1, 1, 0.5, 0.2],
    )[0]
    if kind == "arrive":
        return draw_arrivals(rng, rng.randint(1, 4))
    if kind == "run":
        return Event(kind, num=rng.randint(1, 8), ahead=draw_ahead(traffic, rng), limits=draw_limits(rng))
    if kind == "dispatch":
        return Event(kind, admit=rng.random() < 0.7, limits=draw_limits(rng))
    if kind == "commit":
        return Event(kind, meanwhile=tuple(draw_calls(traffic, rng)))
    if kind == "abort" and traffic.active:
        return draw_abort(traffic, rng)
    if kind == "wait":
        return Event(kind, num=rng.randint(1, 4))
    if kind == "update":
        return Event(kind, recompute=rng.random() < 0.6)
    if kind == "drain":
        return Event(kind, ahead=draw_ahead(traffic, rng))
    return Event(kind)


def apply(event: Event, traffic: Traffic) -> None:
    """Make the event happen, unless it has nothing to act on."""
    if event.kind == "arrive":
        for request in event.requests:
            traffic.arrive(request)
    elif event.kind == "run":
        traffic.run(event.num, event.ahead, *event.limits)
    elif event.kind == "dispatch" and len(traffic.in_flight) < most_in_flight(traffic):
        traffic.dispatch(event.admit, *event.limits)
    elif event.kind == "commit" and traffic.in_flight:
        traffic.commit(meanwhile=lambda: apply_all(event.meanwhile, traffic))
    elif event.kind == "abort" and event.name in traffic.active:
        traffic.abort(event.name, event.stop)
    elif event.kind == "wait":
        traffic.wait(event.num)
    elif event.kind == "preempt_all":
        traffic.preempt_all()
    elif event.kind == "flush":
        traffic.flush()
    elif event.kind == "update":
        traffic.update_weights(recompute=event.recompute)
    elif event.kind == "drain":
        traffic.finish_started(event.ahead)
        traffic.update_weights(recompute=False)
    elif event.kind == "fail":
        traffic.fail_all()


def apply_all(events: Iterable[Event], traffic: Traffic) -> None:
    for event in events:
        apply(event, traffic)


# All events come from one seed: if hypothesis drew them one by one, drawing would cost more than the
# scheduler, and events would cluster at the smallest limits. Their number still shrinks.
@settings(max_examples=300, deadline=None)  # no deadline: the machine that runs this may be busy
@given(seed=st.integers(0, 2**32 - 1), num_events=st.integers(10, 80), speculates=st.booleans())
@example(seed=892, num_events=10, speculates=True)  # a draft was asked for a row under a constraint
@example(seed=196, num_events=10, speculates=True)  # the pages of refused tokens were kept for a chunk
@example(seed=134, num_events=17, speculates=False)  # the first in rank began with pages of the same step
def test_random_traffic(seed, num_events, speculates):
    """With a proposer or without: what it proposes may be right, wrong, too much, or no token at all; or a
    draft model guesses in the step, rightly or wrongly.
    """
    rng = random.Random(seed)
    config = random_config(rng)
    note(repr(config))

    def right(seq: Sequence, most: int) -> list[int]:
        return traffic.active[seq.request_id].expected[seq.num_generated :][:most]

    patience = rng.choice([0.0, 0.5, 1.0])

    def draft(row: PlanRow) -> tuple[int, ...]:
        found = traffic.scheduler.roster.find(row.request_id)
        assert found is not None
        known = right(found, len(row.proposed))
        wrong = [rng.randrange(VOCAB) for _ in row.proposed]
        return tuple([*known, *wrong[len(known) :]] if rng.random() < 0.5 else wrong)

    guess = lies(rng, VOCAB, right)
    if config.drafted_tokens:
        guess = lambda seq, most: drafted_tokens(rng.randint(0, most + 2))
    proposer = Guesses(guess, rng, patience=patience) if speculates else None
    traffic = Traffic(config, proposer)
    traffic.runner.draft = draft
    for _ in range(num_events):
        event = draw_event(traffic, rng)
        note(str(event))
        apply(event, traffic)
        traffic.accounts_agree()
    prefill_budget, apart_steps = rng.choice([None, rng.randint(1, 4)]), rng.choice([0, rng.randint(1, 12)])
    traffic.end(rng.randint(0, 1), rng.choice([1, 8]), prefill_budget, apart_steps)
    assert proposer is None or len(proposer.ended_ids) == traffic.arrivals


class InTurns(Traffic):
    """Traffic whose steps take turns, so that a step serves the decodes of one turn only."""

    def check_fairness(self, plan: Plan, admit: bool, running: list[Tracked]) -> None:
        entered = {request.request_id for _, request in plan.new_requests}
        assert len({self.turn(row.request_id) for row in plan.rows if row.request_id not in entered}) <= 1
        ran = [t.request.request_id for t in running if t.request.request_id not in entered]
        sizes = Counter(map(self.turn, [*ran, *plan.preempted]))
        assert max(sizes.values(), default=0) - min(map(sizes.__getitem__, range(self.config.num_turns))) <= 1

    def in_turn(self, plan: Plan, running: list[Tracked]) -> list[Tracked]:
        (turn,) = {self.turn(row.request_id) for row in plan.rows if row.token_ids is None}
        return [tracked for tracked in running if self.turn(tracked.request.request_id) == turn]

    def turn(self, request_id: str) -> int:
        found = self.scheduler.roster.find(request_id)
        assert found is not None
        return found.turn

    def check_turn(self, plan: Plan, apart_steps: int) -> None:
        """Rows under a constraint have no steps of their own, because there are no windows."""
        assert not plan.apart


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_events=st.integers(10, 60), num_turns=st.integers(2, 4))
@example(seed=183023, num_events=11, num_turns=2)  # a prompt of the other turn does not make more room
def test_random_traffic_in_turns(seed, num_events, num_turns):
    """As `test_random_traffic`, where steps take turns in their rows, and have no windows."""
    rng = random.Random(seed)
    config = dataclasses.replace(random_config(rng), num_turns=num_turns)
    note(repr(config))
    traffic = InTurns(config)
    for _ in range(num_events):
        event = without_windows(draw_event(traffic, rng))
        note(str(event))
        apply(event, traffic)
        traffic.accounts_agree()
    traffic.end(draw_ahead(traffic, rng), 1, rng.choice([None, rng.randint(1, 4)]), 0)


def without_windows(event: Event) -> Event:
    return dataclasses.replace(event, limits=(1, event.limits[1], 0))
