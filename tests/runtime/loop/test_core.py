"""EngineCore where threads meet: updates, sinks and shutdown that arrive at moments when one could miss the
other.

Each test stops the engine's thread at that moment, so nothing depends on luck.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from penstock.runtime import Engine, StoppingParams
from penstock.runtime.errors import Draining, DuplicateRequestId, EngineFailure
from penstock.runtime.execution.device_state import DeviceState
from penstock.runtime.execution.runner import ModelRunner
from penstock.runtime.loop.changes import BetweenSteps
from penstock.runtime.loop.core import EngineCore
from penstock.runtime.loop.interface import InFlightPolicy, StepRecord
from penstock.runtime.requests.request import Finish, FinishReason, Request, StepOutput
from penstock.runtime.scheduling.scheduler import Load
from penstock.runtime.updating.interface import UpdateReport
from penstock.runtime.updating.update import OneUpdate
from tests.support.collector import GREEDY, GREEDY_PARAMS, Collector, at_gate, long, submit
from tests.support.models.toy import toy_engine, toy_model, toy_tokens

SHUTTING_DOWN = Finish(FinishReason.ABORTED, message="the server is shutting down")


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = toy_engine()
    yield engine
    engine.shutdown()


def update(
    engine: Engine, value: float, policy: InFlightPolicy = InFlightPolicy.WAIT
) -> Future[UpdateReport]:
    tensors = {"offset": np.full((1,), value, np.float32)}
    return engine.update_weights(tensors, label=f"to-{value}", in_flight=policy)


def test_an_update_that_comes_just_after_the_engine_looked_wakes_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Future[UpdateReport]] = []
    ready = threading.Event()
    look = BetweenSteps.make_due

    def look_too_early(changes: BetweenSteps, idle_since_ns: int) -> None:
        look(changes, idle_since_ns)
        if not asked and not engine.pulse().has_work:
            asked.append(update(engine, 5))
            ready.set()

    monkeypatch.setattr(BetweenSteps, "make_due", look_too_early)
    engine.generate([1], sampling=GREEDY_PARAMS, stopping=long(1))
    assert ready.wait(60)
    assert asked[0].result(60).current.label == "to-5"


def test_a_cancelled_update_is_not_applied_and_delays_no_request(engine: Engine) -> None:
    gate = at_gate(engine)
    updates = [update(engine, 5), *(update(engine, 6, policy) for policy in InFlightPolicy)]
    waiting = Collector()
    submit(engine, waiting, "waiting", [2], tokens=5)
    assert all(future.cancel() for future in updates)
    gate.open()
    gate.sink.last("held")
    waiting.last("waiting")
    assert engine.failure is None
    assert gate.sink.tokens("held") == toy_tokens([1], 20)
    assert engine.weights.generation == 1


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Weak references to the leaves that updates have made."""
    made: list[weakref.ref[Any]] = []
    place = DeviceState.place

    def note(device: DeviceState, path: Any, leaf: Any) -> Any:
        value = place(device, path, leaf)
        made.append(weakref.ref(value))
        return value

    monkeypatch.setattr(DeviceState, "place", note)
    return made


def test_a_cancelled_update_holds_no_weights(engine: Engine, placed: list[weakref.ref[Any]]) -> None:
    """Its leaves must be freed although its future is still referenced."""
    gate = at_gate(engine)
    taken_back = update(engine, 5)
    assert placed[0]() is not None
    assert taken_back.cancel()
    assert placed[0]() is None
    gate.open()
    gate.sink.last("held")


def test_an_update_that_is_refused_after_staging_holds_no_weights(
    engine: Engine, placed: list[weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may stop accepting updates while the weights of one are made."""
    finish = OneUpdate.finish

    def then_stop(update: OneUpdate, num_bytes: int) -> None:
        finish(update, num_bytes)
        assert placed[0]() is not None
        EngineCore.shutdown(engine)

    monkeypatch.setattr(OneUpdate, "finish", then_stop)
    with pytest.raises(Draining) as refused:
        update(engine, 5)
    assert placed[0]() is None
    assert refused.value.__traceback__ is not None


@pytest.mark.ci
def test_waiting_for_the_running_includes_the_preempted() -> None:
    """Two requests of 20 tokens cannot both stay in 7 pages of 4, and both must end on the old weights."""
    engine = toy_engine(toy_model(max_model_len=28), kv_cache_bytes=7 * 4 * 2 * 4 * 4)
    try:
        assert engine.info.num_pages == 7
        gate = at_gate(engine, tokens=19)
        other = Collector()
        submit(engine, other, "other", [2], tokens=19)
        gate.open()
        other.first("other")
        future = update(engine, 5)
        last = other.last("other")
        assert last.timing is not None
        assert last.timing.preemptions > 0
        assert other.tokens("other") == toy_tokens([2], 19)
        assert future.result(60).current.generation == 2
    finally:
        engine.shutdown()


def test_shutdown_tells_a_request_that_came_with_the_last_delivery(engine: Engine) -> None:
    """A sink submits again while the engine has nothing else to do, and the shutdown begins before the sink
    returns.
    """
    sink = Collector()
    futures: list[Future[UpdateReport]] = []
    enders: list[threading.Thread] = []

    def again(outputs: Sequence[StepOutput]) -> None:
        submit(engine, sink, "late")
        futures.append(update(engine, 5))
        enders.append(threading.Thread(target=engine.shutdown))
        enders[0].start()
        with contextlib.suppress(Draining):
            while True:
                with contextlib.suppress(DuplicateRequestId):
                    submit(engine, sink, "late")

    # The request expires before its first step, so this delivery comes without a step.
    engine.submit(Request("expired", (1,), GREEDY, StoppingParams(time_limit_s=1e-9)), again)
    assert sink.last("late", timeout_s=60).finish == SHUTTING_DOWN
    with pytest.raises(Draining):
        futures[0].result(60)
    enders[0].join()
    with pytest.raises(Draining):
        update(engine, 5)


def test_drain_waits_for_the_last_delivery(engine: Engine) -> None:
    gate = at_gate(engine, tokens=1)
    assert not engine.drain(0.01)
    gate.open()
    assert engine.drain(60)
    assert gate.sink.tokens("held") == toy_tokens([1], 1)


def test_a_callback_of_a_dead_engines_future_may_call_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callbacks of the future run on the engine's thread, which must not hold the lock then."""

    def boom(*_: object) -> None:
        raise RuntimeError("device lost")

    gate = at_gate(engine)
    monkeypatch.setattr(ModelRunner, "execute_async", boom)
    taken_back, future = update(engine, 4), update(engine, 5)
    running: list[int] = []
    future.add_done_callback(lambda _: running.append(engine.load().num_running))
    assert taken_back.cancel()
    gate.open()
    with pytest.raises(EngineFailure):
        future.result(60)
    assert isinstance(gate.sink.last("held").error, EngineFailure)
    engine.shutdown()  # joins the engine's thread
    assert running == [0]


def test_a_failing_observer_ends_no_request(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        calls = 0

        def on_step(self, record: StepRecord) -> None:
            self.calls += 1
            raise RuntimeError("observer's fault")

    observer = Broken()
    engine = toy_engine(observer=observer)
    try:
        assert list(engine.generate([2], sampling=GREEDY_PARAMS, stopping=long(9)).token_ids) == toy_tokens(
            [2], 9
        )
        assert observer.calls == 1  # not called again: a log entry for each step would help nobody
        assert "observer" in caplog.text
    finally:
        engine.shutdown()


def test_a_cancel_on_the_thread_that_holds_the_lock_is_done_later(engine: Engine) -> None:
    """This happens if the garbage collector closes an abandoned stream in the middle of a call of the
    scheduler.
    """
    gate = at_gate(engine, tokens=100)
    with engine.guard.lock:
        engine.cancel("held")
    gate.open()
    follower = Collector()
    submit(engine, follower, "follower", [2], tokens=5)
    assert follower.last("follower").finish == Finish(FinishReason.MAX_TOKENS)
    assert engine.load().pages_used == 0
    assert len(gate.sink.tokens("held")) < 100


def test_a_cancel_waits_for_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called on event loops, for up to 128 outputs of a request, and in destructors."""
    gate = at_gate(engine, tokens=100)

    class Forbidden:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"the engine's lock was asked for: {name}")

    try:
        with monkeypatch.context() as without:
            without.setattr(engine.guard, "lock", Forbidden())
            engine.cancel("unknown", "held")
        assert engine.load() == Load.idle(engine.info.num_pages), "load() must not count a cancelled request"
    finally:
        gate.open()


def test_a_cancelled_id_is_free_at_once(engine: Engine) -> None:
    """This holds in the middle of a step too, before the engine's thread has done anything about the
    cancel.
    """
    gate = at_gate(engine, tokens=100)
    again = Collector()
    engine.cancel("held")
    submit(engine, again, "held", [2], tokens=5)
    gate.open()
    assert again.last("held").finish == Finish(FinishReason.MAX_TOKENS)
    assert again.tokens("held") == toy_tokens([2], 5)


def test_a_drain_ends_with_a_cancel(engine: Engine) -> None:
    gate = at_gate(engine, tokens=100_000)
    engine.cancel("held")
    gate.open()
    assert engine.drain(60)


@pytest.mark.ci
def test_an_aborting_update_spares_those_that_have_not_started() -> None:
    engine = toy_engine(max_num_seqs=1)
    try:
        gate = at_gate(engine, tokens=100)
        waiting = Collector()
        submit(engine, waiting, "waiting", [2], tokens=10)
        done = update(engine, 5, InFlightPolicy.ABORT)
        gate.open()
        assert done.result(60).current.generation == 2
        finish = gate.sink.last("held").finish
        assert finish == Finish(FinishReason.ABORTED, message="weights were updated to 'to-5'")
        assert waiting.last("waiting").finish == Finish(FinishReason.MAX_TOKENS)
        assert waiting.tokens("waiting") == toy_tokens([2], 10, offset=5)
    finally:
        engine.shutdown()


def test_an_engine_is_started_once(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="started before"):
        engine.start()
