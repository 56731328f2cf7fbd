"""The flags of traces and of the collector, and OpenTelemetry's variables beside them."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from typing import Any

import grpc
import pytest

from penstock.server_cli.commands import serve
from penstock.server_cli.serving import serve_flags
from penstock.server_cli.serving.serve_flags import tracing_options
from penstock.service.telemetry.opening import open_tracing
from penstock.service.telemetry.options import OtlpProtocol, TraceLevel, TracingOptions
from penstock.v1 import inference_pb2_grpc
from tests.service.cli.test_serve import fake_process
from tests.service.rig import generate
from tests.support.otlp import Hang, OtlpReceiver


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve_flags.add_parser(parser.add_subparsers())
    return parser.parse_args(["serve", "demo", *arguments])


def test_defaults_are_those_of_the_options() -> None:
    assert tracing_options(parse()) == TracingOptions()


@pytest.mark.parametrize("level", TraceLevel)
def test_every_flag_becomes_its_option(level: TraceLevel) -> None:
    args = parse(
        "--otlp-endpoint", "https://box",
        "--otlp-protocol", "http/protobuf",
        "--trace-level", level.name.lower(),
        "--trace-sample-ratio", "0.25",
        "--max-waiting-spans", "17",
    )  # fmt: skip
    assert tracing_options(args) == TracingOptions(
        otlp_endpoint="https://box",
        otlp_protocol="http/protobuf",
        trace_level=level,
        trace_sample_ratio=0.25,
        max_waiting_spans=17,
    )


@pytest.mark.parametrize(
    ("environ", "arguments", "complaint"),
    [
        (
            {},
            ["--otlp-endpoint", "box:4317"],
            "--otlp-endpoint: must begin with http:// (plaintext) or https://",
        ),
        ({}, ["--otlp-endpoint", ""], "--otlp-endpoint: "),
        ({}, ["--trace-sample-ratio", "2"], "--trace-sample-ratio: must be from 0 to 1, not 2.0"),
        ({}, ["--max-waiting-spans", "0"], "--max-waiting-spans: must be from 1 to "),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "box"}, [], "OTEL_EXPORTER_OTLP_ENDPOINT: must begin with http://"),
        (
            {"OTEL_TRACES_SAMPLER": "sometimes"},
            ["--otlp-endpoint", "http://127.0.0.1:1"],
            "OTEL_TRACES_SAMPLER: must be of always_on,",
        ),
        (
            {"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "many"},
            ["--otlp-endpoint", "http://127.0.0.1:1"],
            "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT",
        ),
    ],
)
def test_a_bad_value_is_one_clear_line(
    environ: dict[str, str], arguments: list[str], complaint: str, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert serve.run(parse("--port", "0", *arguments)) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("penstock serve: ")
    assert complaint in errors
    assert errors.count("\n") == 1


def test_a_variable_alone_switches_traces_on(monkeypatch: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    assert open_tracing(TracingOptions(), version="1", instance_id="i") is None
    assert not caplog.records, "nobody asked for traces"
    with OtlpReceiver("http/protobuf") as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        tracing = open_tracing(TracingOptions(), version="1", instance_id="i")
        assert tracing is not None
        tracing.provider.get_tracer("t").start_span("a").end()
        tracing.shutdown(20.0)
        assert receiver.span("a").resource["service.instance.id"] == "i"
    assert f"traces go to {receiver.endpoint}/v1/traces over http/protobuf" in caplog.text


@pytest.mark.parametrize("name", ["OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"])
def test_a_variable_that_switches_traces_off_is_told(name: str, monkeypatch: Any, caplog: Any) -> None:
    value = "true" if name == "OTEL_SDK_DISABLED" else "none"
    monkeypatch.setenv(name, value)
    options = TracingOptions(otlp_endpoint="http://127.0.0.1:1")
    assert open_tracing(options, version="1", instance_id="i") is None
    assert f"no traces, because of {name}={value}" in caplog.text


@pytest.mark.ci
@pytest.mark.parametrize(
    ("protocol", "is_dead"), [("grpc", True), pytest.param("http/protobuf", False, marks=pytest.mark.sweep)]
)
def test_a_server_process_sends_its_last_spans_and_ends(protocol: OtlpProtocol, is_dead: bool) -> None:
    """Also if the collector takes every call and answers none of them."""
    with OtlpReceiver(protocol) as receiver:
        if is_dead:
            receiver.always = Hang()
        flags = ["--otlp-endpoint", receiver.endpoint, "--otlp-protocol", protocol, "--grace", "0.5"]
        with fake_process("--port", "0", "--trace-level", "requests", *flags) as server:
            address = server.wait_for(r"ready on (127\.0\.0\.1:\d+)")[1]
            with grpc.insecure_channel(address) as channel:
                inference: Any = inference_pb2_grpc.InferenceServiceStub(channel)
                inference.Generate(generate("y", stopping={"max_tokens": 1}), timeout=60)
            server.popen.send_signal(signal.SIGTERM)
            assert server.wait() == 0
        if is_dead:
            assert not receiver.spans
            assert "spans do not reach" in server.output
        else:
            assert {"penstock.v1.InferenceService/Generate", "text_completion fake"} <= {
                span.name for span in receiver.spans
            }
        assert "Traceback" not in server.output
