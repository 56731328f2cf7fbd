"""The end of an engine: whatever breaks, on whichever thread, everybody who waits gets an error, and nothing
hangs.

The runner is the fake one; what breaks is replaced by something that raises. A panic in Rust is a
BaseException and no Exception.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from penstock.runtime.errors import EngineDead, EngineFailure, NotReady
from penstock.runtime.loop.core import EngineCore
from penstock.runtime.loop.guard import Life
from penstock.runtime.loop.interface import InFlightPolicy, StepRecord
from penstock.runtime.loop.requests import Delivery
from penstock.runtime.requests.request import Request, StepOutput, StoppingParams
from penstock.runtime.scheduling.roster import Roster
from penstock.runtime.scheduling.scheduler import Load, Scheduler, SchedulerConfig
from tests.support.collector import GREEDY, Collector, Gate
from tests.support.scheduler.fake_runner import EOS, VOCAB, LazyRunner, Rota

NUM_PAGES = 24
WAIT_S = 60


class PanicException(BaseException):
    """Stands for pyo3's exception of this name."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


ERRORS = [RuntimeError("lost"), PanicException("lost"), SystemExit(1), KeyboardInterrupt(), Unprintable()]


class Rig:
    """An engine with one request held at the gate in the middle of its output, and one that waits."""

    def __init__(self, observer: Any = None) -> None:
        config = SchedulerConfig(
            max_num_seqs=1,
            max_num_batched_tokens=12,
            max_model_len=60,
            page_size=4,
            num_pages=NUM_PAGES,
            eos_token_ids=EOS,
            max_queued_requests=100,
        )
        self.runner = LazyRunner(config)
        self.scheduler = Scheduler(config)
        self.engine = EngineCore(self.runner, self.scheduler, vocab_size=VOCAB, observer=observer)
        self.gate, self.waiting = Gate(), Collector()

    def start(self, constraint: Rota | None = None) -> None:
        self.engine.start()
        self.submit("running", self.gate, constraint=constraint)
        assert self.gate.reached.wait(WAIT_S)
        self.submit("waiting", self.waiting)

    def submit(
        self,
        name: str,
        sink: Callable[[Sequence[StepOutput]], None],
        tokens: int | None = None,
        constraint: Rota | None = None,
    ) -> None:
        stopping = StoppingParams(tokens, ignore_eos=True)
        self.engine.submit(Request(name, (1,), GREEDY, stopping, constraint=constraint), sink)

    def join(self) -> None:
        """Wait until the engine's thread has ended."""
        for thread in threading.enumerate():
            if thread.name == "penstock-engine" and thread.ident == self.engine.pulse().thread_id:
                thread.join(WAIT_S)
                assert not thread.is_alive()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.gate.open()
    rig.engine.shutdown()


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


def expect_death(rig: Rig, cause: BaseException, *, told: Sequence[Collector], callers: bool = False) -> None:
    """Assert all that must be true of a dead engine, before and after it is shut down. `callers`: the cause
    was raised on a caller's thread, so the failure holds its name and not the exception.
    """
    engine = rig.engine
    for sink, name in zip(told, ("running", "waiting"), strict=False):
        assert isinstance(sink.last(name).error, EngineFailure)
        assert len([output for output in sink.outputs[name] if output.last]) == 1
    rig.join()
    for _ in range(2):
        assert not engine.ready
        assert isinstance(engine.failure, EngineFailure)
        assert (engine.failure.__cause__ is cause) is not callers
        assert type(cause).__name__ in str(engine.failure)
        assert engine.load() == Load.idle(NUM_PAGES)
        assert engine.drain(WAIT_S)
        for refused in (
            lambda: rig.submit("late", Collector()),
            lambda: engine.changes.update(lambda: None, "late", InFlightPolicy.KEEP),
            lambda: engine.abort(["running"]),
            engine.flush_prefix_cache,
        ):
            with pytest.raises(EngineFailure):
                refused()
        engine.cancel("running")
        engine.finish("running", cast("Any", None))
        watched = threading.Event()
        engine.on_failure(watched.set)
        assert watched.is_set()
        engine.shutdown()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["schedule", "commit", "expire", "remove"])
def test_a_scheduler_that_breaks_ends_all_requests(rig, monkeypatch, where, error):
    """`remove` breaks when the engine tries to end a request. Reporting the failure must not call it."""
    watched = threading.Event()
    rig.engine.on_failure(watched.set)
    rig.start()
    monkeypatch.setattr(Roster if where == "remove" else rig.scheduler, where, raising(error))
    asked = [rig.engine.changes.update(lambda: None, "new", policy) for policy in InFlightPolicy]
    if where == "remove":
        with contextlib.suppress(type(error)):
            rig.engine.abort(["waiting"])
    rig.gate.open()
    expect_death(rig, error, told=[rig.gate.sink, rig.waiting], callers=where == "remove")
    assert watched.is_set()
    for future in asked:
        assert future.exception(WAIT_S) is rig.engine.failure


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["execute_async", "choose", "wait"])
def test_a_runner_that_breaks_ends_all_requests(rig, monkeypatch, where, error):
    rig.start(Rota(50))
    monkeypatch.setattr(rig.runner, where, raising(error))
    rig.gate.open()
    expect_death(rig, error, told=[rig.gate.sink, rig.waiting])


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["post", "deliver"])
def test_a_delivery_that_breaks_ends_all_requests(rig, monkeypatch, where, error):
    rig.start()
    monkeypatch.setattr(Delivery, where, raising(error))
    rig.gate.open()
    expect_death(rig, error, told=[rig.gate.sink, rig.waiting])


def test_a_runner_that_breaks_before_the_first_step(rig, monkeypatch):
    error = PanicException("lost")
    monkeypatch.setattr(rig.runner, "start", raising(error))
    rig.engine.start()
    rig.join()
    expect_death(rig, error, told=[])


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_sinks_and_futures_that_raise_keep_no_other_from_the_error(rig, monkeypatch, error):
    """Everything that may raise while the engine reports its death does so."""

    def broken(outputs: Sequence[StepOutput]) -> None:
        if outputs[-1].error is not None:
            raise error

    rig.start()
    for i in range(3):
        rig.submit(f"broken-{i}", broken if i else raising(error))
    last = Collector()
    rig.submit("last", last)
    for _ in range(2):
        rig.engine.on_failure(raising(error))
    asked = [rig.engine.changes.update(lambda: None, "new", InFlightPolicy.KEEP) for _ in range(3)]
    for future in asked[:2]:
        future.add_done_callback(raising(error))
    cause = RuntimeError("device lost")
    monkeypatch.setattr(rig.scheduler, "schedule", raising(cause))
    monkeypatch.setattr(rig.scheduler, "use_weights", raising(cause))
    rig.gate.open()
    expect_death(rig, cause, told=[rig.gate.sink, rig.waiting])
    assert isinstance(last.last("last").error, EngineFailure)
    for future in asked:
        assert future.exception(WAIT_S) is rig.engine.failure


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_of_sinks_updates_and_observers_do_not_end_the_engine(error):
    class Broken:
        def on_step(self, record: StepRecord) -> None:
            raise error

    rig = Rig(Broken())
    try:
        rig.start()
        rig.submit("deaf", raising(error), tokens=3)
        update = rig.engine.changes.update(raising(error), "new", InFlightPolicy.KEEP)
        update.add_done_callback(raising(error))
        rig.gate.open()
        caught = update.exception(WAIT_S)
        assert isinstance(caught, Exception), "a BaseException would end its reader's event loop"
        assert error in (caught, caught.__cause__)
        assert rig.gate.sink.last("running").finish is not None
        assert rig.waiting.last("waiting").finish is not None
        assert rig.engine.failure is None
        assert rig.engine.ready
        assert rig.engine.drain(WAIT_S), "the audit below needs an engine that does nothing"
        rig.scheduler.check()
    finally:
        rig.engine.shutdown()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("call", ["submit", "finish", "abort", "flush_prefix_cache"])
def test_a_scheduler_that_breaks_on_a_callers_thread_ends_the_engine(rig, monkeypatch, call, error):
    """The caller gets the exception. Other requests must not go on in a scheduler that broke halfway."""
    rig.start()
    for name in ("queue", "abort", "flush_prefix_cache"):
        monkeypatch.setattr(rig.scheduler, name, raising(error))
    calls: dict[str, Callable[[], Any]] = {
        "submit": lambda: rig.submit("late", Collector()),
        "finish": lambda: rig.engine.finish("waiting", cast("Any", Finished())),
        "abort": lambda: rig.engine.abort(["waiting"]),
        "flush_prefix_cache": rig.engine.flush_prefix_cache,
    }
    with pytest.raises(type(error)) as caught:
        calls[call]()
    assert caught.value is error
    rig.gate.open()
    expect_death(rig, error, told=[rig.gate.sink, rig.waiting], callers=True)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("looks", [False, True])
def test_a_scheduler_that_breaks_in_a_cancel_ends_the_engine(rig, monkeypatch, looks, error):
    """The engine's thread finds out, or before it a caller that asks for the load."""
    rig.start()
    monkeypatch.setattr(rig.scheduler, "abort", raising(error))
    rig.engine.cancel("unknown")
    if looks:
        with pytest.raises(type(error)):
            rig.engine.load()
    rig.gate.open()
    expect_death(rig, error, told=[rig.gate.sink, rig.waiting], callers=looks)


def test_a_caller_that_broke_the_scheduler_goes_on(rig, monkeypatch):
    """For example, a coroutine catches the exception and waits for something while the engine dies."""
    rig.start()
    monkeypatch.setattr(rig.scheduler, "abort", raising(RuntimeError("lost")))

    def caller() -> Iterator[str]:
        with contextlib.suppress(RuntimeError):
            rig.engine.abort(["waiting"])
        yield "waits"
        yield "goes on"

    coroutine = caller()
    assert next(coroutine) == "waits"
    rig.gate.open()
    rig.join()
    assert "RuntimeError: lost" in str(rig.engine.failure)
    assert next(coroutine) == "goes on"


class Finished:
    reason = message = stop = None


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_scheduler_that_breaks_in_shutdown(rig, monkeypatch, error):
    rig.start()
    monkeypatch.setattr(rig.scheduler, "abort", raising(error))
    ender = threading.Thread(target=rig.engine.shutdown)
    ender.start()
    rig.gate.open()
    ender.join(WAIT_S)
    assert not ender.is_alive()
    assert isinstance(rig.gate.sink.last("running").error, EngineFailure)
    assert isinstance(rig.waiting.last("waiting").error, EngineFailure)


def test_a_refusal_breaks_nothing(rig):
    rig.start()
    with pytest.raises(ValueError, match="exactly one"):
        rig.engine.abort()
    rig.gate.open()
    assert rig.waiting.last("waiting").finish is not None
    assert rig.engine.failure is None


def test_drain_ends_with_the_engine(rig, monkeypatch):
    """Otherwise it would wait for requests that the engine cannot finish any more."""
    rig.start()
    drained: list[bool] = []
    waiter = threading.Thread(target=lambda: drained.append(rig.engine.drain(WAIT_S)))
    waiter.start()
    monkeypatch.setattr(rig.scheduler, "schedule", raising(PanicException("lost")))
    rig.gate.open()
    waiter.join(WAIT_S / 2)
    assert drained == [True]


def test_an_engine_that_dies_is_not_drained_before_its_requests_are_told(rig, monkeypatch):
    rig.start()
    drained: list[bool] = []
    rig.engine.on_failure(lambda: drained.append(rig.engine.drain(0)))
    monkeypatch.setattr(rig.scheduler, "schedule", raising(RuntimeError("lost")))
    rig.gate.open()
    assert isinstance(rig.waiting.last("waiting").error, EngineFailure)
    assert drained == [False]
    assert rig.engine.drain(WAIT_S)


@pytest.mark.parametrize("is_held", [True, False])
def test_a_death_tells_those_whom_a_hold_or_a_pause_keeps(rig, monkeypatch, is_held):
    """It also tells those whose change waits for the end of the hold."""
    rig.start()
    changes = rig.engine.changes
    kept = changes.hold_for_update(InFlightPolicy.KEEP) if is_held else changes.pause(InFlightPolicy.KEEP)
    rig.gate.open()
    kept.result(WAIT_S)
    asked = []
    if is_held:
        asked = [changes.update(lambda: None, "new", policy) for policy in InFlightPolicy]
        asked += [changes.resume(), changes.pause(InFlightPolicy.KEEP)]
    error = PanicException("lost")
    monkeypatch.setattr(rig.scheduler, "abort", raising(error))
    rig.engine.cancel("unknown")
    assert isinstance(rig.waiting.last("waiting").error, EngineFailure)
    for future in asked:
        assert future.exception(WAIT_S) is rig.engine.failure
    for refused in (changes.resume, lambda: changes.release_hold("new")):
        with pytest.raises(EngineDead):
            refused()
    changes.drop_hold()
    changes.break_weights("nobody is left to be told")
    expect_death(rig, error, told=[rig.gate.sink, rig.waiting])


def test_an_engine_without_its_thread_says_so():
    """This is the state of a child after a fork, where only the thread that forked lives on."""
    life = Life()
    with pytest.raises(NotReady):
        life.check_takes_requests()
    go_on = threading.Event()
    life.thread = threading.Thread(target=go_on.wait)
    life.thread.start()
    life.check_takes_requests()
    go_on.set()
    life.thread.join(WAIT_S)
    assert "thread is gone" in str(life.failure)
    with pytest.raises(EngineDead, match="thread is gone"):
        life.check_takes_requests()
    assert not life.is_ready
    life.is_stopping = True
    life.check_alive()  # the thread ended as it should
