"""The flags of `penstock serve` for what its operator sees: logs, traces and metrics."""

from __future__ import annotations

import argparse
import dataclasses

from penstock.runtime.config import EngineConfig
from penstock.runtime.errors import ConfigError
from penstock.server_cli.serving.option_values import options_of, path, size_or_none
from penstock.service.options import ServerOptions
from penstock.service.telemetry.logs.writing import LOG_FORMATS, LOG_LEVELS, LogOptions
from penstock.service.telemetry.metrics.options import DEFAULT_HOST, METRICS_NAMES, MetricsOptions
from penstock.service.telemetry.options import OTLP_PROTOCOLS, TraceLevel, TracingOptions

_LOG = LogOptions()
_DEFAULTS = TracingOptions()
_METRICS = MetricsOptions()
_SERVER = ServerOptions()


def add_telemetry_flags(parser: argparse.ArgumentParser) -> None:
    """Add these flags under a heading of their own."""
    group = parser.add_argument_group(
        "logs, traces and metrics",
        "OpenTelemetry's environment variables (OTEL_...) apply, too; a flag wins over a variable",
    )
    _add_logs(group)
    group.add_argument(
        "--metrics",
        action=argparse.BooleanOptionalAction,
        default=EngineConfig().metrics,
        help="measure what the engine does, for the port, the collector and `penstock top`; default: on",
    )
    _add_tracing(group)
    _add_metrics(group)
    _add_profiles(group)


def _add_logs(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--log-level", default=_LOG.log_level, choices=LOG_LEVELS, help="default: %(default)s")
    group.add_argument(
        "--log-format",
        default=_LOG.log_format,
        choices=LOG_FORMATS,
        help="text for people, or a JSON object on each line; default: %(default)s",
    )
    group.add_argument(
        "--log-file",
        type=path,
        metavar="PATH",
        help="write the log into this file in place of stderr; why the server cannot start still goes to "
        "stderr",
    )
    group.add_argument(
        "--log-file-bytes",
        type=size_or_none,
        default=_LOG.log_file_bytes,
        metavar="SIZE",
        help="rename the log file when it is as large as this, or with `none` leave that to another program; "
        "default: 100M",
    )
    group.add_argument(
        "--log-file-count",
        type=int,
        default=_LOG.log_file_count,
        metavar="N",
        help="how many renamed log files are kept; default: %(default)s",
    )
    group.add_argument(
        "--no-access-log",
        dest="access_log",
        action="store_false",
        help="leave out the line for each call of Generate and Stream that was not refused",
    )


def _add_tracing(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send telemetry to this OpenTelemetry collector: https:// uses TLS, http:// is plaintext; "
        "default: OTEL_EXPORTER_OTLP_ENDPOINT, or none",
    )
    group.add_argument(
        "--otlp-protocol",
        choices=OTLP_PROTOCOLS,
        help="how the collector is spoken to; default: OTEL_EXPORTER_OTLP_PROTOCOL, or grpc",
    )
    group.add_argument(
        "--trace-level",
        default=_DEFAULTS.trace_level.name.lower(),
        choices=[level.name.lower() for level in TraceLevel],
        help="how much of a request is traced: requests has its phases, steps also the engine's steps, "
        "detailed a span for each request and step; `penstock trace` changes it; default: %(default)s",
    )
    group.add_argument(
        "--trace-sample-ratio",
        type=float,
        metavar="RATIO",
        help="trace this share of the calls without a traceparent, from 0 to 1; default: "
        "OTEL_TRACES_SAMPLER, or all",
    )
    group.add_argument(
        "--max-waiting-spans",
        type=int,
        default=_DEFAULTS.max_waiting_spans,
        metavar="N",
        help="how many spans may wait for the collector; those beyond are dropped and counted; "
        "default: %(default)s",
    )


def _add_metrics(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--metrics-port",
        type=int,
        metavar="N",
        help="serve metrics for Prometheus at this port, at /metrics in plain HTTP; 0 lets the system "
        "choose; default: none",
    )
    group.add_argument(
        "--metrics-host",
        metavar="HOST",
        help=f"address of that port: whoever reaches it reads the metrics; default: {DEFAULT_HOST}, this "
        "machine only",
    )
    group.add_argument(
        "--metrics-names",
        default=_METRICS.metrics_names,
        choices=METRICS_NAMES,
        help="vllm: the port shows the metrics under vLLM's names, too, for dashboards and gateways that "
        "know those; default: %(default)s",
    )
    group.add_argument(
        "--otlp-metrics-interval",
        dest="otlp_metrics_interval_s",
        type=float,
        metavar="SECONDS",
        help="push metrics to the OpenTelemetry collector this often; 0: never; default: "
        "OTEL_METRIC_EXPORT_INTERVAL, or 15",
    )


def _add_profiles(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--profile-dir",
        type=path,
        metavar="DIR",
        help="let `penstock profile` record what the engine does, and keep the profiles in this folder; "
        "default: none are made",
    )
    group.add_argument(
        "--profile-keep",
        type=int,
        default=_SERVER.profile_keep,
        metavar="N",
        help="how many profiles stay in the folder; older ones are removed; default: %(default)s",
    )


def metrics_options(args: argparse.Namespace) -> MetricsOptions:
    """The options of metrics' ways out that the flags describe. Raises ConfigError."""
    options = options_of(MetricsOptions, args)
    if args.metrics:
        return options
    for name, value in (
        ("metrics_port", options.metrics_port is not None),
        ("otlp_metrics_interval_s", options.otlp_metrics_interval_s),
    ):
        if value:
            raise ConfigError(f"{name}: cannot stand beside --no-metrics")
    return dataclasses.replace(options, otlp_metrics_interval_s=0.0)


def log_options(args: argparse.Namespace) -> LogOptions:
    """The options of the log that the flags describe. Raises ConfigError."""
    return options_of(LogOptions, args)


def tracing_options(args: argparse.Namespace) -> TracingOptions:
    """The options of traces that the flags describe. Raises ConfigError."""
    return options_of(TracingOptions, args, trace_level=TraceLevel[args.trace_level.upper()])
