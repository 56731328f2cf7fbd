"""Spans and metrics on their way to a collector, and what is counted when it is bad to us."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from penstock.service.telemetry.metrics.options import MetricsOptions
from penstock.service.telemetry.metrics.push import MetricExporter
from penstock.service.telemetry.opening import open_collector, open_tracing
from penstock.service.telemetry.options import OTLP_PROTOCOLS, OtlpProtocol, TraceLevel, TracingOptions
from penstock.service.telemetry.otlp import sender, wire
from penstock.service.telemetry.otlp.tracing import Complaints, Tracing
from tests.service.rig import generate, serving
from tests.support.otlp import (
    WAIT_S,
    Drip,
    Fine,
    Garbage,
    Hang,
    OtlpReceiver,
    Partial,
    Refuse,
    tracing_to,
)

CERTS = Path(__file__).parents[2] / "certs"
LOGGER = "penstock.service.telemetry.otlp.tracing"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.fixture(params=OTLP_PROTOCOLS)
def receiver(request: pytest.FixtureRequest) -> Iterator[OtlpReceiver]:
    protocol: OtlpProtocol = request.param
    with OtlpReceiver(protocol) as receiver:
        yield receiver


def record(tracing: Tracing, count: int, name: str = "one") -> None:
    """Have spans made and ended."""
    tracer = tracing.provider.get_tracer("test")
    for _ in range(count):
        tracer.start_span(name).end()


async def test_spans_of_a_call_reach_the_collector(receiver: OtlpReceiver) -> None:
    """At the latest when the server stops."""
    tracing = tracing_to(receiver, TraceLevel.REQUESTS)
    async with serving(tracing=tracing) as rig:
        await rig.inference.Generate(generate("y"))
    spans = {span.name: span for span in receiver.spans}
    names = {"tokenize", "submit", "queue", "prefill", "decode", "reply"}
    assert set(spans) == {"penstock.v1.InferenceService/Generate", "text_completion fake", *names}
    rpc, request = (
        receiver.span("penstock.v1.InferenceService/Generate"),
        receiver.span("text_completion fake"),
    )
    assert (rpc.kind, rpc.parent_id, request.parent_id) == ("SERVER", "", rpc.span_id)
    assert {child.name for child in receiver.children(request)} == names
    for span in (rpc, request):
        assert (span.resource["service.name"], span.resource["service.version"]) == ("penstock", "1.2.3")
        assert span.scope == "penstock.service"
    assert (tracing.exported, tracing.failed, tracing.dropped, tracing.waiting) == (len(spans), 0, 0, 0)


def test_long_spans_go_in_requests_that_a_collector_takes(receiver: OtlpReceiver) -> None:
    """gRPC's own limit is 4 MiB; a caller's `tracestate` makes every span of its request longer."""
    tracing = tracing_to(receiver)
    trace = wire.head(os.urandom(16), f"k={'v' * 10_000}")
    tracing.emit([wire.span(trace, os.urandom(8), os.urandom(8), wire.named("long"), 1, 2)] * 600)
    assert tracing.flush(WAIT_S)
    assert (tracing.exported, tracing.failed, len(receiver.spans)) == (600, 0, 600)
    tracing.shutdown(0.0)


async def test_level_off_records_nothing(receiver: OtlpReceiver) -> None:
    tracing = tracing_to(receiver, TraceLevel.OFF)
    async with serving(tracing=tracing) as rig:
        await rig.inference.Generate(generate("y", request_id="first"))
        tracing.level = TraceLevel.REQUESTS
        await rig.inference.Generate(generate("y", request_id="second"))
        tracing.level = TraceLevel.OFF
        await rig.inference.Generate(generate("y", request_id="third"))
    request = receiver.span("text_completion fake")
    assert request.attributes["gen_ai.response.id"] == "second"


def sent(receiver: OtlpReceiver, tracing: Tracing, count: int) -> tuple[int, int]:
    """Send spans, and return how many were exported and how many failed of them."""
    exported, failed = tracing.exported, tracing.failed
    record(tracing, count)
    assert tracing.flush(WAIT_S)
    return tracing.exported - exported, tracing.failed - failed


def sent_at_last(receiver: OtlpReceiver, tracing: Tracing, count: int) -> None:
    """Send spans until some were taken, where a batch has so little time that a busy machine may lose it."""
    receiver.always = Fine()
    receiver.wait_until(lambda: sent(receiver, tracing, count) == (count, 0))


@pytest.fixture
def tracing(receiver: OtlpReceiver) -> Iterator[Tracing]:
    """Yield tracing that gives up a batch after ten seconds."""
    tracing = tracing_to(receiver)
    yield tracing
    tracing.shutdown(0.0)
    assert tracing.waiting == 0


def test_a_refused_batch_is_not_sent_again(receiver: OtlpReceiver, tracing: Tracing, caplog: Any) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    receiver.behaviours.append(Refuse(StatusCode.INVALID_ARGUMENT, 400, message="evil\x1b[31m" + "x" * 5000))
    assert sent(receiver, tracing, 5) == (0, 5)
    assert receiver.attempts == 1
    assert sent(receiver, tracing, 3) == (3, 0)
    lines = [r.getMessage() for r in caplog.records if r.name == LOGGER]
    assert len(lines) == 2
    assert lines[0].startswith(f"spans do not reach {receiver.endpoint}")
    assert lines[1].endswith("that is over, after 1 failed exports")
    assert "\x1b" not in lines[0]
    assert len(lines[0]) < 500


@pytest.mark.parametrize(
    "refusal",
    [
        Refuse(StatusCode.UNAVAILABLE, 503, retry_after_s=0.01),
        Refuse(StatusCode.RESOURCE_EXHAUSTED, 429, retry_after_s=0.01),
        Refuse(StatusCode.DEADLINE_EXCEEDED, 504, retry_after_s=0.0),
    ],
)
def test_a_batch_is_sent_again_when_the_collector_says_so(
    receiver: OtlpReceiver, tracing: Tracing, refusal: Refuse
) -> None:
    receiver.behaviours.extend([refusal, refusal])
    assert sent(receiver, tracing, 5) == (5, 0)
    assert (receiver.attempts, len(receiver.spans)) == (3, 5)


def test_a_collector_that_wants_to_be_left_alone(receiver: OtlpReceiver, tracing: Tracing) -> None:
    """For longer than a batch has. The batch is given up at once, nothing is sent for a while, and the
    server's end does not wait for that.
    """
    receiver.always = Refuse(retry_after_s=1e6)
    assert sent(receiver, tracing, 5) == (0, 5)
    assert receiver.attempts == 1
    receiver.always = Fine()
    record(tracing, 2)
    assert not tracing.flush(0.2)
    assert receiver.attempts == 1
    tracing.shutdown(WAIT_S)
    assert (tracing.exported, tracing.failed, tracing.dropped) == (2, 5, 0)


@pytest.mark.parametrize(
    ("rejected", "counted"), [(0, (5, 0)), (2, (3, 2)), (5, (0, 5)), (10**12, (0, 5)), (-7, (5, 0))]
)
def test_spans_that_the_collector_rejects_are_counted(
    receiver: OtlpReceiver, tracing: Tracing, rejected: int, counted: tuple[int, int]
) -> None:
    receiver.always = Partial(rejected, "no\nroom")
    assert sent(receiver, tracing, 5) == counted
    assert receiver.attempts == 1


@pytest.mark.parametrize("answer", [b"\xff" * 20, b"\x0a\x04\x08\x02"])
def test_an_answer_that_is_garbage_is_a_yes(receiver: OtlpReceiver, tracing: Tracing, answer: bytes) -> None:
    receiver.always = Garbage(answer)
    assert sent(receiver, tracing, 5) == (5, 0)


def test_a_huge_answer_is_not_read(receiver: OtlpReceiver, tracing: Tracing) -> None:
    """And the next batch is sent as if nothing had been."""
    receiver.behaviours.append(Garbage(b"\x00" * (1 << 20)))
    assert sum(sent(receiver, tracing, 5)) == 5
    assert receiver.attempts == 1
    assert sent(receiver, tracing, 3) == (3, 0)


def test_an_answer_that_does_not_come(receiver: OtlpReceiver, monkeypatch: Any) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "300")
    tracing = tracing_to(receiver)
    receiver.always = Hang()
    assert sent(receiver, tracing, 5) == (0, 5)
    sent_at_last(receiver, tracing, 3)
    assert (tracing.exported, tracing.dropped) == (3, 0)
    tracing.shutdown(WAIT_S)


def test_a_shutdown_while_an_answer_does_not_come(receiver: OtlpReceiver, monkeypatch: Any) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600000")
    tracing = tracing_to(receiver)
    receiver.always = Hang()
    record(tracing, 600)
    receiver.wait_until(lambda: receiver.attempts == 1)
    record(tracing, 7)
    tracing.shutdown(0.2)
    assert tracing.exported == 0
    assert tracing.failed + tracing.dropped == 607
    assert tracing.waiting == 0


def test_a_shutdown_while_a_batch_waits_to_be_sent_again(receiver: OtlpReceiver, monkeypatch: Any) -> None:
    """It is sent at once, and so is what waits behind it."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600000")
    tracing = tracing_to(receiver)
    receiver.behaviours.append(Refuse(retry_after_s=3000.0))
    record(tracing, 600)
    receiver.wait_until(lambda: receiver.attempts == 1)
    tracing.shutdown(WAIT_S)
    assert (tracing.exported, tracing.failed, tracing.dropped) == (600, 0, 0)


async def test_a_server_does_not_notice_a_collector_that_hangs(
    receiver: OtlpReceiver, monkeypatch: Any
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600000")
    tracing = tracing_to(receiver, TraceLevel.REQUESTS, max_waiting_spans=10)
    receiver.always = Hang()
    async with serving(tracing=tracing, grace_s=0.1) as rig:
        for _ in range(10):
            await rig.inference.Generate(generate("y"))
        assert tracing.waiting <= 10
    total = tracing.exported + tracing.failed + tracing.dropped
    assert (tracing.exported, total, tracing.waiting) == (0, 80, 0)


def test_a_collector_that_goes_away_and_comes_back(monkeypatch: Any) -> None:
    """No span is lost of those for which there is time to try again."""
    for protocol in OTLP_PROTOCOLS:
        with OtlpReceiver(protocol) as first:
            tracing = tracing_to(first)
            assert sent(first, tracing, 2) == (2, 0)
        record(tracing, 3, "between")
        assert not tracing.flush(0.2)
        with OtlpReceiver(protocol, port=first.port) as second:
            assert tracing.flush(WAIT_S)
            assert len(second.named("between")) == 3
            tracing.shutdown(WAIT_S)
        assert (tracing.exported, tracing.failed, tracing.dropped) == (5, 0, 0)


@pytest.mark.parametrize("protocol", OTLP_PROTOCOLS)
def test_nobody_listens(protocol: OtlpProtocol) -> None:
    """A shutdown does not try for long, and what there was no room for is counted."""
    with OtlpReceiver(protocol) as receiver:
        pass
    tracing = tracing_to(receiver, max_waiting_spans=600)
    record(tracing, 5000)
    tracing.shutdown(WAIT_S)
    assert tracing.exported == 0
    assert tracing.failed + tracing.dropped == 5000
    assert tracing.waiting == 0


@pytest.mark.parametrize("protocol", OTLP_PROTOCOLS)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_collector_that_connects_and_says_nothing(
    protocol: OtlpProtocol, scheme: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "300")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = TracingOptions(
            otlp_endpoint=f"{scheme}://127.0.0.1:{silent.getsockname()[1]}", otlp_protocol=protocol
        )
        tracing = open_tracing(options, version="1", instance_id="i")
        assert tracing is not None
        record(tracing, 4)
        assert tracing.flush(WAIT_S)
        assert (tracing.exported, tracing.failed) == (0, 4)
        tracing.shutdown(WAIT_S)


def test_over_http_an_answer_that_comes_byte_by_byte_is_ended(monkeypatch: Any) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "300")
    with OtlpReceiver("http/protobuf") as receiver:
        tracing = tracing_to(receiver)
        receiver.always = Drip()
        assert sent(receiver, tracing, 5) == (0, 5)
        sent_at_last(receiver, tracing, 3)
        tracing.shutdown(WAIT_S)


@pytest.mark.parametrize("status", [302, 404, 500])
def test_over_http_only_2xx_is_a_yes(status: int, caplog: Any) -> None:
    with OtlpReceiver("http/protobuf") as receiver:
        tracing = tracing_to(receiver)
        receiver.always = Refuse(http_status=status)
        assert sent(receiver, tracing, 5) == (0, 5)
        assert receiver.attempts == 1
        tracing.shutdown(WAIT_S)
    assert f"HTTP {status}" in caplog.text


def test_headers_are_sent_along(receiver: OtlpReceiver, monkeypatch: Any) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=psk%20a,x-Tenant=b")
    tracing = tracing_to(receiver)
    assert sent(receiver, tracing, 1) == (1, 0)
    headers = receiver.received[0].headers
    assert (headers["x-key"], headers["x-tenant"]) == ("psk a", "b")
    tracing.shutdown(WAIT_S)


@pytest.mark.parametrize("compression", ["gzip", "none"])
def test_compression(receiver: OtlpReceiver, monkeypatch: Any, compression: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
    with counting_relay(receiver.port) as (port, counted):
        options = TracingOptions(otlp_endpoint=f"http://127.0.0.1:{port}", otlp_protocol=receiver.protocol)
        tracing = open_tracing(options, version="1", instance_id="i")
        assert tracing is not None
        tracing.provider.get_tracer("test").start_span("a", attributes={"long": "a" * 100_000}).end()
        tracing.shutdown(WAIT_S)
    assert receiver.span("a").attributes["long"] == "a" * 100_000
    assert (sum(counted) < 20_000) is (compression == "gzip")


def test_a_connection_is_kept_for_all_batches(receiver: OtlpReceiver) -> None:
    """The relay forwards one, and no second."""
    with counting_relay(receiver.port) as (port, _):
        options = TracingOptions(otlp_endpoint=f"http://127.0.0.1:{port}", otlp_protocol=receiver.protocol)
        tracing = open_tracing(options, version="1", instance_id="i")
        assert tracing is not None
        assert [sent(receiver, tracing, 1) for _ in range(3)] == [(1, 0)] * 3
        receiver.behaviours.append(Refuse(StatusCode.INVALID_ARGUMENT, 400))
        assert [sent(receiver, tracing, 1) for _ in range(2)] == [(0, 1), (1, 0)]
        tracing.shutdown(WAIT_S)


@contextlib.contextmanager
def counting_relay(to: int) -> Iterator[tuple[int, list[int]]]:
    """Yield a port that forwards one connection, and the sizes of what the client sends."""
    counted: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def forward() -> None:
            near, _ = listener.accept()
            with near, socket.create_connection(("127.0.0.1", to)) as far:
                back = threading.Thread(target=copy, args=(far, near, []))
                back.start()
                copy(near, far, counted)
                back.join()

        thread = threading.Thread(target=forward)
        thread.start()
        yield listener.getsockname()[1], counted
        thread.join(WAIT_S)


def copy(source: socket.socket, sink: socket.socket, counted: list[int]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            counted.append(len(data))
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("protocol", OTLP_PROTOCOLS)
def test_tls_with_a_private_authority(protocol: OtlpProtocol, monkeypatch: Any, caplog: Any) -> None:
    """A collector with a certificate that is not known gets nothing; one that wants ours gets it."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "400")
    pair = (CERTS / "server.pem", CERTS / "server.key")
    with OtlpReceiver(protocol, tls=pair, client_ca=CERTS / "ca.pem") as receiver:
        stranger = tracing_to(receiver)
        assert sent(receiver, stranger, 1) == (0, 1)
        stranger.shutdown(0.0)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(CERTS / "ca.pem"))
        nobody = tracing_to(receiver)
        assert sent(receiver, nobody, 1) == (0, 1)
        nobody.shutdown(0.0)
        assert receiver.attempts == 0
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", str(CERTS / "client.pem"))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_KEY", str(CERTS / "client.key"))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "20000")
        known = tracing_to(receiver)
        assert sent(receiver, known, 3) == (3, 0)
        known.shutdown(WAIT_S)
    assert "CERTIFICATE" in caplog.text.upper()


def test_a_proxy_is_used_for_other_machines_only(monkeypatch: Any) -> None:
    with OtlpReceiver("http/protobuf") as receiver:
        monkeypatch.setenv("http_proxy", receiver.endpoint.replace("http://", "http://me:pw@"))
        monkeypatch.setenv("no_proxy", "other.invalid")
        options = TracingOptions(otlp_endpoint="http://box.invalid:4318", otlp_protocol="http/protobuf")
        tracing = open_tracing(options, version="1", instance_id="i")
        assert tracing is not None
        assert sent(receiver, tracing, 1) == (1, 0)
        headers = receiver.received[0].headers
        assert headers["host"] == "box.invalid:4318"
        tracing.shutdown(WAIT_S)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        direct = tracing_to(receiver)
        assert sent(receiver, direct, 1) == (1, 0)
        direct.shutdown(WAIT_S)


def test_tls_goes_through_a_tunnel_of_the_proxy(monkeypatch: Any) -> None:
    """The proxy sees where it goes, and nothing else."""
    monkeypatch.setattr(sender, "is_loopback", lambda host: False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(CERTS / "ca.pem"))
    pair = (CERTS / "server.pem", CERTS / "server.key")
    asked: list[bytes] = []
    with (
        OtlpReceiver("http/protobuf", tls=pair) as receiver,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):

        def proxy() -> None:
            near, _ = listener.accept()
            with near, socket.create_connection(("127.0.0.1", receiver.port)) as far:
                while b"\r\n\r\n" not in b"".join(asked):
                    asked.append(near.recv(65536))
                near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                back = threading.Thread(target=copy, args=(far, near, []))
                back.start()
                copy(near, far, [])
                back.join()

        thread = threading.Thread(target=proxy)
        thread.start()
        monkeypatch.setenv("https_proxy", f"http://me:pw@127.0.0.1:{listener.getsockname()[1]}")
        endpoint = f"https://localhost:{receiver.port}"
        options = TracingOptions(otlp_endpoint=endpoint, otlp_protocol="http/protobuf")
        tracing = open_tracing(options, version="1", instance_id="i")
        assert tracing is not None
        assert sent(receiver, tracing, 3) == (3, 0)
        tracing.shutdown(WAIT_S)
        thread.join(WAIT_S)
    head = b"".join(asked).decode()
    assert head.startswith(f"CONNECT localhost:{receiver.port} HTTP/1.")
    assert f"Basic {base64.b64encode(b'me:pw').decode()}" in head
    assert "proxy-authorization" not in receiver.received[0].headers


def test_complaints_are_few(caplog: Any) -> None:
    """Also where every second export fails."""
    caplog.set_level(logging.INFO, LOGGER)
    now = [0.0]
    complaints = Complaints("spans do not reach it", lambda: now[0])
    for _ in range(100):
        complaints.tell("gone")
        complaints.look(0, "")
        now[0] += 1.0
    assert len(caplog.records) == 4, "twice that it fails, and twice that it works again"


def metrics(value: int) -> MetricsData:
    point = NumberDataPoint(attributes={"a": "b"}, start_time_unix_nano=1, time_unix_nano=2, value=value)
    total = Sum([point], AggregationTemporality.CUMULATIVE, is_monotonic=True)
    metric = Metric(name="penstock.things", description="Things.", unit="1", data=total)
    scope = ScopeMetrics(scope=InstrumentationScope("test"), metrics=[metric], schema_url="")
    made = ResourceMetrics(resource=Resource({"service.name": "x"}), scope_metrics=[scope], schema_url="")
    return MetricsData([made])


def metric_exporter(options: TracingOptions) -> MetricExporter:
    collector = open_collector(MetricsOptions(), options, version="1", instance_id="i")
    assert collector is not None
    return collector.exporter


def test_metrics_reach_the_collector(receiver: OtlpReceiver, monkeypatch: Any) -> None:
    options = TracingOptions(otlp_endpoint=receiver.endpoint, otlp_protocol=receiver.protocol)
    exporter = metric_exporter(options)
    assert exporter.export(metrics(7))
    assert receiver.metrics["penstock.things"].sum.data_points[0].as_int == 7
    assert not receiver.spans
    for behaviour in (Partial(1), Refuse(StatusCode.INVALID_ARGUMENT, 400)):
        receiver.behaviours.append(behaviour)
        assert not exporter.export(metrics(8)), behaviour
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "300")
    hurried = metric_exporter(options)
    receiver.always = Hang()
    assert not hurried.export(metrics(8))
    receiver.always = Fine()
    hurried.close()
    assert exporter.export(metrics(9))
    exporter.hurry(0.0)
    assert not exporter.export(metrics(10)), "no time is left"
    exporter.close()
    assert not exporter.export(metrics(11))
    assert receiver.metrics["penstock.things"].sum.data_points[0].as_int == 9
