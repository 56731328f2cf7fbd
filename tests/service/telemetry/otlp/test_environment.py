"""OpenTelemetry's environment variables beside the flags: which wins, and what is no value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import SpanContext, TraceFlags, set_span_in_context
from opentelemetry.trace.span import NonRecordingSpan

from penstock.runtime.errors import ConfigError
from penstock.service.telemetry.metrics.options import MetricsOptions
from penstock.service.telemetry.opening import push_interval_s
from penstock.service.telemetry.options import TraceLevel, TracingOptions
from penstock.service.telemetry.otlp.environment import (
    Destination,
    Signal,
    destination,
    why_off,
)
from penstock.service.telemetry.otlp.sdk import sampler, service_resource

CERTS = Path(__file__).parents[2] / "certs"
PAGE = Path(__file__).parents[4] / "docs" / "reference" / "environment.md"
NAME = "OTEL_EXPORTER_OTLP"
BASE = {f"{NAME}_ENDPOINT": "http://box:4317"}
SAMPLER, ARG = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
HTTP = {f"{NAME}_PROTOCOL": "http/protobuf"}


def to(environ: dict[str, str], signal: Signal = "traces", **options: Any) -> Destination:
    """Return the destination, which there must be."""
    found = destination(TracingOptions(**options), signal, environ)
    assert found is not None
    return found


def test_nothing_is_sent_by_default() -> None:
    assert destination(TracingOptions(), "traces", {}) is None
    assert destination(TracingOptions(), "metrics", {}) is None
    assert destination(TracingOptions(), "traces", {f"{NAME}_ENDPOINT": " "}) is None, "empty is not set"


@pytest.mark.parametrize(
    ("environ", "options", "url"),
    [
        ({}, {"otlp_endpoint": "http://box:4317"}, "http://box:4317"),
        ({}, {"otlp_endpoint": "https://box/"}, "https://box:443"),
        ({}, {"otlp_endpoint": "http://[::1]:4317"}, "http://[::1]:4317"),
        ({}, {"otlp_endpoint": "http://box:4318", "otlp_protocol": "http/protobuf"}, "http://box:4318/v1/traces"),
        (HTTP, {"otlp_endpoint": "https://box/tenant/"}, "https://box:443/tenant/v1/traces"),
        (BASE, {}, "http://box:4317"),
        (BASE | HTTP, {}, "http://box:4317/v1/traces"),
        (BASE, {"otlp_endpoint": "http://flag:1"}, "http://flag:1"),
        (BASE | {f"{NAME}_TRACES_ENDPOINT": "http://own:2"}, {}, "http://own:2"),
        (HTTP | {f"{NAME}_TRACES_ENDPOINT": "http://own:2/as/is"}, {}, "http://own:2/as/is"),
        (HTTP | {f"{NAME}_TRACES_ENDPOINT": "http://own:2"}, {}, "http://own:2/"),
        (BASE | HTTP, {"otlp_protocol": "grpc"}, "http://box:4317"),
        (BASE | HTTP | {f"{NAME}_TRACES_PROTOCOL": "grpc"}, {}, "http://box:4317"),
        ({f"{NAME}_ENDPOINT": "box:4317", f"{NAME}_INSECURE": "true"}, {}, "http://box:4317"),
        ({f"{NAME}_ENDPOINT": "box:4317", f"{NAME}_INSECURE": "false"}, {}, "https://box:4317"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, {}, "http://localhost:4317"),
        ({"OTEL_TRACES_EXPORTER": "otlp"} | HTTP, {}, "http://localhost:4318/v1/traces"),
    ],
)  # fmt: skip
def test_where_spans_go(environ: dict[str, str], options: dict[str, Any], url: str) -> None:
    found = to(environ, **options)
    assert found.url == url
    assert found.is_tls is url.startswith("https")
    assert found.protocol == ("grpc" if found.path == "" else "http/protobuf")


def test_the_metrics_have_variables_of_their_own() -> None:
    environ = BASE | {f"{NAME}_METRICS_ENDPOINT": "http://own:2", f"{NAME}_TRACES_TIMEOUT": "1"}
    assert to(environ, "metrics").url == "http://own:2"
    assert to(environ, "metrics").timeout_s == 10
    assert destination(TracingOptions(), "traces", {f"{NAME}_METRICS_ENDPOINT": "http://own:2"}) is None


def test_what_else_a_destination_has() -> None:
    plain = to(BASE)
    assert (plain.headers, plain.timeout_s, plain.is_compressed, plain.certificate) == ((), 10.0, False, None)
    environ = BASE | {
        f"{NAME}_HEADERS": "Authorization=Bearer%20abc, x-tenant = a=b ,",
        f"{NAME}_TIMEOUT": "2500",
        f"{NAME}_COMPRESSION": "gzip",
        f"{NAME}_CERTIFICATE": str(CERTS / "ca.pem"),
        f"{NAME}_CLIENT_CERTIFICATE": str(CERTS / "client.pem"),
        f"{NAME}_CLIENT_KEY": str(CERTS / "client.key"),
    }
    made = to(environ)
    assert made.headers == (("authorization", "Bearer abc"), ("x-tenant", "a=b"))
    assert (made.timeout_s, made.is_compressed) == (2.5, True)
    assert (made.certificate, made.client_key) == (CERTS / "ca.pem", CERTS / "client.key")
    own = environ | {f"{NAME}_TRACES_HEADERS": "k=v", f"{NAME}_TRACES_COMPRESSION": "none"}
    assert (to(own).headers, to(own).is_compressed) == ((("k", "v"),), False)


@pytest.mark.parametrize(
    ("environ", "signal", "why"),
    [
        ({"OTEL_SDK_DISABLED": "true"}, "traces", "OTEL_SDK_DISABLED=true"),
        ({"OTEL_SDK_DISABLED": "TRUE"}, "metrics", "OTEL_SDK_DISABLED=true"),
        ({"OTEL_SDK_DISABLED": "false"}, "traces", ""),
        ({"OTEL_TRACES_EXPORTER": "none"}, "traces", "OTEL_TRACES_EXPORTER=none"),
        ({"OTEL_TRACES_EXPORTER": "none"}, "metrics", ""),
        ({"OTEL_METRICS_EXPORTER": "none"}, "metrics", "OTEL_METRICS_EXPORTER=none"),
        ({"OTEL_METRICS_EXPORTER": "prometheus"}, "metrics", "OTEL_METRICS_EXPORTER=prometheus"),
        ({"OTEL_METRICS_EXPORTER": "prometheus, otlp"}, "metrics", ""),
    ],
)
def test_a_variable_switches_a_signal_off(environ: dict[str, str], signal: Signal, why: str) -> None:
    """Also where a flag says where it would go."""
    assert why_off(signal, environ) == why
    options = TracingOptions(otlp_endpoint="http://box:1")
    assert (destination(options, signal, environ) is None) is bool(why)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({f"{NAME}_ENDPOINT": "box:4317"}, f"{NAME}_ENDPOINT: must begin with http:// (plaintext) or https://"),
        ({f"{NAME}_ENDPOINT": "ftp://box"}, f"{NAME}_ENDPOINT"),
        ({f"{NAME}_ENDPOINT": "http://"}, f"{NAME}_ENDPOINT"),
        ({f"{NAME}_ENDPOINT": "http://box:port"}, f"{NAME}_ENDPOINT"),
        ({f"{NAME}_ENDPOINT": "http://box:0"}, f"{NAME}_ENDPOINT"),
        ({f"{NAME}_ENDPOINT": "http://box:70000"}, f"{NAME}_ENDPOINT"),
        ({f"{NAME}_ENDPOINT": "http://[::1"}, f"{NAME}_ENDPOINT"),
        ({f"{NAME}_ENDPOINT": "http://a b"}, f"{NAME}_ENDPOINT"),
        ({f"{NAME}_ENDPOINT": "http://box/?a=b"}, f"{NAME}_ENDPOINT"),
        ({f"{NAME}_ENDPOINT": "http://box/path"}, f"{NAME}_ENDPOINT: an address for gRPC has no path"),
        ({f"{NAME}_TRACES_ENDPOINT": "http://box/v1/traces"}, f"{NAME}_TRACES_ENDPOINT"),
        (HTTP | {f"{NAME}_ENDPOINT": "http://box/v1/traces"}, f"{NAME}_ENDPOINT: must be without /v1/traces"),
        (HTTP | {f"{NAME}_ENDPOINT": "box:4318"}, f"{NAME}_ENDPOINT"),
        (BASE | {f"{NAME}_PROTOCOL": "http/json"}, f"{NAME}_PROTOCOL: must be grpc or http/protobuf"),
        (BASE | {f"{NAME}_TRACES_PROTOCOL": "x"}, f"{NAME}_TRACES_PROTOCOL"),
        ({f"{NAME}_ENDPOINT": "box:1", f"{NAME}_INSECURE": "maybe"}, f"{NAME}_INSECURE"),
        (BASE | {f"{NAME}_TIMEOUT": "soon"}, f"{NAME}_TIMEOUT"),
        (BASE | {f"{NAME}_TIMEOUT": "0"}, f"{NAME}_TIMEOUT"),
        (BASE | {f"{NAME}_TIMEOUT": "nan"}, f"{NAME}_TIMEOUT"),
        (BASE | {f"{NAME}_TIMEOUT": "1e12"}, f"{NAME}_TIMEOUT"),
        (BASE | {f"{NAME}_COMPRESSION": "zstd"}, f"{NAME}_COMPRESSION: must be gzip or none"),
        (BASE | {f"{NAME}_CERTIFICATE": "/no/such/file"}, f"{NAME}_CERTIFICATE"),
        (BASE | {f"{NAME}_CLIENT_KEY": str(CERTS / "client.key")}, f"{NAME}_CLIENT_KEY"),
        (
            {f"{NAME}_ENDPOINT": "https://box", f"{NAME}_CERTIFICATE": str(CERTS / "client.key")},
            "https://box:443: the certificates for traces cannot be used",
        ),
        (BASE | {"OTEL_SDK_DISABLED": "yes"}, "OTEL_SDK_DISABLED"),
        (BASE | {"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER"),
        (BASE | {"OTEL_TRACES_EXPORTER": "otlp,none"}, "OTEL_TRACES_EXPORTER"),
    ],
)  # fmt: skip
def test_a_bad_value_names_its_variable(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        to(environ)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "headers",
    [
        "psk_secret",
        "a=b,psk_secret",
        "authorization=psk_secret%0A",
        "grpc-a=psk_secret",
        "b-bin=psk_secret",
        "a b=psk_secret",
    ],
)
def test_a_bad_header_is_told_without_its_value(headers: str) -> None:
    with pytest.raises(ConfigError) as caught:
        to(BASE | {f"{NAME}_HEADERS": headers})
    assert f"{NAME}_HEADERS" in str(caught.value)
    assert "psk_secret" not in str(caught.value)


def test_a_password_in_an_address_is_refused_and_not_told() -> None:
    with pytest.raises(ConfigError) as caught:
        to({}, otlp_endpoint="https://me:psk_secret@box")
    assert "OTEL_EXPORTER_OTLP_HEADERS" in str(caught.value)
    assert "psk_secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"otlp_protocol": "http/json"}, "otlp_protocol"),
        ({"trace_sample_ratio": 1.1}, "trace_sample_ratio"),
        ({"trace_sample_ratio": float("nan")}, "trace_sample_ratio"),
        ({"max_waiting_spans": 0}, "max_waiting_spans"),
    ],
)
def test_bad_options(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}: "):
        TracingOptions(**options)


def test_an_empty_endpoint_is_bad() -> None:
    with pytest.raises(ConfigError, match=r"^otlp_endpoint: "):
        to(BASE, otlp_endpoint="")


LOW, HIGH = 1, 2**64 - 1
"""Trace ids: a ratio of 0.5 records the first and not the second."""


def decided(environ: dict[str, str], ratio: float | None = None) -> tuple[bool, bool, bool]:
    """Say whether a low id is recorded, a high one, and a high one whose caller said so."""
    chosen = sampler(TracingOptions(trace_sample_ratio=ratio), environ)
    parent = set_span_in_context(
        NonRecordingSpan(SpanContext(HIGH, 7, is_remote=True, trace_flags=TraceFlags(1)))
    )
    cases = ((None, LOW), (None, HIGH), (parent, HIGH))
    low, high, told = (
        chosen.should_sample(context, trace_id, "a").decision is Decision.RECORD_AND_SAMPLE
        for context, trace_id in cases
    )
    return low, high, told


@pytest.mark.parametrize(
    ("environ", "ratio", "expected"),
    [
        ({}, None, (True, True, True)),
        ({SAMPLER: ""}, None, (True, True, True)),
        ({SAMPLER: "always_on"}, None, (True, True, True)),
        ({SAMPLER: "always_off"}, None, (False, False, False)),
        ({SAMPLER: "parentbased_always_off"}, None, (False, False, True)),
        ({SAMPLER: "TraceIdRatio", ARG: "0.5"}, None, (True, False, False)),
        ({SAMPLER: "parentbased_traceidratio", ARG: "0.5"}, None, (True, False, True)),
        ({SAMPLER: "traceidratio"}, None, (True, True, True)),
        ({SAMPLER: "always_off"}, 0.5, (True, False, True)),
        ({}, 0.0, (False, False, True)),
        ({}, 1.0, (True, True, True)),
    ],
)  # fmt: skip
def test_what_is_sampled(environ: dict[str, str], ratio: float | None, expected: tuple[bool, ...]) -> None:
    assert decided(environ, ratio) == expected


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({SAMPLER: "sometimes"}, "OTEL_TRACES_SAMPLER: "),
        ({SAMPLER: "traceidratio", ARG: "2"}, "OTEL_TRACES_SAMPLER_ARG: "),
        ({SAMPLER: "traceidratio", ARG: "half"}, "OTEL_TRACES_SAMPLER_ARG: "),
    ],
)  # fmt: skip
def test_a_bad_sampler(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}"):
        sampler(TracingOptions(), environ)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"service.name": "penstock", "service.version": "1.2.3"}),
        ({"OTEL_SERVICE_NAME": "mine"}, {"service.name": "mine", "service.version": "1.2.3"}),
        (
            {"OTEL_RESOURCE_ATTRIBUTES": "service.name=ours,service.version=9,a%20b=c%2Cd"},
            {"service.name": "ours", "service.version": "9", "a b": "c,d"},
        ),
        (
            {"OTEL_RESOURCE_ATTRIBUTES": "service.name=ours", "OTEL_SERVICE_NAME": "mine"},
            {"service.name": "mine"},
        ),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.instance.id=other"}, {}),
    ],
)
def test_the_environment_names_the_service(environ: dict[str, str], expected: dict[str, str]) -> None:
    attributes = service_resource(version="1.2.3", instance_id="abc", environ=environ).attributes
    assert {key: attributes[key] for key in expected} == expected
    assert attributes["telemetry.sdk.language"] == "python"
    assert attributes["service.instance.id"] == "abc", (
        "GetServerInfo answers it, so nothing else may stand there"
    )


def test_a_bad_resource() -> None:
    with pytest.raises(ConfigError, match=r"^OTEL_RESOURCE_ATTRIBUTES: .*'nonsense'"):
        service_resource(version="1", instance_id="a", environ={"OTEL_RESOURCE_ATTRIBUTES": "a=b,nonsense"})


def test_levels_are_ordered() -> None:
    assert TraceLevel.OFF < TraceLevel.REQUESTS < TraceLevel.STEPS < TraceLevel.DETAILED
    assert TracingOptions().trace_level is TraceLevel.STEPS


class Noting(dict[str, str]):
    """An environment that remembers what was asked of it."""

    def __init__(self, **values: str) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)


def test_the_page_has_every_variable_that_is_read_and_no_other() -> None:
    seen = Noting(OTEL_EXPORTER_OTLP_ENDPOINT="box:1", OTEL_EXPORTER_OTLP_INSECURE="true")
    for signal in ("traces", "metrics"):
        to(seen, signal)
    for name in ("parentbased_always_on", "traceidratio"):
        seen["OTEL_TRACES_SAMPLER"] = name
        sampler(TracingOptions(), seen)
    service_resource(version="1", instance_id="i", environ=seen)
    push_interval_s(MetricsOptions(), seen)
    of_both = {re.sub("OTLP_(TRACES|METRICS)_", "OTLP_", name) for name in seen.asked}
    page = PAGE.read_text(encoding="utf-8").partition("## OpenTelemetry's variables")[2]
    rows = "".join(line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(OTEL_[A-Z_]+)`", rows)) == of_both
