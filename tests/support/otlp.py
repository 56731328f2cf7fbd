"""A collector in the test's process: it takes OTLP over gRPC or HTTP, keeps what it gets, and can misbehave.

with OtlpReceiver("grpc") as receiver:
    tracing = tracing_to(receiver)
    ...
    tracing.flush(WAIT_S)
    receiver.span("chat fake").attributes
"""

from __future__ import annotations

import gzip
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # ships no hints
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from penstock.service.telemetry.opening import open_tracing
from penstock.service.telemetry.options import OtlpProtocol, TraceLevel, TracingOptions
from penstock.service.telemetry.otlp.environment import Signal
from penstock.service.telemetry.otlp.outbox import AnySpan, SpanBatches
from penstock.service.telemetry.otlp.tracing import Tracing

WAIT_S = 20.0
_METHODS: dict[str, Signal] = {
    "/opentelemetry.proto.collector.trace.v1.TraceService/Export": "traces",
    "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export": "metrics",
    "/v1/traces": "traces",
    "/v1/metrics": "metrics",
}
_REQUESTS: dict[Signal, Any] = {
    "traces": trace_service_pb2.ExportTraceServiceRequest,
    "metrics": metrics_service_pb2.ExportMetricsServiceRequest,
}
_RESPONSES: dict[Signal, Any] = {
    "traces": trace_service_pb2.ExportTraceServiceResponse,
    "metrics": metrics_service_pb2.ExportMetricsServiceResponse,
}


@dataclass(frozen=True)
class Fine:
    """Take the export."""


@dataclass(frozen=True)
class Partial:
    """Take it, but for some items."""

    rejected: int
    message: str = ""


@dataclass(frozen=True)
class Garbage:
    """Take it, and answer with these bytes."""

    answer: bytes


@dataclass(frozen=True)
class Refuse:
    """Refuse it."""

    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    http_status: int = 503
    retry_after_s: float | None = None
    message: str = "not now"


@dataclass(frozen=True)
class Hang:
    """Say nothing until the receiver ends."""


@dataclass(frozen=True)
class Drip:
    """Over HTTP: answer one byte after the other, without end."""

    every_s: float = 0.01


Behaviour = Fine | Partial | Garbage | Refuse | Hang | Drip


@dataclass(frozen=True)
class Event:
    """An event of a span."""

    name: str
    at_ns: int
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Link:
    """A link of a span, with ids in hex."""

    trace_id: str
    span_id: str
    attributes: dict[str, Any]


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as the collector got it. Ids are in hex; times are in nanoseconds of the Unix epoch."""

    name: str
    kind: str
    """Such as SERVER and INTERNAL."""
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for a root."""
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[Event]
    links: list[Link]
    status: str
    """UNSET, OK or ERROR."""
    status_message: str
    scope: str
    resource: dict[str, Any] = field(repr=False)
    proto: Any = field(repr=False, compare=False)

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class Received:
    """One export."""

    signal: Signal
    message: Any
    """The ExportTraceServiceRequest or ExportMetricsServiceRequest."""
    headers: dict[str, str]
    is_compressed: bool
    """Known over HTTP only: gRPC does not tell."""


class OtlpReceiver:
    """A collector. What it has behaved badly to is in `attempts`, and not in what it received."""

    def __init__(
        self,
        protocol: OtlpProtocol = "grpc",
        *,
        port: int = 0,
        tls: tuple[Path, Path] | None = None,
        client_ca: Path | None = None,
    ) -> None:
        """`tls` is a certificate and its key; `client_ca` asks clients for a certificate."""
        self.protocol: OtlpProtocol = protocol
        self.received: list[Received] = []
        self.attempts = 0
        """Exports that came, whatever was answered."""
        self.behaviours: deque[Behaviour] = deque()
        """How the next exports are answered, one each."""
        self.always: Behaviour = Fine()
        """How all others are answered."""
        self.ended = threading.Event()
        self._wanted, self._tls, self._client_ca = port, tls, client_ca
        self._stop: Callable[[], None] = lambda: None
        self.port = 0

    def __enter__(self) -> OtlpReceiver:
        self.port, self._stop = (_serve_grpc if self.protocol == "grpc" else _serve_http)(
            self, self._wanted, self._tls, self._client_ca
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self._stop()

    @property
    def endpoint(self) -> str:
        """The address that --otlp-endpoint takes."""
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"

    @property
    def spans(self) -> list[ReceivedSpan]:
        """All spans, in the order in which they came."""
        exports = [one.message for one in list(self.received) if one.signal == "traces"]
        return [span for export in exports for span in spans_of(export)]

    def span(self, name: str) -> ReceivedSpan:
        """Return the only span of this name."""
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def named(self, name: str) -> list[ReceivedSpan]:
        """All spans of this name, by their beginning."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_ns)

    def children(self, of: ReceivedSpan) -> list[ReceivedSpan]:
        """Return the spans right below this one, by their beginning."""
        return children_of(of, self.spans)

    @property
    def metrics(self) -> dict[str, Any]:
        """The newest message of each metric, by its name."""
        exports = [one.message for one in list(self.received) if one.signal == "metrics"]
        return {
            metric.name: metric
            for export in exports
            for resource in export.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for what other threads do, for a bounded time."""
        until_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < until_s, f"{self.attempts} exports came"
            time.sleep(0.005)

    def take(self, signal: Signal, body: bytes, headers: dict[str, str], *, is_compressed: bool) -> Behaviour:
        """Take an export that has come. Returns what is to be answered."""
        self.attempts += 1
        try:
            behaviour = self.behaviours.popleft()
        except IndexError:
            behaviour = self.always
        if isinstance(behaviour, (Fine, Partial, Garbage)):
            message = _REQUESTS[signal].FromString(body)
            self.received.append(Received(signal, message, headers, is_compressed))
        return behaviour


def tracing_to(receiver: OtlpReceiver, level: TraceLevel = TraceLevel.STEPS, **options: Any) -> Tracing:
    """Return what a server sends its spans to the receiver with. `options` are further TracingOptions."""
    made = open_tracing(
        TracingOptions(
            otlp_endpoint=receiver.endpoint, otlp_protocol=receiver.protocol, trace_level=level, **options
        ),
        version="1.2.3",
        instance_id="i-1",
    )
    assert made is not None
    return made


class Recorder:
    """Traces whose spans a test can look at without a collector. It is the exporter, too, and keeps what it
    gets.
    """

    def __init__(self, level: TraceLevel = TraceLevel.STEPS, **options: Any) -> None:
        """`options` are further ones of Tracing."""
        self._kept: list[ReceivedSpan] = []
        self.tracing = Tracing(self, level=level, **options)
        self._batches = SpanBatches(self.tracing.resource)

    @property
    def finished(self) -> list[ReceivedSpan]:
        """All spans that have ended."""
        assert self.tracing.flush(WAIT_S)
        return list(self._kept)

    @property
    def spans(self) -> dict[str, ReceivedSpan]:
        """The newest span of each name."""
        return {span.name: span for span in self.finished}

    def named(self, name: str) -> list[ReceivedSpan]:
        """All spans of this name, by their beginning."""
        found = [span for span in self.finished if span.name == name]
        return sorted(found, key=lambda span: (span.start_ns, span.end_ns))

    def children(self, of: ReceivedSpan) -> list[ReceivedSpan]:
        """Return the spans right below this one, by their beginning."""
        return children_of(of, self.finished)

    def clear(self) -> None:
        """Forget all spans so far."""
        assert self.tracing.flush(WAIT_S)
        self._kept.clear()

    def export(self, spans: Sequence[AnySpan]) -> int:
        request = trace_service_pb2.ExportTraceServiceRequest.FromString(self._batches.request(spans))
        self._kept.extend(spans_of(request))
        return len(spans)

    def hurry(self, within_s: float) -> None:
        pass

    def close(self) -> None:
        pass


def children_of(of: ReceivedSpan, spans: Sequence[ReceivedSpan]) -> list[ReceivedSpan]:
    """Return the spans right below this one, by their beginning."""
    below = [span for span in spans if (span.trace_id, span.parent_id) == (of.trace_id, of.span_id)]
    return sorted(below, key=lambda span: (span.start_ns, span.end_ns))


def spans_of(export: Any) -> Iterator[ReceivedSpan]:
    """Yield the spans of an ExportTraceServiceRequest."""
    for resource in export.resource_spans:
        named = attributes_of(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield _span(span, scope.scope.name, named)


def _span(span: Any, scope: str, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=attributes_of(span.attributes),
        events=[Event(e.name, e.time_unix_nano, attributes_of(e.attributes)) for e in span.events],
        links=[Link(k.trace_id.hex(), k.span_id.hex(), attributes_of(k.attributes)) for k in span.links],
        status=trace_pb2.Status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
        status_message=span.status.message,
        scope=scope,
        resource=resource,
        proto=span,
    )


def attributes_of(pairs: Any) -> dict[str, Any]:
    """Attributes of OTLP as Python's values."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def _serve_grpc(
    receiver: OtlpReceiver, port: int, tls: tuple[Path, Path] | None, client_ca: Path | None
) -> tuple[int, Callable[[], None]]:
    class Handler(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            signal = _METHODS.get(details.method)
            if signal is None:
                return None
            return grpc.unary_unary_rpc_method_handler(
                lambda body, context: _answer_grpc(receiver, signal, body, context)
            )

    server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((Handler(),))
    address = f"127.0.0.1:{port}"
    if tls is None:
        port = server.add_insecure_port(address)
    else:
        credentials = grpc.ssl_server_credentials(
            [(tls[1].read_bytes(), tls[0].read_bytes())],
            client_ca.read_bytes() if client_ca else None,
            client_ca is not None,
        )
        port = server.add_secure_port(address, credentials)
    server.start()

    def stop() -> None:
        server.stop(None).wait()

    return port, stop


def _answer_grpc(receiver: OtlpReceiver, signal: Signal, body: bytes, context: Any) -> bytes:
    headers = {name: value for name, value in context.invocation_metadata() if isinstance(value, str)}
    behaviour = receiver.take(signal, body, headers, is_compressed=False)
    if isinstance(behaviour, Refuse):
        if behaviour.retry_after_s is not None:
            context.set_trailing_metadata((("grpc-status-details-bin", _retry_status(behaviour)),))
        context.abort(behaviour.code, behaviour.message)
    if isinstance(behaviour, (Hang, Drip)):
        receiver.ended.wait()
    return _answer(signal, behaviour)


def _retry_status(refusal: Refuse) -> bytes:
    assert refusal.retry_after_s is not None
    delay = Duration(seconds=int(refusal.retry_after_s), nanos=int(refusal.retry_after_s % 1 * 1e9))
    packed = AnyMessage()
    packed.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=refusal.code.value[0], message=refusal.message, details=[packed])
    data: bytes = status.SerializeToString()
    return data


def _answer(signal: Signal, behaviour: Behaviour) -> bytes:
    """Return the message of an answer that is no refusal."""
    if isinstance(behaviour, Garbage):
        return behaviour.answer
    response = _RESPONSES[signal]()
    if isinstance(behaviour, Partial):
        response.partial_success.error_message = behaviour.message
        if signal == "traces":
            response.partial_success.rejected_spans = behaviour.rejected
        else:
            response.partial_success.rejected_data_points = behaviour.rejected
    data: bytes = response.SerializeToString()
    return data


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    receiver: OtlpReceiver

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that is gone


def _serve_http(
    receiver: OtlpReceiver, port: int, tls: tuple[Path, Path] | None, client_ca: Path | None
) -> tuple[int, Callable[[], None]]:
    server = _HttpServer(("127.0.0.1", port), _HttpHandler)
    server.receiver = receiver
    if tls is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_ca)
        context.load_cert_chain(*tls)
        if client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return int(server.server_address[1]), stop


class _HttpHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, _HttpServer)
        receiver = server.receiver
        body = self.rfile.read(int(self.headers["content-length"]))
        is_compressed = self.headers.get("content-encoding") == "gzip"
        signal = _METHODS.get(urlsplit(self.path).path)  # a proxy is sent whole addresses
        if receiver.ended.is_set():  # as if this connection were gone with the server
            self.close_connection = True
            return
        if signal is None:
            self._reply(404, b"")
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        plain = gzip.decompress(body) if is_compressed else body
        behaviour = receiver.take(signal, plain, headers, is_compressed=is_compressed)
        if isinstance(behaviour, Hang):
            receiver.ended.wait()
            self.close_connection = True
        elif isinstance(behaviour, Drip):
            self._drip(behaviour, receiver.ended)
        elif isinstance(behaviour, Refuse):
            after = {} if behaviour.retry_after_s is None else {"retry-after": f"{behaviour.retry_after_s:g}"}
            self._reply(behaviour.http_status, b"", after)
        else:
            self._reply(200, _answer(signal, behaviour))

    def _reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"content-length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _drip(self, drip: Drip, ended: threading.Event) -> None:
        self.close_connection = True
        self.wfile.write(b"HTTP/1.1 200 OK\r\nx-padding: ")
        while not ended.wait(drip.every_s):
            self.wfile.write(b"x")
