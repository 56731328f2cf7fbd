"""The outbox: what waits, what is dropped, and that nobody who hands over a span waits for anything."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from penstock.service.telemetry.otlp.outbox import BATCH, AnySpan, Outbox

WAIT_S = 20.0
NOBODY = Resource.get_empty()


def spans(count: int) -> list[AnySpan]:
    return [ReadableSpan(name=str(number), resource=NOBODY) for number in range(count)]


class Gate:
    """An exporter that takes spans only while it is open."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.batches: list[list[AnySpan]] = []
        self.takes: Callable[[Sequence[AnySpan]], int] = len
        self.hurried: list[float] = []
        self.closed = 0

    def export(self, batch: Sequence[AnySpan]) -> int:
        self.entered.set()
        assert self.open.wait(WAIT_S)
        self.batches.append(list(batch))
        return self.takes(batch)

    def hurry(self, within_s: float) -> None:
        self.hurried.append(within_s)

    def close(self) -> None:
        self.closed += 1
        self.open.set()
        self.takes = lambda batch: 0


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def emit_all(outbox: Outbox, what: Sequence[AnySpan]) -> None:
    for span in what:
        outbox.emit(span)


def test_spans_leave_in_order_and_in_batches(gate: Gate) -> None:
    outbox = Outbox(gate, 10_000)
    sent = spans(2 * BATCH + 3)
    emit_all(outbox, sent)
    gate.open.set()
    assert outbox.flush(WAIT_S)
    assert [span for batch in gate.batches for span in batch] == sent
    assert max(map(len, gate.batches)) <= BATCH
    assert (outbox.exported, outbox.failed, outbox.dropped, outbox.waiting) == (len(sent), 0, 0, 0)
    outbox.shutdown(WAIT_S)
    assert gate.closed == 1


def test_a_single_span_leaves_without_a_flush(gate: Gate) -> None:
    gate.open.set()
    outbox = Outbox(gate, 10, delay_s=0.01)
    outbox.emit(*spans(1))
    until(lambda: outbox.exported == 1)
    outbox.shutdown(WAIT_S)


def test_a_full_batch_leaves_before_its_time(gate: Gate) -> None:
    gate.open.set()
    outbox = Outbox(gate, 10 * BATCH, delay_s=3600.0)
    emit_all(outbox, spans(BATCH))
    until(lambda: outbox.exported == BATCH)
    emit_all(outbox, spans(2 * BATCH))
    until(lambda: outbox.exported == 3 * BATCH)
    outbox.shutdown(WAIT_S)


def test_what_is_beyond_the_bound_is_dropped_and_counted_exactly(gate: Gate) -> None:
    """Of several threads that emit at once while the collector answers nothing."""
    outbox = Outbox(gate, 100, delay_s=0.01)
    outbox.emit(*spans(1))
    assert gate.entered.wait(WAIT_S), "the thread is held now"
    num_threads, each = 8, 2000
    start = threading.Barrier(num_threads)

    def work() -> None:
        start.wait()
        emit_all(outbox, spans(each))

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert 100 <= outbox.waiting < 100 + num_threads, "a thread may be late by one span"
    assert outbox.dropped + outbox.waiting == num_threads * each
    gate.open.set()
    assert outbox.flush(WAIT_S)
    assert outbox.exported + outbox.dropped == 1 + num_threads * each
    outbox.shutdown(WAIT_S)


def test_spans_that_are_handed_over_together(gate: Gate) -> None:
    """There is room for some of them, and for none once the outbox has ended."""
    outbox = Outbox(gate, 100, delay_s=0.01)
    sent = spans(150)
    outbox.emit_all(sent[:1])
    assert gate.entered.wait(WAIT_S), "the thread is held now"
    outbox.emit_all(sent[1:])
    assert (outbox.waiting, outbox.dropped) == (100, 49)
    gate.open.set()
    outbox.shutdown(WAIT_S)
    assert [span for batch in gate.batches for span in batch] == sent[:101]
    outbox.emit_all(sent[:3])
    assert (outbox.exported, outbox.waiting, outbox.dropped) == (101, 0, 52)


def test_a_full_batch_that_is_handed_over_leaves_before_its_time(gate: Gate) -> None:
    gate.open.set()
    outbox = Outbox(gate, 10 * BATCH, delay_s=3600.0)
    outbox.emit_all(spans(BATCH))
    until(lambda: outbox.exported == BATCH)
    outbox.shutdown(WAIT_S)


def test_some_of_a_batch_were_not_taken(gate: Gate) -> None:
    gate.open.set()
    gate.takes = lambda batch: len(batch) - 2
    outbox = Outbox(gate, 100)
    emit_all(outbox, spans(5))
    assert outbox.flush(WAIT_S)
    assert (outbox.exported, outbox.failed) == (3, 2)
    outbox.shutdown(WAIT_S)


def test_the_thread_outlives_an_exporter_that_raises(gate: Gate, caplog: Any) -> None:
    gate.open.set()

    def broken(batch: Sequence[AnySpan]) -> int:
        raise ZeroDivisionError

    gate.takes = broken
    outbox = Outbox(gate, 100)
    emit_all(outbox, spans(4))
    assert outbox.flush(WAIT_S)
    gate.takes = len
    emit_all(outbox, spans(3))
    assert outbox.flush(WAIT_S)
    assert (outbox.exported, outbox.failed) == (3, 4)
    assert "4 spans cannot be sent" in caplog.text
    outbox.shutdown(WAIT_S)


def test_a_flush_in_vain_says_so(gate: Gate) -> None:
    outbox = Outbox(gate, 100)
    outbox.emit(*spans(1))
    assert not outbox.flush(0.01)
    gate.open.set()
    assert outbox.flush(WAIT_S)
    outbox.shutdown(WAIT_S)
    assert outbox.flush(WAIT_S), "nothing waits"


def test_a_shutdown_sends_what_waits(gate: Gate) -> None:
    gate.open.set()
    outbox = Outbox(gate, 10_000, delay_s=3600.0)
    emit_all(outbox, spans(10))
    outbox.shutdown(7.0)
    assert gate.hurried == [7.0]
    assert (outbox.exported, outbox.waiting) == (10, 0)
    outbox.emit(*spans(1))
    assert (outbox.dropped, outbox.waiting) == (1, 0), "after the end"
    outbox.shutdown(7.0)


def test_a_shutdown_gives_up_after_the_first_batch_of_which_nothing_was_taken(gate: Gate) -> None:
    gate.open.set()
    gate.takes = lambda batch: 0
    outbox = Outbox(gate, 10_000, delay_s=3600.0)
    outbox._is_woken = True  # so that a full batch does not wake it
    emit_all(outbox, spans(3 * BATCH))
    outbox.shutdown(WAIT_S)
    assert (outbox.failed, outbox.dropped, len(gate.batches)) == (BATCH, 2 * BATCH, 1)


def test_a_shutdown_does_not_wait_for_an_exporter_that_hangs(gate: Gate) -> None:
    outbox = Outbox(gate, 10_000, delay_s=0.01)
    outbox.emit(*spans(1))
    assert gate.entered.wait(WAIT_S)
    emit_all(outbox, spans(10))
    outbox.shutdown(0.05)
    assert gate.closed == 1
    assert (outbox.exported, outbox.waiting) == (0, 0)
    assert outbox.failed + outbox.dropped == 11
