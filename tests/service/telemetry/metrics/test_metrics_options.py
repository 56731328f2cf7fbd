"""The options of metrics: what they refuse, what they mean, and the pushes that come of them."""

from __future__ import annotations

import argparse
import asyncio
import logging

import pytest

from penstock.cli.__main__ import main
from penstock.runtime.errors import ConfigError
from penstock.server_cli.serving.serve_flags import add_parser, metrics_options, tracing_options
from penstock.service.options import ServerOptions
from penstock.service.telemetry.metrics.options import MetricsOptions
from penstock.service.telemetry.metrics.push import Collector
from penstock.service.telemetry.opening import INTERVAL, open_collector
from penstock.service.telemetry.options import TracingOptions
from tests.service.rig import generate, serving, until
from tests.support.otlp import WAIT_S, Hang, OtlpReceiver, attributes_of

NAMED = {"version": "1.2.3", "instance_id": "i-1"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"metrics_port": -1}, "metrics_port: must be from 0 to 65535, not -1"),
        ({"metrics_port": 65536}, "metrics_port: must be from 0 to 65535, not 65536"),
        ({"metrics_host": "0.0.0.0"}, "metrics_host: needs a metrics_port"),
        ({"metrics_port": 0, "metrics_host": ""}, "metrics_host: must not be empty"),
        ({"metrics_port": 0, "metrics_host": "unix:/x"}, "metrics_host: must be a name or an IP address"),
        ({"metrics_names": "vllm"}, "metrics_names: needs a metrics_port"),
        ({"metrics_port": 0, "metrics_names": "tgi"}, "metrics_names: must be penstock or vllm, not 'tgi'"),
        ({"otlp_metrics_interval_s": -1.0}, "otlp_metrics_interval_s: must be 0, or at least 1, not -1.0"),
        ({"otlp_metrics_interval_s": 0.5}, "otlp_metrics_interval_s: must be 0, or at least 1, not 0.5"),
        ({"otlp_metrics_interval_s": float("nan")}, "otlp_metrics_interval_s: must be 0, or at least 1"),
        ({"otlp_metrics_interval_s": float("inf")}, "otlp_metrics_interval_s: must be 0, or at least 1"),
    ],
)
def test_bad_options_are_refused_by_name(options, problem):
    with pytest.raises(ConfigError, match="^" + problem):
        ServerOptions(metrics=MetricsOptions(**options))


def test_the_command_line_names_flags(capsys, monkeypatch):
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    assert main(["serve", "demo", "--metrics-names", "vllm"]) == 2
    assert "--metrics-names: needs a --metrics-port" in capsys.readouterr().err
    assert main(["serve", "demo", "--otlp-metrics-interval", "0.1"]) == 2
    assert "--otlp-metrics-interval: must be 0, or at least 1" in capsys.readouterr().err
    assert main(["serve", "demo", "--otlp-metrics-interval", "5"]) == 2
    assert "--otlp-metrics-interval: needs an --otlp-endpoint" in capsys.readouterr().err
    assert main(["serve", "demo", "--no-metrics", "--metrics-port", "0"]) == 2
    assert "--metrics-port: cannot stand beside --no-metrics" in capsys.readouterr().err
    assert main(["serve", "demo", "--no-metrics", "--otlp-metrics-interval", "5"]) == 2
    assert "--otlp-metrics-interval: cannot stand beside --no-metrics" in capsys.readouterr().err


def test_without_metrics_nothing_is_pushed():
    arguments = ["serve", "demo", "--no-metrics", "--otlp-endpoint", "http://127.0.0.1:1"]
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(arguments)
    assert open_collector(metrics_options(args), tracing_options(args), **NAMED) is None


@pytest.mark.parametrize(
    ("options", "is_exposed"),
    [
        ({}, False),
        ({"metrics_port": 0}, False),
        ({"metrics_port": 0, "metrics_host": "localhost"}, False),
        ({"metrics_port": 0, "metrics_host": "::1"}, False),
        ({"metrics_port": 0, "metrics_host": "0.0.0.0"}, True),
        ({"metrics_port": 0, "metrics_host": "metrics.example"}, True),
    ],
)
def test_who_can_read_the_page(options, is_exposed):
    assert MetricsOptions(**options).is_exposed is is_exposed


def collector_to(receiver: OtlpReceiver, **options) -> Collector | None:
    otlp = TracingOptions(otlp_endpoint=receiver.endpoint, otlp_protocol=receiver.protocol)
    return open_collector(MetricsOptions(**options), otlp, **NAMED)


@pytest.mark.parametrize(
    ("flag", "variable", "interval_s"),
    [(None, "", 15), (None, "2500", 2.5), (30.0, "2500", 30), (0.0, "2500", None)],
)
def test_how_often_metrics_are_pushed(flag, variable, interval_s, monkeypatch):
    monkeypatch.setenv(INTERVAL, variable)
    with OtlpReceiver() as receiver:
        collector = collector_to(receiver, otlp_metrics_interval_s=flag)
        assert (collector and collector.interval_s) == interval_s
        if collector is not None:
            collector.exporter.close()


@pytest.mark.parametrize(
    "text", ["0", "999", "-5", "1e4", "1000.5", "soon", "86400001", "\u0661\u0661\u0661\u0661"]
)
def test_a_bad_variable_is_refused_by_name(text, monkeypatch):
    monkeypatch.setenv(INTERVAL, text)
    with pytest.raises(ConfigError, match=f"^{INTERVAL}: must be from 1000 to 86400000 milliseconds, not "):
        open_collector(MetricsOptions(), TracingOptions(), **NAMED)


def test_without_a_collector_nothing_is_pushed():
    assert open_collector(MetricsOptions(), TracingOptions(), **NAMED) is None


def test_a_variable_that_switches_pushes_off_is_told(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    with OtlpReceiver() as receiver, caplog.at_level(logging.WARNING):
        assert collector_to(receiver, otlp_metrics_interval_s=5.0) is None
    assert "because of OTEL_METRICS_EXPORTER=none" in caplog.text


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_a_server_pushes_its_metrics_at_the_latest_when_it_stops(protocol):
    with OtlpReceiver(protocol) as receiver:
        async with serving(collector=collector_to(receiver), grace_s=WAIT_S) as rig:
            await rig.inference.Generate(generate("y"))
            assert receiver.metrics == {}
        (export,) = [one.message for one in receiver.received if one.signal == "metrics"]
        resource = attributes_of(export.resource_metrics[0].resource.attributes)
        assert (resource["service.name"], resource["service.instance.id"]) == ("penstock", "i-1")
        points = receiver.metrics["rpc.server.call.duration"].histogram.data_points
        counted = {attributes_of(point.attributes)["rpc.method"]: point.count for point in points}
        assert counted["penstock.v1.InferenceService/Generate"] == 1


async def test_a_collector_that_hangs_does_not_hold_up_the_stop(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600000")
    with OtlpReceiver() as receiver:
        receiver.always = Hang()
        collector = collector_to(receiver, otlp_metrics_interval_s=1.0)
        async with asyncio.timeout(2 * WAIT_S):
            async with serving(collector=collector, grace_s=0.0):
                await until(lambda: receiver.attempts == 1)
