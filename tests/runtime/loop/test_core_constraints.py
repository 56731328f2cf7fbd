"""Constraints on the engine's thread accept tokens while its lock is free. Whatever happens to their request
meanwhile, its end is delivered once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.runtime.errors import GenerationError
from penstock.runtime.loop.core import EngineCore
from penstock.runtime.loop.interface import AbortOutcome
from penstock.runtime.requests.request import Finish, FinishReason, Request, StoppingParams
from penstock.runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.support.collector import GREEDY, Collector
from tests.support.scheduler.fake_runner import EOS, VOCAB, LazyRunner, Rota, run_alone

MAX_LEN = 60
WAIT_S = 60


@dataclass(eq=False)
class Meeting(Rota):
    """A constraint that calls `does` on the engine's thread at its `at`-th token."""

    at: int = 3
    does: Callable[[], Any] = lambda: None
    calls: list[tuple[int, ...]] = field(default_factory=list)

    def accept(self, token_ids: Sequence[int]) -> None:
        self.calls.append(tuple(token_ids))
        super().accept(token_ids)
        if len(self.calls) == self.at:
            self.does()


@contextlib.contextmanager
def core(*, overlap: bool = True) -> Iterator[EngineCore]:
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=12,
        max_model_len=MAX_LEN,
        page_size=4,
        num_pages=60,
        eos_token_ids=EOS,
        max_queued_requests=100,
    )
    runner, scheduler = LazyRunner(config), Scheduler(config)
    engine = EngineCore(runner, scheduler, vocab_size=VOCAB, overlap=overlap)
    engine.start()
    try:
        yield engine
        assert engine.failure is None
        assert engine.load().pages_used == 0
        scheduler.check()
    finally:
        engine.shutdown()


def request(name: str, constraint: Rota | None, tokens: int = 12) -> Request:
    return Request(name, (1, 2), GREEDY, StoppingParams(tokens, ignore_eos=True), constraint=constraint)


def expected(constraint: Rota | None, tokens: int = 12) -> list[int]:
    fresh = None if constraint is None else Rota(constraint.limit)
    return run_alone(request("alone", fresh, tokens), MAX_LEN)[0]


def from_another_thread(*calls: Callable[[], Any]) -> list[Any]:
    """Return what the calls return. They must not wait for what this thread does."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend([call() for call in calls]), daemon=True)
    thread.start()
    thread.join(WAIT_S / 2)
    assert not thread.is_alive(), "a caller had to wait for a constraint"
    return results


@pytest.mark.parametrize("overlap", [False, True])
def test_callers_need_not_wait_for_a_slow_constraint(overlap):
    entered, go_on = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        assert go_on.wait(WAIT_S)

    slow, late = Meeting(50, does=block), Collector()
    sink = Collector()
    with core(overlap=overlap) as engine:
        engine.submit(request("slow", slow), sink)
        assert entered.wait(WAIT_S)
        try:
            _, load, _, results, _, _ = from_another_thread(
                lambda: engine.submit(request("other", None), sink),
                engine.load,
                lambda: engine.submit(request("late", Rota(50)), late),
                lambda: engine.abort(["other", "unknown"]),
                engine.flush_prefix_cache,
                lambda: engine.cancel("unknown"),
            )
        finally:
            go_on.set()
        assert (load.num_running, load.num_waiting) == (1, 1)
        assert results == [("other", AbortOutcome.ABORTED), ("unknown", AbortOutcome.NOT_FOUND)]
        assert sink.last("slow").finish == Finish(FinishReason.MAX_TOKENS)
        assert late.last("late").finish == Finish(FinishReason.MAX_TOKENS)
        assert sink.last("other").finish == Finish(FinishReason.ABORTED)
        assert sink.tokens("slow") == slow.accepted == expected(slow)
        assert late.tokens("late") == expected(Rota(50))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", ["abort", "cancel", "finish", "abort and again"])
@pytest.mark.parametrize("at", [1, 4, 12])
@pytest.mark.parametrize("raises", [False, True])
def test_a_request_that_ends_while_its_constraint_accepts_ends_once(overlap, how, at, raises):
    """This holds if the same token would have ended it, or if the constraint fails. At the commit its id may
    be in use again: then the new request must get none of the old one's tokens.
    """
    sink, again = Collector(), Collector()

    def abort_and_again() -> None:
        engine.abort(["a"])
        engine.submit(request("a", Rota(50)), again)

    def end() -> None:
        calls: dict[str, Callable[[], Any]] = {
            "abort": lambda: engine.abort(["a"]),
            "cancel": lambda: engine.cancel("a"),
            "finish": lambda: engine.finish("a", Finish(FinishReason.STOP, stop=".")),
            "abort and again": abort_and_again,
        }
        from_another_thread(calls[how])
        if raises:
            raise ValueError("too late")

    meeting = Meeting(50, at=at, does=end)
    with core(overlap=overlap) as engine:
        engine.submit(request("a", meeting), sink)
        engine.submit(request("other", Rota(50)), sink)
        assert sink.last("other").finish == Finish(FinishReason.MAX_TOKENS)
        assert sink.tokens("other") == expected(Rota(50))
        if how == "abort and again":
            assert again.last("a").finish == Finish(FinishReason.MAX_TOKENS)
            assert again.tokens("a") == expected(Rota(50))
    assert len(meeting.calls) == at
    outputs = sink.outputs.get("a", [])
    assert sink.tokens("a") == expected(meeting)[: at - 1]
    if how == "cancel":
        assert not any(output.last for output in outputs)
    else:
        assert [output.last for output in outputs] == [False] * (at - 1) + [True]
        assert outputs[-1].error is None


@pytest.mark.parametrize("error", [ValueError("lost"), SystemExit(1), KeyboardInterrupt()])
def test_whatever_a_constraint_raises_ends_its_own_request(error):
    """Python delivers signals to the main thread only, so a KeyboardInterrupt here was raised by the
    constraint.
    """

    def fail() -> None:
        raise error

    meeting, sink = Meeting(50, does=fail), Collector()
    with core() as engine:
        engine.submit(request("a", meeting), sink)
        engine.submit(request("other", Rota(50)), sink)
        failed = sink.last("a").error
        assert sink.last("other").finish == Finish(FinishReason.MAX_TOKENS)
    assert sink.tokens("a") == expected(meeting)[:3]
    assert sink.tokens("other") == expected(Rota(50))
    if isinstance(error, Exception):
        assert failed is error
    else:
        assert isinstance(failed, GenerationError)
        assert failed.__cause__ is error
        assert type(error).__name__ in str(failed)
