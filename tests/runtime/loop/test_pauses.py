"""A paused engine makes no tokens and accepts everything else. The runner is the fake one, whose tokens the
tests know; the gate holds the engine's thread while the first token of a request is delivered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from penstock.runtime.errors import (
    Draining,
    DrainTimeout,
    InvalidRequest,
    PausedWithRequests,
    PauseTakenBack,
)
from penstock.runtime.loop.core import EngineCore
from penstock.runtime.loop.interface import InFlightPolicy, InFlightReport, Paused
from penstock.runtime.requests.request import (
    Finish,
    FinishReason,
    Request,
    StepOutput,
    StoppingParams,
    outputs_of,
)
from tests.runtime.loop.test_core_streams import MAX_LEN, core
from tests.support.collector import GREEDY, Collector, Gate
from tests.support.scheduler.fake_runner import WEIGHT_BYTES, LazyRunner, run_alone

ABORT, KEEP = InFlightPolicy.ABORT, InFlightPolicy.KEEP
RECOMPUTE, WAIT = InFlightPolicy.RECOMPUTE, InFlightPolicy.WAIT
PAUSED = Finish(FinishReason.ABORTED, message="the server was paused")
LIMIT_S = 60
NUM_PAGES = 24


def is_paused(engine: EngineCore) -> bool:
    """Say whether the engine is paused, by a call, because mypy takes an attribute for unchanged until it is
    assigned.
    """
    return engine.changes.is_paused


def asked(name: str, tokens: int = 30, **options: Any) -> Request:
    stopping = StoppingParams(tokens, ignore_eos=True, **options)
    return Request(name, (1, 2, 3, len(name)), GREEDY, stopping)


def expected(request: Request, generation: int = 0, made: Sequence[int] = ()) -> list[int]:
    return run_alone(request, MAX_LEN, generation=generation, made=made)[0]


def at_gate(engine: EngineCore, request: Request) -> Gate:
    gate = Gate()
    engine.submit(request, gate)
    assert gate.reached.wait(LIMIT_S)
    return gate


def all_at_gate(engine: EngineCore, requests: Sequence[Request]) -> Gate:
    """As many of the requests as fit enter in one step, and its tokens are being delivered."""
    first, gate = at_gate(engine, asked("first", tokens=1)), Gate()
    for request in requests:
        engine.submit(request, gate)
    first.open()
    assert gate.reached.wait(LIMIT_S)
    return gate


def new_weights(runner: LazyRunner) -> Callable[[], None]:
    def install() -> None:
        runner.generation += 1

    return install


def num_dispatched(runner: LazyRunner) -> int:
    return len([what for what, _ in runner.log if what == "dispatch"])


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("policy", list(InFlightPolicy))
def test_a_pause_treats_running_requests_by_its_policy(policy: InFlightPolicy, free: bool) -> None:
    """One request runs and one waits. Another one comes while the engine is paused."""
    if policy is KEEP and free:
        return  # this is refused, see test_a_kept_request_needs_the_cache
    with core(max_num_seqs=1) as (engine, runner):
        running, waiting, late = (asked(name) for name in ("running", "waiting", "late"))
        gate, sink = at_gate(engine, running), Collector()
        engine.submit(waiting, sink)
        pausing = engine.changes.pause(policy, free_kv_cache=free, offload_weights=free)
        assert not is_paused(engine)
        gate.open()
        paused = pausing.result(LIMIT_S)
        assert is_paused(engine)
        count = {WAIT: "waited", ABORT: "aborted", KEEP: "kept", RECOMPUTE: "recomputed"}[policy]
        assert paused.in_flight == InFlightReport(**{count: 1})
        assert paused.freed_bytes == (NUM_PAGES + WEIGHT_BYTES if free else 0)
        engine.submit(late, sink)
        before = num_dispatched(runner)
        load = engine.load()
        assert load.num_running == (policy is KEEP)
        assert load.num_waiting == 2 + (policy is RECOMPUTE)
        assert engine.changes.pause(ABORT if policy is WAIT else policy).result(LIMIT_S).freed_bytes == 0
        assert not engine.pulse().has_work, "otherwise the watchdog would report that the engine hangs"
        assert engine.ready
        assert num_dispatched(runner) == before
        assert "waiting" not in sink.outputs
        engine.changes.resume().result(LIMIT_S)
        assert not is_paused(engine)
        for request in (waiting, late):
            assert sink.last(request.request_id).finish == Finish(FinishReason.MAX_TOKENS)
            assert sink.tokens(request.request_id) == expected(request)
        last = gate.sink.last("running")
        made = gate.sink.tokens("running")
        assert last.timing is not None
        if policy is ABORT:
            assert (last.finish, made) == (PAUSED, expected(running)[: len(made)])
        else:
            assert made == expected(running)
            assert last.timing.preemptions == (policy is RECOMPUTE)


@pytest.mark.parametrize("policy", [WAIT, ABORT])
@pytest.mark.parametrize("is_update", [False, True])
def test_a_request_of_several_outputs_counts_as_one_and_starts_with_its_first(
    policy: InFlightPolicy, is_update: bool
) -> None:
    """Two slots for four outputs: two of them wait while the others run. A change that waits for the request
    waits for all four, and one that ends it ends all four.
    """
    with core(max_num_seqs=2) as (engine, runner):
        outputs = outputs_of(asked("many"), 4)
        gate, sink = all_at_gate(engine, outputs), Collector()
        late = asked("late")
        engine.submit(late, sink)
        done: Future[Any]
        if is_update:
            done = engine.changes.update(new_weights(runner), "new", policy)
        else:
            done = engine.changes.pause(policy)
        gate.open()
        report = done.result(LIMIT_S).in_flight
        assert report == (InFlightReport(waited=1) if policy is WAIT else InFlightReport(aborted=1))
        engine.changes.resume().result(LIMIT_S)
        for output in outputs:
            name = output.request_id
            last = gate.sink.last(name)
            assert last.finish is not None
            made = gate.sink.tokens(name)
            if policy is WAIT:
                assert made == expected(output)
            else:
                assert last.finish.reason is FinishReason.ABORTED
                assert made == expected(output)[: len(made)]
            assert {each.weights_generation for each in gate.sink.outputs[name]} == {1}
        sink.last("late")
        assert sink.tokens("late") == expected(late, generation=int(is_update))


def test_a_preempted_request_comes_back_while_a_pause_waits_for_it() -> None:
    """There are pages for one and a half of the two requests, so one is preempted, and both must end before
    the pause.
    """
    with core(num_pages=12) as (engine, _):
        requests = [asked("a", tokens=34), asked("bb", tokens=34)]
        gate = all_at_gate(engine, requests)
        pausing = engine.changes.pause(WAIT)
        gate.open()
        assert pausing.result(LIMIT_S).in_flight.waited == 2
        timings = [gate.sink.last(request.request_id).timing for request in requests]
        assert sum(timing.preemptions for timing in timings if timing is not None) > 0
        assert [gate.sink.tokens(r.request_id) for r in requests] == [expected(r) for r in requests]


def test_a_kept_request_needs_the_cache() -> None:
    with core() as (engine, _):
        with pytest.raises(InvalidRequest) as refused:
            engine.changes.pause(KEEP, free_kv_cache=True)
        assert [violation.field for violation in refused.value.violations] == ["free_kv_cache"]
        for seconds in (-1.0, float("nan"), float("inf")):
            with pytest.raises(InvalidRequest) as refused:
                engine.changes.pause(WAIT, drain_timeout_s=seconds)
            assert [violation.field for violation in refused.value.violations] == ["drain_timeout"]
        assert not is_paused(engine)


def test_a_paused_engine_may_be_paused_for_more() -> None:
    """The second pause drops what the first one kept, and frees what the first one did not."""
    with core() as (engine, runner):
        request = asked("kept")
        gate = at_gate(engine, request)
        pausing = engine.changes.pause(KEEP)
        gate.open()
        assert pausing.result(LIMIT_S) == Paused(InFlightReport(kept=1))
        assert engine.changes.pause(KEEP).result(LIMIT_S) == Paused(InFlightReport(kept=1))
        with pytest.raises(PausedWithRequests):
            engine.changes.pause(WAIT, free_kv_cache=True).result(LIMIT_S)
        assert runner.kv
        both = engine.changes.pause(RECOMPUTE, free_kv_cache=True).result(LIMIT_S)
        assert both == Paused(InFlightReport(recomputed=1), NUM_PAGES)
        freed = engine.changes.pause(RECOMPUTE, free_kv_cache=True, offload_weights=True).result(LIMIT_S)
        assert freed == Paused(InFlightReport(recomputed=1), WEIGHT_BYTES)
        engine.changes.resume().result(LIMIT_S)
        gate.sink.last("kept")
        assert gate.sink.tokens("kept") == expected(request)


def test_prefixes_of_a_freed_cache_are_forgotten() -> None:
    with core() as (engine, _):
        sink = Collector()
        for name in ("a", "b"):
            engine.submit(Request(name, tuple(range(12)), GREEDY, StoppingParams(2, ignore_eos=True)), sink)
            timing = sink.last(name).timing
            assert timing is not None
            assert timing.cached_prompt_tokens == 0
            engine.changes.pause(WAIT, free_kv_cache=True).result(LIMIT_S)
            engine.changes.resume().result(LIMIT_S)


def test_a_change_whose_drain_takes_too_long_is_refused_and_others_go_on() -> None:
    with core(max_num_seqs=2) as (engine, runner):
        running, waiting = asked("running"), asked("waiting")
        gate, sink = at_gate(engine, running), Collector()
        engine.submit(waiting, sink)
        futures: list[Future[Any]] = [
            engine.changes.update(new_weights(runner), "new", WAIT, drain_timeout_s=0),
            engine.changes.pause(WAIT, drain_timeout_s=0),
            engine.changes.hold_for_update(WAIT, drain_timeout_s=0),
        ]
        patient = engine.changes.pause(WAIT, drain_timeout_s=1000)
        gate.open()
        for future in futures:
            with pytest.raises(DrainTimeout, match="0 s"):
                future.result(LIMIT_S)
        assert patient.result(LIMIT_S).in_flight.waited == 1
        assert engine.weights.generation == 1
        assert gate.sink.tokens("running") == expected(running)
        engine.changes.resume().result(LIMIT_S)
        sink.last("waiting")
        assert sink.tokens("waiting") == expected(waiting)


def test_time_goes_on_in_a_pause() -> None:
    """The engine's thread has no steps to make, and must wake up for each time limit."""
    with core() as (engine, runner):
        sink = Collector()
        engine.changes.pause(WAIT).result(LIMIT_S)
        engine.submit(asked("limited", time_limit_s=0.05), sink)
        assert sink.last("limited").finish == Finish(FinishReason.TIME_LIMIT)
        engine.changes.hold_for_update(WAIT).result(LIMIT_S)
        late = engine.changes.update(new_weights(runner), "new", WAIT, drain_timeout_s=0.05)
        with pytest.raises(DrainTimeout, match="an update before"):
            late.result(LIMIT_S)
        engine.changes.drop_hold()


def test_cancelled_and_aborted_requests_end_in_a_pause() -> None:
    with core(max_num_seqs=2) as (engine, _):
        gate = all_at_gate(engine, [asked(name) for name in ("a", "b", "c")])
        pausing = engine.changes.pause(KEEP)
        gate.open()
        assert pausing.result(LIMIT_S).in_flight.kept == 2
        assert not engine.drain(0)
        engine.cancel("a", "c")
        load = engine.load()
        assert (load.num_running, load.num_waiting) == (1, 0)
        engine.abort(["b"], message="no more")
        assert gate.sink.last("b").finish == Finish(FinishReason.ABORTED, message="no more")
        assert engine.drain(LIMIT_S)
        assert engine.load().pages_used == 0


@pytest.mark.parametrize("is_held", [False, True])
def test_a_shutdown_ends_requests_that_a_pause_or_a_hold_keeps(is_held: bool) -> None:
    with core(max_num_seqs=1) as (engine, runner):
        gate = at_gate(engine, asked("running"))
        engine.submit(asked("waiting"), gate)
        stopping: Future[Any]
        stopping = engine.changes.hold_for_update(KEEP) if is_held else engine.changes.pause(KEEP)
        gate.open()
        stopping.result(LIMIT_S)
        queued = engine.changes.update(new_weights(runner), "new", KEEP) if is_held else None
        ender = threading.Thread(target=engine.shutdown)
        ender.start()
        ender.join(LIMIT_S)
        assert not ender.is_alive()
        for name in ("running", "waiting"):
            finish = gate.sink.last(name).finish
            assert finish == Finish(FinishReason.ABORTED, message="the server is shutting down")
        if queued is not None:
            assert isinstance(queued.exception(LIMIT_S), Draining)
            with pytest.raises(Draining):
                engine.changes.release_hold("new")
            engine.changes.break_weights("told too late to matter")
        with pytest.raises(Draining):
            engine.changes.resume()
        assert engine.weights.generation == 1


@pytest.mark.parametrize("policy", [KEEP, RECOMPUTE])
def test_weights_are_updated_in_a_pause(policy: InFlightPolicy) -> None:
    """Requests that the pause keeps can be computed again, but cannot be waited for."""
    with core() as (engine, runner):
        request = asked("kept")
        gate = at_gate(engine, request)
        pausing = engine.changes.pause(KEEP, offload_weights=True)
        gate.open()
        pausing.result(LIMIT_S)
        made = gate.sink.tokens("kept")
        waits = engine.changes.update(new_weights(runner), "never", WAIT)
        with pytest.raises(PausedWithRequests, match="keeps 1 requests"):
            waits.result(LIMIT_S)
        assert engine.weights.generation == 1
        with pytest.raises(PausedWithRequests):
            engine.changes.hold_for_update(WAIT).result(LIMIT_S)
        applied = engine.changes.update(new_weights(runner), "new", policy).result(LIMIT_S)
        count = "kept" if policy is KEEP else "recomputed"
        assert applied.in_flight == InFlightReport(**{count: 1})
        assert runner.offloaded
        engine.changes.resume().result(LIMIT_S)
        outputs = gate.sink.outputs["kept"]
        gate.sink.last("kept")
        assert [o.weights_generation for o in outputs] == [1] * len(made) + [2] * (30 - len(made))
        if policy is RECOMPUTE:
            assert gate.sink.tokens("kept") == expected(request, 1, made)


@pytest.mark.parametrize("policy", [KEEP, ABORT])
def test_a_pause_passes_an_update_that_waits(policy: InFlightPolicy) -> None:
    """The requests that the update waits for cannot end while the engine is paused, unless the pause ends
    them.
    """
    with core() as (engine, runner):
        request = asked("running")
        gate = at_gate(engine, request)
        updating = engine.changes.update(new_weights(runner), "new", WAIT)
        pausing = engine.changes.pause(policy)
        gate.open()
        pausing.result(LIMIT_S)
        if policy is KEEP:
            assert isinstance(updating.exception(LIMIT_S), PausedWithRequests)
        else:
            assert updating.result(LIMIT_S).version.generation == 2
        assert is_paused(engine)
        engine.changes.resume().result(LIMIT_S)
        gate.sink.last("running")
        made = gate.sink.tokens("running")
        assert made == expected(request)[: len(made)]
        assert (len(made) == 30) == (policy is KEEP)


def test_an_update_passes_a_pause_that_waits_and_no_other_update() -> None:
    with core() as (engine, runner):
        gate = at_gate(engine, asked("running"))
        pausing = engine.changes.pause(WAIT)
        first = engine.changes.update(new_weights(runner), "first", KEEP)
        second = engine.changes.update(new_weights(runner), "second", WAIT)
        third = engine.changes.update(new_weights(runner), "third", KEEP)
        gate.open()
        applied = [future.result(LIMIT_S) for future in (first, second, third)]
        assert [a.version.generation for a in applied] == [2, 3, 4]
        assert [a.in_flight.kept for a in applied] == [1, 0, 0]
        assert applied[1].in_flight.waited == 1
        assert pausing.result(LIMIT_S).in_flight.waited == 1
        generations = {output.weights_generation for output in gate.sink.outputs["running"]}
        assert generations == {1, 2}


def test_a_resume_cancels_a_pause_that_waits() -> None:
    with core(max_num_seqs=2) as (engine, _):
        running, waiting = asked("running"), asked("waiting")
        gate, sink = at_gate(engine, running), Collector()
        pausing = engine.changes.pause(WAIT, free_kv_cache=True)
        cancelled = engine.changes.pause(WAIT)
        engine.submit(waiting, sink)
        assert cancelled.cancel()
        resuming = engine.changes.resume()
        assert isinstance(pausing.exception(LIMIT_S), PauseTakenBack)
        gate.open()
        resuming.result(LIMIT_S)
        assert not is_paused(engine)
        gate.sink.last("running")
        sink.last("waiting")
        assert sink.tokens("waiting") == expected(waiting)


def test_a_cancelled_pause_delays_nothing() -> None:
    with core(max_num_seqs=2) as (engine, _):
        running, waiting = asked("running"), asked("waiting")
        gate, sink = at_gate(engine, running), Collector()
        futures = [engine.changes.pause(policy) for policy in InFlightPolicy]
        engine.submit(waiting, sink)
        assert all(future.cancel() for future in futures)
        gate.open()
        sink.last("waiting")
        assert gate.sink.last("running").finish == Finish(FinishReason.MAX_TOKENS)
        assert not is_paused(engine)
        assert gate.sink.tokens("running") == expected(running)


@pytest.mark.parametrize("where", ["offload_weights", "free_kv_cache"])
def test_memory_that_cannot_be_freed_is_an_error_of_the_caller(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """If the pause has freed nothing, the engine is not paused. If it has freed a half, only a resume lets
    the engine go on.
    """
    with core() as (engine, runner):
        monkeypatch.setattr(runner, where, raising := raises(MemoryError("no room")))
        pausing = engine.changes.pause(ABORT, free_kv_cache=True, offload_weights=True)
        assert isinstance(pausing.exception(LIMIT_S), MemoryError)
        assert raising.calls == 1
        assert is_paused(engine) == (where == "free_kv_cache")
        engine.changes.resume().result(LIMIT_S)
        sink = Collector()
        engine.submit(asked("after"), sink)
        sink.last("after")
        assert sink.tokens("after") == expected(asked("after"))


@pytest.mark.parametrize("where", ["restore_weights", "restore_kv_cache"])
def test_a_resume_that_fails_can_be_tried_again(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    with core() as (engine, runner):
        engine.changes.pause(WAIT, free_kv_cache=True, offload_weights=True).result(LIMIT_S)
        sink = Collector()
        engine.submit(asked("after"), sink)
        with monkeypatch.context() as patch:
            patch.setattr(runner, where, raises(MemoryError("no room")))
            assert isinstance(engine.changes.resume().exception(LIMIT_S), MemoryError)
        assert is_paused(engine)
        engine.changes.resume().result(LIMIT_S)
        sink.last("after")
        assert sink.tokens("after") == expected(asked("after"))


def raises(error: Exception) -> Any:
    class Raising:
        calls = 0

        def __call__(self) -> int:
            self.calls += 1
            raise error

    return Raising()


def test_a_resume_without_a_pause_is_fine() -> None:
    with core() as (engine, _):
        engine.changes.resume().result(LIMIT_S)
        sink = Collector()
        engine.submit(asked("a"), sink)
        sink.last("a")


def test_outputs_of_a_request_that_a_pause_ends_come_in_order() -> None:
    """The last output comes after all tokens that were in flight."""
    with core() as (engine, _):
        seen: list[StepOutput] = []
        gate = Gate()

        def sink(outputs: Sequence[StepOutput]) -> None:
            gate(outputs)
            seen.extend(outputs)

        engine.submit(asked("running"), sink)
        assert gate.reached.wait(LIMIT_S)
        pausing = engine.changes.pause(ABORT)
        gate.open()
        pausing.result(LIMIT_S)
        gate.sink.last("running")
        assert [output.last for output in seen] == [False] * (len(seen) - 1) + [True]
        made = [token for output in seen for token in output.token_ids]
        assert len(made) == 2, "one token was being delivered, and the next was in flight"
        assert made == expected(asked("running"))[:2]
