"""Opens what sends traces and metrics to a collector, where flags or the environment name one.

OpenTelemetry's SDK is imported only then, because that takes 50 ms, and most servers send nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.runtime.errors import ConfigError
from penstock.service.telemetry.metrics.options import MetricsOptions
from penstock.service.telemetry.options import TracingOptions
from penstock.service.telemetry.otlp.environment import destination, why_off

if TYPE_CHECKING:
    from penstock.service.telemetry.metrics.push import Collector
    from penstock.service.telemetry.otlp.tracing import Tracing

log = logging.getLogger(__name__)

INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
DEFAULT_INTERVAL_S = 15.0


def open_tracing(options: TracingOptions, *, version: str, instance_id: str) -> Tracing | None:
    """Make what these options and the environment ask for; None if traces go nowhere. Raises ConfigError."""
    to = destination(options, "traces")
    if to is None:
        if options.otlp_endpoint is not None:
            log.warning("no traces, because of %s", why_off("traces"))
        return None
    from penstock.service.telemetry.otlp.tracing import tracing_to  # noqa: PLC0415  # it imports the SDK

    log.info("traces go to %s over %s", to.url, to.protocol)
    return tracing_to(to, options, version=version, instance_id=instance_id)


def open_collector(
    metrics: MetricsOptions,
    otlp: TracingOptions,
    *,
    version: str,
    instance_id: str,
) -> Collector | None:
    """Make what pushes metrics, by these options and the environment; None if they are not pushed. Raises
    ConfigError.
    """
    interval_s = push_interval_s(metrics, os.environ)
    to = destination(otlp, "metrics") if interval_s else None
    if to is None:
        if metrics.otlp_metrics_interval_s:
            if not (why := why_off("metrics")):
                raise ConfigError("otlp_metrics_interval_s: needs an otlp_endpoint to push metrics to")
            log.warning("metrics are not pushed, because of %s", why)
        return None
    from penstock.service.telemetry.metrics.push import Collector  # noqa: PLC0415  # it imports the SDK
    from penstock.service.telemetry.otlp.sdk import service_resource  # noqa: PLC0415  # as above
    from penstock.service.telemetry.otlp.sender import sender_to  # noqa: PLC0415  # only where it sends
    from penstock.service.telemetry.otlp.tracing import OtlpMetricExporter  # noqa: PLC0415  # as above

    log.info("metrics go to %s over %s, every %g s", to.url, to.protocol, interval_s)
    return Collector(
        exporter=OtlpMetricExporter(sender_to(to), to),
        resource=service_resource(version=version, instance_id=instance_id),
        interval_s=interval_s,
    )


def push_interval_s(metrics: MetricsOptions, environ: Mapping[str, str]) -> float:
    """Return the seconds between two pushes; 0: never."""
    if metrics.otlp_metrics_interval_s is not None:
        return metrics.otlp_metrics_interval_s
    text = environ.get(INTERVAL, "").strip()
    if not text:
        return DEFAULT_INTERVAL_S
    if not text.isascii() or not text.isdigit() or not 1000 <= int(text) <= 86_400_000:
        raise ConfigError(f"{INTERVAL}: must be from 1000 to 86400000 milliseconds, not {text!r}")
    return int(text) / 1000
