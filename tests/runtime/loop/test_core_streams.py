"""The engine's thread on the fake runner: outputs are the same with overlapped steps or without, in windows
or not, cached or not. Also the order of dispatches and waits.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import ANY, Mock

import pytest

from penstock.runtime.loop.core import EngineCore
from penstock.runtime.loop.interface import InFlightPolicy
from penstock.runtime.loop.journal import Journal
from penstock.runtime.loop.stepping import Pacer, Planned, Steps
from penstock.runtime.requests.request import (
    CacheParams,
    Finish,
    FinishReason,
    Request,
    StepOutput,
    StoppingParams,
    outputs_of,
)
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.plan import Plan, PlanRow, StepResult
from penstock.runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.support.collector import Collector
from tests.support.scheduler.fake_runner import EOS, VOCAB, LazyRunner, Rota, run_alone

MAX_LEN = 60
GREEDY = ResolvedSampling(temperature=0.0)


@contextlib.contextmanager
def core(
    *,
    overlap: bool = True,
    steps: int = 1,
    pacer: Pacer | None = None,
    journal: Journal | None = None,
    **limits: Any,
) -> Iterator[tuple[EngineCore, LazyRunner]]:
    options: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 12,
        "max_model_len": MAX_LEN,
        "page_size": 4,
        "num_pages": 24,
        "eos_token_ids": EOS,
        "max_queued_requests": 100,
    }
    config = SchedulerConfig(**(options | limits))
    runner, scheduler = LazyRunner(config), Scheduler(config)
    pacer = pacer or Pacer(10.0, steps)
    engine = EngineCore(runner, scheduler, vocab_size=VOCAB, overlap=overlap, pacer=pacer, journal=journal)
    engine.start()
    try:
        yield engine, runner
        assert engine.failure is None
        scheduler.check()
    finally:
        engine.shutdown()


def requests(seed: int) -> list[Request]:
    """Make requests of one to four outputs each."""
    rng = random.Random(seed)
    shared = rng.choices(range(VOCAB), k=20)
    asked = [
        Request(
            f"r{i}",
            (*shared[: rng.randint(1, 20)], *rng.choices(range(VOCAB), k=rng.randint(0, 9))),
            ResolvedSampling(seed=i) if i % 2 else GREEDY,
            StoppingParams(
                max_tokens=rng.choice([None, rng.randint(5, 25)]),
                min_tokens=rng.choice([0, 5]),
                stop_token_ids=(rng.randrange(VOCAB),),
                ignore_eos=rng.random() < 0.5,
            ),
            cache=CacheParams(rng.choice(["", "salt"]), rng.random() < 0.2),
            priority=rng.randint(0, 2),
        )
        for i in range(14)
    ]
    return [output for i, request in enumerate(asked) for output in outputs_of(request, 1 + i % 4)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("cache", [0, None])
@pytest.mark.parametrize("limits", [{}, {"scheduling_policy": "priority"}, {"sliding_window": 9}])
def test_streams_depend_on_nothing_but_the_request(overlap, steps, cache, limits):
    with core(overlap=overlap, steps=steps, prefix_cache_pages=cache, **limits) as (engine, runner):
        sink = Collector()
        asked = requests(7)
        for request in asked:
            engine.submit(request, sink)
        for request in asked:
            last = sink.last(request.request_id)
            assert last.finish is not None
            expected = run_alone(request, MAX_LEN, windows=(limits.get("sliding_window"),))
            assert (sink.tokens(request.request_id), last.finish.reason) == expected
        assert engine.load().pages_used == 0
        assert (max(plan.num_steps for plan in runner.plans) > 1) == (steps > 1)


class Apart(Pacer):
    """Allows windows of any length, and a step for rows under a constraint after six steps of the others."""

    @property
    def apart_steps(self) -> int:
        return 6


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_under_a_constraint_take_turns_with_the_windows_of_the_others(overlap):
    with core(overlap=overlap, pacer=Apart(10.0, 4), num_pages=60) as (engine, runner):
        sink = Collector()
        limits = {"c0": 12, "c1": 20}
        asked = [
            Request(
                name,
                (7, i),
                ResolvedSampling(seed=i),
                StoppingParams(max_tokens=50, ignore_eos=True),
                constraint=Rota(limits[name]) if name in limits else None,
            )
            for i, name in enumerate(["a", "c0", "b", "c1"])
        ]
        for request in asked:
            engine.submit(request, sink)
        for request in asked:
            last = sink.last(request.request_id)
            assert last.finish is not None
            assert (sink.tokens(request.request_id), last.finish.reason) == run_alone(request, MAX_LEN)
        turns = [i for i, plan in enumerate(runner.plans) if plan.apart]
        assert len(turns) > 5
        between = runner.plans[turns[0] : turns[5]]
        assert sum(plan.num_steps > 1 for plan in between) >= 5
        # No step in flight makes tokens for these rows, so their tokens are chosen at once.
        for step in [runner.plans[i].step_id for i in turns[1:]]:
            assert runner.log[runner.log.index(("dispatch", step)) + 1] == ("choose", step)
        assert engine.load().pages_used == 0


class Told(Pacer):
    """Allows two prompt tokens beside decodes, and records what it is told of each step."""

    def __init__(self) -> None:
        super().__init__(10.0, 1)
        self.steps: list[int] = []
        """The number of prompt tokens of each step."""

    def decoded(self, num_steps: int, elapsed_ns: int, *, constrained: bool = False) -> None:
        assert num_steps == 1
        assert elapsed_ns > 0
        self.steps.append(0)

    def prefilled(self, num_tokens: int, elapsed_ns: int) -> None:
        assert elapsed_ns > 0
        self.steps.append(num_tokens)

    @property
    def prefill_budget(self) -> int | None:
        return 2


def test_steps_with_prompt_tokens_are_sized_by_the_pacer_and_measured():
    pacer, collector = Told(), Collector()
    with core(pacer=pacer) as (engine, _):

        def sink(outputs: Sequence[StepOutput]) -> None:
            if "a" not in collector.outputs:
                engine.submit(Request("b", tuple(range(9)), GREEDY, StoppingParams(max_tokens=1)), collector)
            collector(outputs)

        engine.submit(Request("a", (1, 2), GREEDY, StoppingParams(max_tokens=40, ignore_eos=True)), sink)
        collector.last("a")
        assert collector.tokens("b") == run_alone(Request("b", tuple(range(9)), GREEDY), MAX_LEN)[0][:1]
    assert pacer.steps[0] == 2
    assert [num for num in pacer.steps[1:] if num] == [2, 2, 2, 2]  # a chunk of one token counts as a decode
    assert len(pacer.steps) in (40, 41)  # one step more may be in flight at the end


@pytest.mark.parametrize(("fixed", "measured"), [(True, 4), (False, 2)])
@pytest.mark.parametrize("constrained", [True, False])
def test_a_window_whose_rows_end_early_is_measured_by_the_steps_it_ran(fixed, measured, constrained):
    rows = tuple(PlanRow(name, i, 5, 1, None, True, 0, 4) for i, name in enumerate("ab"))
    plan = Plan(0, rows, num_steps=4)
    runner, pacer = Mock(), Mock()
    runner.execute_async.return_value = Mock(awaits_choice=constrained)
    runner.wait.return_value = StepResult([(7,), (7, 0)], [(), ()])
    steps = Steps(runner, pacer, most_in_flight=1, fixed_windows=fixed)
    steps.dispatch(Planned(plan, 0, 0))
    steps.wait()
    pacer.decoded.assert_called_once_with(measured, ANY, constrained=constrained)


def test_a_step_is_dispatched_before_the_one_before_is_read():
    with core() as (engine, runner):
        sink = Collector()
        engine.submit(Request("a", (1,), GREEDY, StoppingParams(max_tokens=4, ignore_eos=True)), sink)
        sink.last("a")
    assert runner.log == [
        ("dispatch", 0),
        ("dispatch", 1),
        ("wait", 0),
        ("dispatch", 2),
        ("wait", 1),
        ("dispatch", 3),
        ("wait", 2),
        ("wait", 3),
    ]


@pytest.mark.parametrize("num_turns", [2, 3, 4])
@pytest.mark.parametrize("constrained", [False, True])
def test_a_step_more_is_in_flight_than_there_are_turns(num_turns, constrained):
    """Rows under a constraint have two steps in flight, because the choice of a token waits for the one
    before. In the end there are fewer requests than turns.
    """
    with core(num_turns=num_turns, num_pages=60) as (engine, runner):
        sink = Collector()
        asked = [
            Request(
                f"r{i}",
                (7, i),
                GREEDY,
                StoppingParams(max_tokens=10 * (1 + i % 4), ignore_eos=True),
                constraint=Rota(99) if constrained else None,
            )
            for i in range(9)
        ]
        for request in asked:
            engine.submit(request, sink)
        for request in asked:
            sink.last(request.request_id)
            assert sink.tokens(request.request_id) == run_alone(request, MAX_LEN)[0]
    depth, depths = 0, []
    for what, _ in runner.log:
        depth += {"dispatch": 1, "wait": -1}.get(what, 0)
        depths.append(depth)
    assert max(depths) == (2 if constrained else 1 + num_turns)


def test_without_overlap_each_step_is_read_before_the_next():
    with core(overlap=False) as (engine, runner):
        sink = Collector()
        engine.submit(Request("a", (1,), GREEDY, StoppingParams(max_tokens=4, ignore_eos=True)), sink)
        sink.last("a")
    assert runner.log == [(what, step) for step in range(4) for what in ("dispatch", "wait")]


@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("policy", list(InFlightPolicy))
def test_weights_are_swapped_with_nothing_in_flight(steps, policy):
    with core(steps=steps) as (engine, runner):
        sink = Collector()
        stopping = StoppingParams(max_tokens=50, ignore_eos=True)
        for i in range(3):
            engine.submit(Request(f"r{i}", (1, 2, 3, 4, 5, i), GREEDY, stopping), sink)
        sink.first("r2")
        seen: list[int] = []

        def install() -> None:
            dispatched, waited = ([w for w, _ in runner.log].count(what) for what in ("dispatch", "wait"))
            seen.append(dispatched - waited)
            runner.generation += 1

        assert engine.changes.update(install, "new", policy).result(60).version.generation == 2
        assert seen == [0]
        after = Request("after", (1, 2, 3, 4, 5, 0), GREEDY, stopping)
        engine.submit(after, sink)
        sink.last("after")
        assert sink.tokens("after") == run_alone(after, MAX_LEN, generation=1)[0]


def test_a_stop_found_outside_in_the_middle_of_a_window_ends_it_there():
    with core(steps=8) as (engine, _):
        sink = Collector()
        engine.submit(Request("a", (1,), GREEDY, StoppingParams(ignore_eos=True)), sink)
        engine.submit(Request("b", (2,), GREEDY, StoppingParams(ignore_eos=True)), sink)
        sink.first("a")
        engine.finish("a", Finish(FinishReason.STOP, stop="."))
        assert sink.last("a").finish in (
            Finish(FinishReason.STOP, stop="."),
            Finish(FinishReason.CONTEXT_FULL),  # the request ended before the stop
        )
        sink.last("b")
        assert (
            sink.tokens("b")
            == run_alone(Request("b", (2,), GREEDY, StoppingParams(ignore_eos=True)), MAX_LEN)[0]
        )


def test_the_cache_can_be_flushed_while_it_serves():
    with core() as (engine, _):
        sink = Collector()
        request = Request("a", tuple(range(12)), GREEDY, StoppingParams(max_tokens=1))
        for name, flushed, cached in (("a", False, 0), ("b", False, 8), ("c", True, 0)):
            if flushed:
                assert engine.flush_prefix_cache() == (3, 0)
            engine.submit(Request(name, request.prompt_token_ids, GREEDY, request.stopping), sink)
            timing = sink.last(name).timing
            assert timing is not None
            assert timing.cached_prompt_tokens == cached
