"""Weights that are replaced in place while the engine is held, weights that are broken by that, and what the
engine reports about its weights.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from penstock.runtime.errors import WeightsIncomplete, WeightsTooOld
from penstock.runtime.loop.changes import MOST_REMEMBERED
from penstock.runtime.loop.core import EngineCore
from penstock.runtime.loop.interface import InFlightPolicy, InFlightReport, WeightsVersion
from penstock.runtime.requests.request import FinishReason, Request, StoppingParams
from penstock.runtime.scheduling.plan import StepResult
from tests.runtime.loop.test_core_streams import MAX_LEN, core
from tests.support.collector import GREEDY, Collector, Gate
from tests.support.scheduler.fake_runner import LazyRunner, LazyStep, run_alone

ABORT, KEEP = InFlightPolicy.ABORT, InFlightPolicy.KEEP
RECOMPUTE, WAIT = InFlightPolicy.RECOMPUTE, InFlightPolicy.WAIT
LIMIT_S = 60
TOKENS = 30


def is_paused(engine: EngineCore) -> bool:
    """Say whether the engine is paused, by a call, because mypy takes an attribute for unchanged until it is
    assigned.
    """
    return engine.changes.is_paused


def problem_of(engine: EngineCore) -> str | None:
    """Return the engine's problem, by a call for the same reason."""
    return engine.changes.weights_problem


def asked(name: str, **options: Any) -> Request:
    return Request(name, (1, 2, 3, len(name)), GREEDY, StoppingParams(TOKENS, ignore_eos=True), **options)


def at_gate(engine: EngineCore, name: str) -> Gate:
    gate = Gate()
    engine.submit(asked(name), gate)
    assert gate.reached.wait(LIMIT_S)
    return gate


def installing(runner: LazyRunner) -> Callable[[], None]:
    def install() -> None:
        runner.generation += 1

    return install


@pytest.mark.parametrize("policy", list(InFlightPolicy))
def test_no_step_is_made_while_weights_are_replaced_in_place(policy: InFlightPolicy) -> None:
    with core(max_num_seqs=1) as (engine, runner):
        gate, sink = at_gate(engine, "running"), Collector()
        engine.submit(asked("waiting"), sink)
        holding = engine.changes.hold_for_update(policy)
        gate.open()
        report = holding.result(LIMIT_S)
        count = {WAIT: "waited", ABORT: "aborted", KEEP: "kept", RECOMPUTE: "recomputed"}[policy]
        assert report == InFlightReport(**{count: 1})
        num_steps, before = len(runner.plans), time.monotonic_ns()
        made = gate.sink.tokens("running")
        assert not engine.pulse().has_work
        assert engine.ready
        engine.submit(asked("late"), sink)
        runner.generation += 1  # the new weights, on the thread of the caller that replaces them
        assert len(runner.plans) == num_steps
        start, after = dt.datetime.now(dt.UTC), time.monotonic_ns()
        applied = engine.changes.release_hold("in place")
        assert applied.in_flight == report
        assert (applied.version, applied.previous) == (
            WeightsVersion("in place", 2),
            WeightsVersion("initial", 1),
        )
        assert applied.paused_ns >= after - before
        assert start <= applied.applied_at == engine.changes.weights_since <= dt.datetime.now(dt.UTC)
        for name in ("waiting", "late"):
            sink.last(name)
            assert sink.tokens(name) == run_alone(asked(name), MAX_LEN, generation=1)[0]
        finish = gate.sink.last("running").finish
        assert finish is not None
        outputs = gate.sink.outputs["running"]
        assert sum(len(o.token_ids) for o in outputs if o.weights_generation == 1) == len(made)
        if policy is ABORT:
            assert finish.message == "weights are being updated"
        elif policy is WAIT:
            assert gate.sink.tokens("running") == run_alone(asked("running"), MAX_LEN)[0]
        elif policy is RECOMPUTE:
            again = run_alone(asked("running"), MAX_LEN, generation=1, made=made)[0]
            assert gate.sink.tokens("running") == again
        with pytest.raises(RuntimeError, match="no hold"):
            engine.changes.release_hold("twice")
        assert engine.weights.generation == 2


def test_a_hold_that_is_dropped_has_changed_nothing() -> None:
    with core() as (engine, _):
        gate = at_gate(engine, "running")
        taken_back, holding = engine.changes.hold_for_update(KEEP), engine.changes.hold_for_update(KEEP)
        assert taken_back.cancel()
        gate.open()
        assert holding.result(LIMIT_S).kept == 1
        engine.changes.drop_hold()
        gate.sink.last("running")
        assert gate.sink.tokens("running") == run_alone(asked("running"), MAX_LEN)[0]
        assert engine.weights == WeightsVersion("initial", 1)
        engine.changes.drop_hold()


def test_all_other_changes_wait_for_the_end_of_a_hold() -> None:
    """A pause waits too, because it may move the weights that are being replaced."""
    with core() as (engine, runner):
        engine.changes.hold_for_update(WAIT).result(LIMIT_S)
        futures: list[Future[Any]] = [
            engine.changes.resume(),
            engine.changes.update(installing(runner), "later", KEEP),
            engine.changes.hold_for_update(KEEP),
            engine.changes.pause(KEEP, offload_weights=True),
        ]
        assert futures[1].cancel()
        sink = Collector()
        engine.submit(asked("request"), sink)  # wakes the engine's thread
        assert not any(future.done() for future in futures if not future.cancelled())
        assert engine.changes.release_hold("in place").version.generation == 2
        futures[2].result(LIMIT_S)
        assert not is_paused(engine)
        engine.changes.drop_hold()
        futures[3].result(LIMIT_S)
        assert is_paused(engine)
        assert runner.offloaded
        engine.changes.resume().result(LIMIT_S)
        sink.last("request")


class Told:
    """Records whether the engine is ready each time that it reports a change of that."""

    def __init__(self, engine: EngineCore) -> None:
        self.ready: list[bool] = []
        self._engine = engine
        self._changed = threading.Condition()
        engine.on_ready_changed(self._note)

    def _note(self) -> None:
        with self._changed:
            self.ready.append(self._engine.ready)
            self._changed.notify_all()

    def wait_for(self, ready: list[bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.ready == ready, LIMIT_S), self.ready


@pytest.mark.parametrize("mended_by", ["update", "hold"])
@pytest.mark.parametrize("broken_by", ["hold", "install"])
def test_broken_weights_serve_nobody_until_an_update_of_all_of_them(mended_by: str, broken_by: str) -> None:
    with core(max_num_seqs=1) as (engine, runner):

        def broken() -> None:
            raise RuntimeError("a watch that breaks")

        told = Told(engine)
        engine.on_ready_changed(broken)  # it keeps no other listener from hearing
        gate, sink = at_gate(engine, "running"), Collector()
        engine.submit(asked("waiting"), sink)
        if broken_by == "hold":
            holding = engine.changes.hold_for_update(KEEP)
            gate.open()
            holding.result(LIMIT_S)
            engine.changes.break_weights("the sender left")
        else:

            def install() -> None:
                engine.changes.break_weights("the sender left")
                raise OSError("no room")

            update = engine.changes.update(install, "bad", KEEP)
            gate.open()
            assert isinstance(update.exception(LIMIT_S), OSError)
        told.wait_for([False])
        for name, where in (("running", gate.sink), ("waiting", sink)):
            assert isinstance(where.last(name).error, WeightsIncomplete)
        made = gate.sink.tokens("running")
        assert made == run_alone(asked("running"), MAX_LEN)[0][: len(made)]
        assert engine.load().pages_used == 0
        assert engine.failure is None
        assert problem_of(engine) == "the sender left"
        for _ in range(2):
            with pytest.raises(WeightsIncomplete, match="the sender left"):
                engine.submit(asked("new"), sink)
        for future in (
            engine.changes.update(installing(runner), "part", KEEP, whole=False),
            engine.changes.hold_for_update(KEEP, whole=False),
        ):
            assert isinstance(future.exception(LIMIT_S), WeightsIncomplete)
        assert runner.generation == 0
        if mended_by == "update":
            applied = engine.changes.update(installing(runner), "whole", WAIT).result(LIMIT_S)
        else:
            engine.changes.hold_for_update(WAIT).result(LIMIT_S)
            runner.generation += 1
            applied = engine.changes.release_hold("whole")
        assert applied.version == WeightsVersion("whole", 2)
        told.wait_for([False, True])
        assert problem_of(engine) is None
        engine.submit(asked("new"), sink)
        sink.last("new")
        assert sink.tokens("new") == run_alone(asked("new"), MAX_LEN, generation=1)[0]


def test_a_request_may_ask_for_weights_that_are_new_enough() -> None:
    with core() as (engine, runner):
        sink = Collector()
        engine.submit(asked("old", min_generation=1), sink)
        sink.first("old")
        with pytest.raises(WeightsTooOld) as refused:
            engine.submit(asked("new", min_generation=2), sink)
        assert (refused.value.wanted, refused.value.serving) == (2, 1)
        engine.changes.update(installing(runner), "new", WAIT).result(LIMIT_S)
        engine.submit(asked("new", min_generation=2), sink)
        for name, generation in (("old", 0), ("new", 1)):
            finish = sink.last(name).finish
            assert finish is not None
            assert finish.reason is FinishReason.MAX_TOKENS
            assert sink.tokens(name) == run_alone(asked(name), MAX_LEN, generation=generation)[0]


def test_versions_of_the_past_are_remembered_by_their_generation() -> None:
    with core() as (engine, runner):
        changes, before = engine.changes, engine.changes.weights_since
        assert changes.version_of(1) == changes.weights == WeightsVersion("initial", 1)
        updates = [changes.update(installing(runner), f"step-{i}", KEEP) for i in range(MOST_REMEMBERED + 3)]
        assert updates[-1].result(LIMIT_S).previous.label == f"step-{MOST_REMEMBERED + 1}"
        newest = MOST_REMEMBERED + 4
        assert changes.weights == changes.version_of(newest)
        assert changes.version_of(newest).label == f"step-{newest - 2}"
        oldest = newest - MOST_REMEMBERED + 1
        assert changes.version_of(oldest) == WeightsVersion(f"step-{oldest - 2}", oldest)
        assert changes.version_of(oldest - 1) == WeightsVersion("", oldest - 1)
        assert changes.version_of(newest + 1) == WeightsVersion("", newest + 1)
        assert changes.weights_since > before
        assert changes.weights_since.tzinfo is dt.UTC


def test_the_time_without_tokens_is_measured() -> None:
    """It is at least what the swap takes, and does not count the wait for running requests."""
    with core() as (engine, runner):
        swap_s, step_s = 0.05, 0.02

        def install() -> None:
            time.sleep(swap_s)

        idle = engine.changes.update(install, "idle", KEEP).result(LIMIT_S)
        assert idle.paused_ns >= swap_s * 1e9
        wait = runner.wait

        def slow(step: LazyStep) -> StepResult:
            time.sleep(step_s)
            return wait(step)

        runner.wait = slow  # type: ignore[method-assign]
        gate = at_gate(engine, "running")
        began_ns = time.monotonic_ns()
        updating = engine.changes.update(install, "waits", WAIT)
        gate.open()
        waited = updating.result(LIMIT_S)
        whole_ns = time.monotonic_ns() - began_ns
        assert swap_s * 1e9 <= waited.paused_ns <= whole_ns - (TOKENS - 2) * step_s * 1e9
