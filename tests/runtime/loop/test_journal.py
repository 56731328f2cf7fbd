"""The journal by itself, and what the engine writes into it where the order of events matters."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from penstock.runtime.loop import journal as journal_module
from penstock.runtime.loop.core import EngineCore
from penstock.runtime.loop.interface import (
    Applied,
    InFlightPolicy,
    Paused,
    Resumed,
    StepKind,
    StepRecord,
    WeightsBroken,
)
from penstock.runtime.loop.journal import BATCH, Cancelled, Changed, Ended, Entry, Journal, Preempted, Queued
from penstock.runtime.requests.request import FinishReason, Request, StepOutput, StoppingParams
from tests.runtime.loop.test_core_streams import core
from tests.support.collector import GREEDY, Collector, Gate
from tests.support.scheduler.fake_runner import LazyRunner, Rota

WAIT_S = 60


def entry(number: int) -> Queued:
    return Queued(number, Request(f"r{number}", (1,)))


def numbers(entries: Sequence[Entry]) -> list[int]:
    return [each.at_ns for each in entries if isinstance(each, Queued)]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def journal() -> Iterator[Journal]:
    journal = Journal()
    yield journal
    journal.close()


# -- the journal by itself --


def test_readers_get_all_entries_in_order_on_a_thread_of_the_journal(journal: Journal) -> None:
    seen: list[int] = []
    threads: set[str] = set()

    def read(entries: Sequence[Entry]) -> None:
        assert 0 < len(entries) <= BATCH
        threads.add(threading.current_thread().name)
        seen.extend(numbers(entries))

    journal.read_by(read)
    journal.start()
    for number in range(2 * BATCH + 5):
        journal.write(entry(number))
    until(lambda: len(seen) == 2 * BATCH + 5)
    assert seen == list(range(2 * BATCH + 5))
    assert threads == {"penstock-journal"}


def test_nothing_is_kept_while_nobody_reads(journal: Journal) -> None:
    is_read = [journal.is_read]
    journal.write(entry(1))
    seen: list[int] = []
    end = journal.read_by(lambda entries: seen.extend(numbers(entries)))
    is_read.append(journal.is_read)
    journal.write(entry(2))
    end()
    is_read.append(journal.is_read)
    assert is_read == [False, True, False]
    journal.write(entry(3))
    journal.flush()
    assert seen == [2], "a reader gets what is written while it reads"
    end()  # may be called twice


def test_a_later_reader_gets_only_what_comes_later(journal: Journal) -> None:
    first: list[int] = []
    second: list[int] = []
    journal.read_by(lambda entries: first.extend(numbers(entries)))
    journal.write(entry(1))
    journal.read_by(lambda entries: second.extend(numbers(entries)))
    journal.write(entry(2))
    journal.flush()
    assert (first, second) == ([1, 2], [2])


def test_what_is_too_many_is_dropped_and_counted(journal: Journal) -> None:
    small = Journal(most=3)
    seen: list[int] = []
    small.read_by(lambda entries: seen.extend(numbers(entries)))
    for number in range(5):
        small.write(entry(number))
    assert small.dropped == 2
    small.flush()
    small.write(entry(5))
    small.close()
    assert (seen, small.dropped) == ([0, 1, 2, 5], 2)


def test_drops_of_many_threads_are_all_counted() -> None:
    small = Journal(most=1)
    small.read_by(lambda entries: None)
    small.write(entry(0))

    def write() -> None:
        for _ in range(500):
            small.write(entry(1))

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert small.dropped == 2000


class Lost(BaseException):
    """No Exception, as a panic in Rust."""


@pytest.mark.parametrize("error", [RuntimeError("reader's fault"), Lost("reader's fault")])
def test_a_reader_that_raises_is_logged_once_and_ended(
    journal: Journal, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    calls, seen = 0, list[int]()

    def broken(entries: Sequence[Entry]) -> None:
        nonlocal calls
        calls += 1
        raise error

    journal.read_by(broken)
    journal.read_by(lambda entries: seen.extend(numbers(entries)))
    for number in range(2):
        journal.write(entry(number))
        journal.flush()
    assert (calls, seen) == (1, [0, 1])
    assert [record.message for record in caplog.records] == [
        "a reader of the journal failed; it gets no more entries"
    ]


def test_when_the_last_reader_has_failed_nothing_is_kept(journal: Journal) -> None:
    def broken(entries: Sequence[Entry]) -> None:
        raise RuntimeError("reader's fault")

    journal.read_by(broken)
    for number in range(2 * BATCH):
        journal.write(entry(number))
    journal.flush()
    assert not journal.is_read


def test_a_flush_waits_for_the_batch_that_is_being_read(journal: Journal) -> None:
    reading, go_on = threading.Event(), threading.Event()
    seen: list[int] = []

    def read(entries: Sequence[Entry]) -> None:
        reading.set()
        assert go_on.wait(WAIT_S)
        seen.extend(numbers(entries))

    journal.read_by(read)
    journal.start()
    journal.write(entry(1))
    assert reading.wait(WAIT_S)
    journal.write(entry(2))
    flushed = threading.Thread(target=journal.flush)
    flushed.start()
    flushed.join(0.05)
    assert flushed.is_alive()
    go_on.set()
    flushed.join(WAIT_S)
    assert seen == [1, 2]


def test_a_reader_must_not_flush_but_may_end_itself(journal: Journal) -> None:
    refused: list[str] = []
    ends: list[Callable[[], None]] = []

    def read(entries: Sequence[Entry]) -> None:
        try:
            journal.flush()
        except RuntimeError as error:
            refused.append(str(error))
        ends[0]()

    ends.append(journal.read_by(read))
    journal.write(entry(1))
    journal.flush()
    assert refused == ["a reader of the journal must not flush it"]
    assert not journal.is_read


def test_a_closed_journal_has_handed_over_everything_and_takes_no_more() -> None:
    journal, seen = Journal(), list[int]()
    journal.read_by(lambda entries: seen.extend(numbers(entries)))
    journal.start()
    with pytest.raises(RuntimeError, match="started before"):
        journal.start()
    for number in range(10):
        journal.write(entry(number))
    journal.close()
    journal.write(entry(10))
    journal.close()
    assert seen == list(range(10))
    with pytest.raises(RuntimeError, match="closed"):
        journal.read_by(lambda entries: None)
    assert "penstock-journal" not in [thread.name for thread in threading.enumerate()]


# -- what the engine writes --


@contextlib.contextmanager
def recorded(**limits: Any) -> Iterator[tuple[EngineCore, LazyRunner, list[Entry], Journal]]:
    journal = Journal()
    entries: list[Entry] = []
    journal.read_by(entries.extend)
    with core(journal=journal, **limits) as (engine, runner):
        yield engine, runner, entries, journal
    journal.close()


def submit(engine: EngineCore, sink: Any, name: str = "a", tokens: int = 3, prompt: int = 2) -> None:
    stopping = StoppingParams(tokens, ignore_eos=True)
    engine.submit(Request(name, (1,) * prompt, GREEDY, stopping), sink)


def test_who_has_its_last_token_finds_its_end_after_a_flush() -> None:
    """One output ends in a step, and a sink that gets another output of the step holds the engine up."""
    with recorded(overlap=False) as (engine, _, entries, journal):
        sink, gate = Collector(), Gate()
        seen: list[Entry] = []

        def both(outputs: Sequence[StepOutput]) -> None:
            if not sink.outputs:
                submit(engine, sink, "ends", tokens=1)
                submit(engine, gate, "held", tokens=1)
            sink(outputs)

        def flush() -> None:
            journal.flush()
            seen.extend(entries)

        submit(engine, both, "first", tokens=1)
        sink.last("ends")
        flushing = threading.Thread(target=flush)
        flushing.start()
        flushing.join(0.1)
        gate.open()
        flushing.join(WAIT_S)
        ended = [each for each in seen if isinstance(each, Ended)]
        assert [each.request.request_id for each in ended] == ["first", "ends", "held"]
        assert ended[1].output is sink.outputs["ends"][-1]


def test_a_flush_does_not_wait_for_a_thread_that_hangs_with_the_engines_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal_module, "_LONGEST_WAIT_S", 0.05)
    with recorded(overlap=False) as (engine, _, _, journal):
        gate = Gate()
        flushing = [threading.Thread(target=journal.flush) for _ in range(2)]
        with engine.guard.lock:
            flushing[0].start()  # no step is being handed over
            flushing[0].join(WAIT_S)
        submit(engine, gate, tokens=1)
        assert gate.reached.wait(WAIT_S)
        with engine.guard.lock:
            flushing[1].start()  # a step is
            flushing[1].join(WAIT_S)
            assert not any(thread.is_alive() for thread in flushing)
        gate.open()
        gate.sink.last("a")


def test_a_sink_may_flush_and_gets_what_was_written_before_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_LONGEST_WAIT_S", 10 * WAIT_S)
    with recorded() as (engine, _, entries, journal):
        seen: list[int] = []
        sink = Collector()

        def flushing(outputs: Sequence[StepOutput]) -> None:
            journal.flush()
            seen.append(len(entries))
            sink(outputs)

        submit(engine, flushing, tokens=2)
        sink.last("a")
        assert seen == [1, 2]  # queued; and the first step


def test_the_entries_of_one_output() -> None:
    with recorded(overlap=False) as (engine, _, entries, journal):
        sink = Collector()
        submit(engine, sink, tokens=3, prompt=20)  # with 12 tokens a step
        sink.last("a")
        journal.flush()
    assert [type(each) for each in entries] == [Queued, *[StepRecord] * 4, Ended]
    records = [each for each in entries if isinstance(each, StepRecord)]
    assert [record.kind for record in records] == [StepKind.PREFILL] * 2 + [StepKind.DECODE] * 2
    assert [(r.step_id, r.num_rows, r.num_tokens, r.num_steps) for r in records] == [
        (0, 1, 12, 1),
        (1, 1, 8, 1),
        (2, 1, 1, 1),
        (3, 1, 1, 1),
    ]
    assert [len(record.outputs) for record in records] == [0, 1, 1, 1]
    assert [record.request_ids for record in records] == [("a",)] * 4
    assert [record.pages_used for record in records] == [5, 5, 6, 0]
    last = entries[-1]
    assert isinstance(last, Ended)
    assert last.num_tokens == 3
    assert last.output.finish is not None
    assert last.output.finish.reason is FinishReason.MAX_TOKENS


def test_kinds_of_steps() -> None:
    with recorded(steps=4, overlap=False) as (engine, _, entries, journal):
        sink = Collector()

        def then_another(outputs: Sequence[StepOutput]) -> None:
            if "a" not in sink.outputs:
                submit(engine, sink, "b", tokens=9)
            sink(outputs)

        submit(engine, then_another, "a", tokens=10)
        sink.last("a")
        sink.last("b")
        journal.flush()
    records = [each for each in entries if isinstance(each, StepRecord)]
    kinds = [record.kind for record in records]
    assert kinds[:2] == [StepKind.PREFILL, StepKind.MIXED]
    assert set(kinds[2:]) <= {StepKind.WINDOW, StepKind.DECODE}
    assert StepKind.WINDOW in kinds
    assert all((record.num_steps > 1) == (record.kind is StepKind.WINDOW) for record in records)


def test_an_id_that_is_used_again_begins_after_the_end_of_the_first() -> None:
    """The first output ends while its step is being handed over, and the sink takes the id again."""
    with recorded(overlap=False) as (engine, _, entries, journal):
        sink, again = Collector(), Collector()

        def resubmit(outputs: Sequence[StepOutput]) -> None:
            submit(engine, again, "a", tokens=1)
            sink(outputs)

        submit(engine, resubmit, "a", tokens=1)
        again.last("a")
        journal.flush()
    assert [type(each) for each in entries] == [Queued, StepRecord, Ended] * 2


def test_a_cancelled_output_has_its_tokens_counted() -> None:
    with recorded() as (engine, _, entries, journal):
        gate = Gate()
        submit(engine, gate, tokens=30)
        assert gate.reached.wait(WAIT_S)  # the first token is being handed over
        engine.cancel("a")
        gate.open()
        assert engine.drain(WAIT_S)
        journal.flush()
    last = entries[-1]
    if isinstance(last, StepRecord):  # of the step that was in flight, in which the row made nothing
        assert last.outputs == []
        last = entries[-2]
    assert isinstance(last, Cancelled)
    assert last.num_tokens == sum(
        len(output.token_ids) for each in entries if isinstance(each, StepRecord) for output in each.outputs
    )
    assert 0 < last.timing.first_token_ns <= last.timing.finished_ns == last.at_ns


def test_changes_and_the_preempted() -> None:
    with recorded() as (engine, _, entries, journal):
        gate = Gate()
        submit(engine, gate, tokens=30)
        assert gate.reached.wait(WAIT_S)
        changes = engine.changes
        updated = changes.update(lambda: None, "second", InFlightPolicy.RECOMPUTE)
        gate.open()
        applied = updated.result(WAIT_S)
        paused = changes.pause(InFlightPolicy.ABORT, free_kv_cache=True).result(WAIT_S)
        changes.resume().result(WAIT_S)
        changes.resume().result(WAIT_S)  # nothing is paused: no entry
        changes.hold_for_update(InFlightPolicy.KEEP).result(WAIT_S)
        changes.break_weights("half of it came")
        mended = changes.update(lambda: None, "third", InFlightPolicy.KEEP).result(WAIT_S)
        journal.flush()
        made = [each.what for each in entries if isinstance(each, Changed)]
        assert made == [applied, paused, Resumed(), WeightsBroken("half of it came"), mended]
        assert [type(what) for what in made] == [Applied, Paused, Resumed, WeightsBroken, Applied]
        (preempted,) = (each for each in entries if isinstance(each, Preempted))
        assert preempted.request_ids == ("a",)
        assert preempted.num_computed[0] >= 2
        assert engine.totals().preemptions == 1


def test_a_step_is_recorded_though_the_engine_dies_before_its_outputs_are_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row under a constraint has its token chosen after the commit of the step before."""
    journal, entries, sink = Journal(), list[Entry](), Collector()
    journal.read_by(entries.extend)
    with contextlib.suppress(AssertionError), core(journal=journal) as (engine, runner):
        choose = runner.choose

        def lost(step: Any) -> Any:
            if step.plan.step_id == 1:
                raise RuntimeError("lost")
            return choose(step)

        monkeypatch.setattr(runner, "choose", lost)
        stopping = StoppingParams(9, ignore_eos=True)
        engine.submit(Request("a", (1,), GREEDY, stopping, constraint=Rota(9)), sink)
        sink.last("a")
    journal.close()
    assert [type(each) for each in entries] == [Queued, StepRecord, Ended]
    last = entries[-1]
    assert isinstance(last, Ended)
    assert last.output is sink.outputs["a"][-1]
    assert last.output.error is engine.failure
    assert last.output.timing is not None
    assert last.num_tokens == len(sink.tokens("a")) == 1


def test_while_nobody_reads_no_entry_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: Any) -> Any:
        raise AssertionError("an entry was made")

    for name in ("Queued", "Ended", "Cancelled", "Preempted", "Changed", "_record"):
        monkeypatch.setattr(journal_module, name, made)
    with core() as (engine, _):
        sink, gate = Collector(), Gate()
        submit(engine, sink, tokens=5)
        sink.last("a")
        submit(engine, gate, "gone", tokens=30)
        assert gate.reached.wait(WAIT_S)
        gate.open()
        engine.changes.update(lambda: None, "second", InFlightPolicy.RECOMPUTE).result(WAIT_S)
        engine.cancel("gone")
        assert engine.drain(WAIT_S)
