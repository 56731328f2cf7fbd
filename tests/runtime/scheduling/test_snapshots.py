"""Which snapshots of recurrent state the rows of plans write and read, computed by hand. Pages have 4
positions, and a step takes 16 tokens unless a test says otherwise.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, note, settings
from hypothesis import strategies as st

from penstock.runtime.requests.request import CacheParams, Request, StoppingParams, output_id, outputs_of
from penstock.runtime.scheduling.pages import Prefix
from penstock.runtime.scheduling.plan import Plan, SnapshotUse, StepResult
from penstock.runtime.scheduling.scheduler import Scheduler
from penstock.runtime.scheduling.sequence import Sequence, Sharing, StopRules
from penstock.runtime.scheduling.snapshots import Snapshots
from tests.runtime.scheduling.test_scheduler_properties import apply, draw_event, random_config
from tests.support.scheduler.scheduling import commit, dispatch, make
from tests.support.scheduler.traffic import Traffic

A1, A2 = output_id("a", 1), output_id("a", 2)


def with_state(**limits: Any) -> Scheduler:
    options = {
        "has_state": True,
        "num_snapshots": 3,
        "prefix_cache_pages": None,
        "max_num_batched_tokens": 16,
    }
    return make(**(options | {"num_pages": 60, "max_model_len": 80} | limits))


def prompt(num: int, *, common: int = 0, name: str = "") -> tuple[int, ...]:
    """Make a prompt: the first `common` tokens are those of all prompts, and the others depend on the
    name.
    """
    first = 1000 * (1 + sum(map(ord, name)))
    return (*range(100, 100 + common), *range(first, first + num - common))


def add(
    scheduler: Scheduler, name: str, tokens: tuple[int, ...], n: int = 1, *, bypass: bool = False
) -> None:
    stopping = StoppingParams(max_tokens=20)
    for output in outputs_of(Request(name, tokens, stopping=stopping, cache=CacheParams(bypass=bypass)), n):
        scheduler.add(output, 1)


def step(scheduler: Scheduler) -> dict[str, tuple[int, int, SnapshotUse | None]]:
    """Make and commit a plan. Returns for each row where it begins and ends, and what it does."""
    plan = dispatch(scheduler)
    commit(scheduler, plan)
    return told(plan)


def told(plan: Plan) -> dict[str, tuple[int, int, SnapshotUse | None]]:
    return {
        row.request_id: (row.start, row.start + row.num_tokens, plan.snapshots.get(i))
        for i, row in enumerate(plan.rows)
    }


def end(scheduler: Scheduler, *names: str) -> None:
    for name in names:
        assert scheduler.abort(name, "", 9) is not None
    scheduler.check()


# -- what is kept, and who begins there --


def test_the_last_page_of_a_prompt_is_kept_and_found_by_the_next() -> None:
    """Of 9 tokens, 8 fill pages. Of 8 tokens 4 can be kept, because the last one is computed in any case."""
    for num, at in ((9, 8), (8, 4)):
        scheduler = with_state()
        add(scheduler, "a", prompt(num))
        assert step(scheduler) == {"a": (0, num, SnapshotUse(cut=at, cut_to=0))}
        add(scheduler, "b", prompt(num))
        assert step(scheduler)["b"] == (at, num, SnapshotUse(source=0))


def test_a_prompt_without_a_full_page_before_its_last_token_keeps_nothing() -> None:
    scheduler = with_state()
    add(scheduler, "a", prompt(4))
    assert step(scheduler) == {"a": (0, 4, None)}


def test_a_chunk_gives_up_the_snapshot_of_the_chunk_before() -> None:
    """38 tokens in chunks of 16. The last chunk begins and ends within pages."""
    scheduler = with_state()
    add(scheduler, "a", prompt(38))
    cuts = [step(scheduler)["a"] for _ in range(3)]
    assert cuts == [
        (0, 16, SnapshotUse(cut=16, cut_to=0)),
        (16, 32, SnapshotUse(cut=16, cut_to=0)),
        (32, 38, SnapshotUse(cut=4, cut_to=0)),
    ]
    add(scheduler, "b", prompt(38))
    assert step(scheduler)["b"] == (36, 38, SnapshotUse(source=0))


def test_a_snapshot_that_somebody_holds_is_not_given_up() -> None:
    """While "a" is half computed, "b" begins behind its snapshot, in a plan where "a" writes another one."""
    scheduler = with_state(max_prefill_chunk=8)
    add(scheduler, "a", prompt(38))
    step(scheduler)
    add(scheduler, "b", prompt(9))  # what "a" has promised is of no use to it
    assert step(scheduler) == {
        "a": (8, 16, SnapshotUse(cut=8, cut_to=1)),
        "b": (8, 9, SnapshotUse(source=0)),
    }


def test_who_finds_pages_without_a_snapshot_keeps_one_there() -> None:
    """The prompts have 10 tokens in common, 8 of them in full pages. "b" computes these, and "c" does not."""
    scheduler = with_state()
    for name, expected in (
        ("a", (0, 16, SnapshotUse(cut=12, cut_to=0))),
        ("b", (0, 16, SnapshotUse(cut=8, cut_to=1))),
        ("c", (8, 16, SnapshotUse(source=1, cut=4, cut_to=2))),
    ):
        add(scheduler, name, prompt(16, common=10, name=name))
        assert step(scheduler)[name] == expected
        end(scheduler, name)


def test_those_who_wait_for_a_prefix_have_a_snapshot_at_its_end() -> None:
    """In the step after, not in the same one: a snapshot is read before the step writes."""
    scheduler = with_state(max_num_batched_tokens=64)
    for name in "abc":
        add(scheduler, name, prompt(20, common=10, name=name))
    assert step(scheduler) == {"a": (0, 20, SnapshotUse(cut=8, cut_to=0))}
    plan = step(scheduler)
    assert {name: plan[name][:2] for name in "bc"} == {"b": (8, 20), "c": (8, 20)}
    assert [use and (use.source, use.cut) for _, _, use in (plan["b"], plan["c"])] == [(0, 8), (0, 8)]


def test_of_several_places_to_keep_that_is_taken_which_spares_most() -> None:
    """Three wait for 8 common tokens, and one for 16. Behind 8 four are spared 8 tokens each, behind 16 one
    is spared 16.
    """
    scheduler = with_state(max_num_batched_tokens=64, max_num_seqs=5)
    add(scheduler, "a", prompt(30, common=30))
    add(scheduler, "b", prompt(30, common=17, name="b"))
    for name in "cde":
        add(scheduler, name, prompt(30, common=9, name=name))
    assert step(scheduler) == {"a": (0, 30, SnapshotUse(cut=8, cut_to=0))}


def test_without_a_free_snapshot_everybody_computes_its_own() -> None:
    """The only snapshot is held by "b", which begins behind it, and so "c" keeps none in this plan."""
    scheduler = with_state(num_snapshots=1, max_num_batched_tokens=64)
    add(scheduler, "a", prompt(9))
    step(scheduler)
    add(scheduler, "b", prompt(9))
    add(scheduler, "c", prompt(9, name="c"))
    plan = step(scheduler)
    assert (plan["b"], plan["c"]) == ((8, 9, SnapshotUse(source=0)), (0, 9, None))


def test_a_flush_forgets_snapshots_and_running_prompts_keep_none() -> None:
    scheduler = with_state()
    add(scheduler, "a", prompt(40))
    step(scheduler)
    scheduler.flush_prefix_cache()
    scheduler.check()
    assert step(scheduler)["a"] == (16, 32, None)
    add(scheduler, "b", prompt(40))
    assert step(scheduler) == {"a": (32, 40, None), "b": (0, 8, SnapshotUse(cut=8, cut_to=0))}


# -- forks --


def test_forks_begin_at_the_last_page_of_the_prompt_one_step_later() -> None:
    """With a prefix cache, without one, and for a request that bypasses it."""
    for limits, bypass in (({}, False), ({}, True), ({"prefix_cache_pages": 0}, False)):
        scheduler = with_state(**limits)
        add(scheduler, "a", prompt(11), 3, bypass=bypass)
        assert step(scheduler) == {"a": (0, 11, SnapshotUse(cut=8, cut_to=0))}
        plan = dispatch(scheduler)
        assert told(plan) == {
            "a": (11, 12, None),
            A1: (8, 11, SnapshotUse(source=0)),
            A2: (8, 11, SnapshotUse(source=0)),
        }
        assert plan.page_copies == ()
        commit(scheduler, plan)


def test_a_fork_that_arrives_late_begins_there_too() -> None:
    """The first output knows how many there will be."""
    scheduler = with_state(prefix_cache_pages=0)
    stopping = StoppingParams(max_tokens=20)
    first, second = outputs_of(Request("a", prompt(11), stopping=stopping), 2)
    scheduler.add(first, 1)
    for _ in range(3):
        step(scheduler)
    scheduler.add(second, 1)
    assert step(scheduler)[A1] == (8, 11, SnapshotUse(source=0))


def test_a_fork_computes_its_prompt_where_no_snapshot_was_free() -> None:
    scheduler = with_state(num_snapshots=1, prefix_cache_pages=0, max_num_batched_tokens=64)
    add(scheduler, "a", prompt(11), 2)
    add(scheduler, "b", prompt(11, name="b"), 2)
    assert step(scheduler) == {"a": (0, 11, SnapshotUse(cut=8, cut_to=0)), "b": (0, 11, None)}
    plan = step(scheduler)
    assert (plan[A1], plan[output_id("b", 1)]) == ((8, 11, SnapshotUse(source=0)), (0, 11, None))


# -- put off --


def test_a_row_that_is_put_off_begins_behind_its_snapshot_again() -> None:
    """Meanwhile others may not write the snapshot, though it is the only one."""
    scheduler = with_state(num_snapshots=1)
    add(scheduler, "a", prompt(9))
    step(scheduler)
    end(scheduler, "a")
    add(scheduler, "b", prompt(9))
    plan = dispatch(scheduler)
    assert told(plan) == {"b": (8, 9, SnapshotUse(source=0))}
    scheduler.put_off(plan, [0], [])
    scheduler.commit(plan, StepResult([()], [()]), 3)
    add(scheduler, "c", prompt(9, name="c"))
    assert step(scheduler) == {"c": (0, 9, None)}  # "b" sits out
    assert step(scheduler)["b"] == (8, 9, SnapshotUse(source=0))
    add(scheduler, "d", prompt(9, name="d"))
    assert step(scheduler)["d"] == (0, 9, SnapshotUse(cut=8, cut_to=0))


# -- the pool --


def sequence(name: str) -> Sequence:
    request = Request(name, (1,), stopping=StoppingParams(max_tokens=1))
    rules = StopRules.of(request, eos_token_ids=frozenset(), context_limit=9, now_ns=1)
    return Sequence(request, [1], 1, rules, 1, Sharing([]))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_what_is_found_is_what_was_written_last(seed: int) -> None:
    """Against a plain account: who holds what, and of the others the order in which they were used last."""
    rng = random.Random(seed)
    num = rng.randint(1, 4)
    snapshots = Snapshots(num)
    written: dict[int, bytes] = {}  # entry to key, of those that can be found; the least recently used first
    arriving: list[tuple[int, bytes]] = []
    running: dict[Sequence, int] = {}
    for _ in range(60):
        action = rng.choice(["write", "write", "plan", "enter", "enter", "leave", "advance", "flush"])
        note(action)
        if action == "write":
            key = rng.randbytes(1)[:1]
            if key in written.values() or key in [each for _, each in arriving]:
                continue
            entry = snapshots.write(key)
            held = {*running.values(), *(one for one, _ in arriving)}
            assert (entry is None) == (len(held) == num)
            if entry is not None:
                assert entry not in held
                free = set(range(num)) - held - set(written)
                oldest = [one for one in written if one not in held][:1]
                assert entry in free or [entry] == oldest
                assert not free or entry in free
                written.pop(entry, None)
                arriving.append((entry, key))
        elif action == "plan":
            snapshots.begin_plan(lambda seq: False)
            written.update(arriving)
            arriving.clear()
            for seq in [seq for seq in running if seq.num_computed > 8]:
                entry = running.pop(seq)
                if entry in written and entry not in running.values():
                    written[entry] = written.pop(entry)
        elif action == "enter" and written:
            entry = rng.choice([*written])
            found = snapshots.find(written[entry])
            assert found == entry
            seq = sequence("s")
            seq.slot, seq.num_computed = 0, 8
            snapshots.enter(seq, Prefix(([1, 2],), 8, found), for_forks=False)
            running[seq] = entry
        elif action == "leave" and running:
            seq = rng.choice([*running])
            entry = running.pop(seq)
            snapshots.leave(seq)
            if entry in written and entry not in running.values():
                written[entry] = written.pop(entry)
        elif action == "advance" and running:
            rng.choice([*running]).num_computed = 9
        elif action == "flush" and rng.random() < 0.2:
            snapshots.flush()
            written.clear()
            arriving.clear()
        for entry, key in written.items():
            assert snapshots.find(key) == entry
        assert not any(snapshots.find(key) is not None for _, key in arriving)
        snapshots.check(running)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_events=st.integers(10, 60))
def test_random_traffic_with_state(seed: int, num_events: int) -> None:
    """As `test_random_traffic`, with models that have state, and snapshots of it."""
    rng = random.Random(seed)
    config = random_config(rng, always_state=True)
    note(repr(config))
    traffic = Traffic(config)
    for _ in range(num_events):
        apply(draw_event(traffic, rng), traffic)
        traffic.accounts_agree()
    traffic.end(rng.randint(0, 1), rng.choice([1, 8]), rng.choice([None, 3]), rng.choice([0, 5]))
