"""Keeps finished spans until a thread of its own has sent them.

Whoever hands over a span to the `Outbox` waits for nothing: no lock is taken, and what is beyond the bound is
dropped and counted. Counts are exact. Each thread that drops counts on its own, because `n += 1` of two
threads may lose one.

OpenTelemetry's processor has neither exact counts nor an end within the time that it is given.

`SpanBatches` makes the request that carries a batch of spans to a collector.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext

from penstock.service.telemetry.otlp import wire

log = logging.getLogger(__name__)

AnySpan = ReadableSpan | bytes
"""A span of OpenTelemetry's, or one in the wire form that `wire.span` makes."""
_RESOURCE_SPANS, _SCOPE_SPANS = 0x0A, 0x12  # the tags of these fields


class SpanBatches:
    """Makes requests whose spans belong to one resource."""

    def __init__(self, resource: Resource) -> None:
        """`resource` is that of the spans in wire form. Those of OpenTelemetry know their own."""
        any_span = ReadableSpan("", SpanContext(1, 1, is_remote=False), resource=resource)
        (made,) = encode_spans([any_span]).resource_spans
        kept = ResourceSpans(resource=made.resource, schema_url=made.schema_url)
        self._resource: bytes = kept.SerializeToString()
        scope = made.scope_spans[0]
        del scope.spans[:]
        scope.scope.name = wire.SCOPE
        self._scope: bytes = scope.SerializeToString()

    def request(self, spans: Sequence[AnySpan]) -> bytes:
        """Encode an ExportTraceServiceRequest in wire form. Raises what OpenTelemetry's encoder raises."""
        readable = [span for span in spans if isinstance(span, ReadableSpan)]
        made: bytes = encode_spans(readable).SerializeToString() if readable else b""
        written = [span for span in spans if isinstance(span, bytes)]
        if written:
            scope = wire.sized(_SCOPE_SPANS, self._scope + b"".join(written))
            made += wire.sized(_RESOURCE_SPANS, self._resource + scope)
        return made


BATCH = 512
BATCH_BYTES = 2**20
"""A batch that has so many bytes is full, too. A collector refuses a request of more than 4 MiB over gRPC
unless it was told otherwise."""
_READABLE_BYTES = 1024
"""What a span of OpenTelemetry's counts as, whose size is known only once it is encoded."""
DELAY_S = 1.0
_LAST_MOMENT_S = 0.5
"""How long the thread may take to notice that its exporter was closed."""


class SpanExporter(Protocol):
    """Sends spans."""

    def export(self, spans: Sequence[AnySpan]) -> int:
        """Send spans, and wait for the answer. Returns how many of them were taken."""

    def hurry(self, within_s: float) -> None:
        """Wait for nothing from now on, and end the last attempt within this time. From any thread."""

    def close(self) -> None:
        """End for good, also an attempt that is under way. From any thread."""


class Outbox:
    """The spans that wait, and the thread that sends them."""

    def __init__(self, exporter: SpanExporter, most: int, *, delay_s: float = DELAY_S) -> None:
        """At most `most` spans wait, and none for longer than `delay_s` seconds if the exporter keeps up."""
        self._exporter, self._most, self._delay_s = exporter, most, delay_s
        self._spans: deque[AnySpan] = deque()
        self._wishes: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()
        """What wakes the thread: None, or an event that it sets when all that waits now was sent."""
        self._is_woken = False
        self._is_closing = False
        self._ending = threading.Lock()
        self._drops: dict[int, int] = {}
        self.exported = 0
        """Spans that the collector has taken. Written by the outbox's thread alone."""
        self.failed = 0
        """Spans that were sent in vain, or rejected. Written by the outbox's thread alone."""
        self._thread = threading.Thread(target=self._run, name="penstock-spans", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Spans that were never sent, because too many waited, or because the outbox had ended."""
        return sum(list(self._drops.values()))

    @property
    def waiting(self) -> int:
        """Spans that wait to be sent."""
        return len(self._spans)

    def emit(self, span: AnySpan) -> None:
        """Send a span some time later. From any thread; never blocks."""
        if self._is_closing or len(self._spans) >= self._most:
            self._drop(1)
            return
        self._spans.append(span)
        self._wake()

    def emit_all(self, spans: Sequence[AnySpan]) -> None:
        """Send these spans some time later, or as many of them as there is room for. From any thread; never
        blocks.
        """
        room = 0 if self._is_closing else max(self._most - len(self._spans), 0)
        self._spans.extend(spans[:room])
        self._drop(max(len(spans) - room, 0))
        self._wake()

    def _wake(self) -> None:
        """Have the thread send what waits, if that is a whole batch."""
        if len(self._spans) >= BATCH and not self._is_woken:
            self._is_woken = True
            self._wishes.put(None)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all spans that wait now were sent, or have failed. Returns whether that was in time."""
        done = threading.Event()
        self._wishes.put(done)
        return not self._thread.is_alive() or done.wait(timeout_s)

    def shutdown(self, timeout_s: float) -> None:
        """Send what waits within this time, and end. What is left then is dropped. May be called again."""
        until_s = time.monotonic() + timeout_s
        with self._ending:
            self._is_closing = True
            self._exporter.hurry(timeout_s)
            self._wishes.put(None)
            self._thread.join(max(0.0, until_s - time.monotonic()))
            self._exporter.close()
            self._thread.join(_LAST_MOMENT_S)
            while left := self._taken(BATCH):
                self._drop(len(left))

    def _drop(self, count: int) -> None:
        if count:
            thread = threading.get_ident()
            self._drops[thread] = self._drops.get(thread, 0) + count

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            wishes = self._wait()
            goes_on = not self._is_closing
            self._send_waiting()
            for done in wishes:
                done.set()

    def _wait(self) -> list[threading.Event]:
        """Wait until there is something to do. Returns who wants to know when it is done."""
        wishes = []
        try:
            wishes.append(self._wishes.get(timeout=self._delay_s))
            while True:
                wishes.append(self._wishes.get_nowait())
        except queue.Empty:
            pass
        self._is_woken = False
        return [done for done in wishes if done is not None]

    def _send_waiting(self) -> None:
        """Send all spans that wait now. When the outbox ends, a batch of which none was taken is the last."""
        left = len(self._spans)
        while left > 0 and (batch := self._taken(min(BATCH, left))):
            left -= len(batch)
            taken = self._sent(batch)
            self.exported += taken
            self.failed += len(batch) - taken
            if self._is_closing and not taken:
                return

    def _sent(self, batch: Sequence[AnySpan]) -> int:
        try:
            return self._exporter.export(batch)
        except Exception:  # the thread must outlive a span that cannot be encoded
            log.exception("%d spans cannot be sent", len(batch))
            return 0

    def _taken(self, most: int) -> list[AnySpan]:
        """Take up to this many spans, and no more than fill a batch. The thread and a shutdown that waits no
        longer may both do so.
        """
        batch: list[AnySpan] = []
        num_bytes = 0
        while len(batch) < most and num_bytes < BATCH_BYTES:
            try:
                span = self._spans.popleft()
            except IndexError:
                break
            batch.append(span)
            num_bytes += len(span) if isinstance(span, bytes) else _READABLE_BYTES
        return batch
