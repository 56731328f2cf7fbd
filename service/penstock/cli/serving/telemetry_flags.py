"""The flags of `penstock serve` for what its operator sees: logs, traces and metrics."""

from __future__ import annotations

import argparse

from penstock.cli.serving.option_values import options_of, path
from penstock.runtime.config import EngineConfig
from penstock.service.options import ServerOptions
from penstock.service.telemetry.options import OTLP_PROTOCOLS, TraceLevel, TracingOptions

_DEFAULTS = TracingOptions()
_SERVER = ServerOptions()


def add_telemetry_flags(parser: argparse.ArgumentParser) -> None:
    """Add these flags under a heading of their own."""
    group = parser.add_argument_group(
        "logs, traces and metrics",
        "OpenTelemetry's environment variables (OTEL_...) apply, too; a flag wins over a variable",
    )
    group.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="default: %(default)s; logs go to stderr",
    )
    group.add_argument(
        "--metrics",
        action=argparse.BooleanOptionalAction,
        default=EngineConfig().metrics,
        help="measure what the engine does; default: on",
    )
    _add_tracing(group)
    _add_profiles(group)


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


def tracing_options(args: argparse.Namespace) -> TracingOptions:
    """The options of traces that the flags describe. Raises ConfigError."""
    return options_of(TracingOptions, args, trace_level=TraceLevel[args.trace_level.upper()])
