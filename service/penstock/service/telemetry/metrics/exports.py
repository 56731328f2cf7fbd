"""The metrics of a server: its own, and the ways out for them and for those of its engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from prometheus_client.metrics_core import Metric as Family

from penstock.runtime.errors import ConfigError
from penstock.runtime.measuring.registry import Registry
from penstock.runtime.measuring.snapshot import Metric, Snapshot
from penstock.service.backend import Backend
from penstock.service.telemetry.metrics.endpoint import PATH, Endpoint, Pages
from penstock.service.telemetry.metrics.families import VllmLabels, families, vllm_families
from penstock.service.telemetry.metrics.options import MetricsOptions
from penstock.service.telemetry.metrics.push import Collector, Push
from penstock.service.telemetry.metrics.service_meters import LoopLag, ServiceMeters
from penstock.service.telemetry.options import TracingOptions
from penstock.service.telemetry.otlp.environment import destination, service_resource, why_off
from penstock.service.telemetry.otlp.tracing import metric_exporter
from penstock.service.threads.lanes import in_thread

log = logging.getLogger(__name__)

INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
DEFAULT_INTERVAL_S = 15.0


class Metrics:
    """What a server measures, and what carries metrics out of it. Used on the server's event loop."""

    def __init__(self, options: MetricsOptions, collector: Collector | None) -> None:
        """Take the port. Raises ConfigError if it cannot be had. With a `collector` metrics are pushed."""
        self.registry = Registry()
        """The values of the service's metrics. Those of the engine are in the engine's."""
        self.meters = ServiceMeters(self.registry)
        """What the service tells what it does."""
        self._engine: Backend | None = None
        self._has_vllm_names = options.metrics_names == "vllm"
        self._lag = LoopLag(self.registry)
        self._push = None if collector is None else Push(collector, self._snapshots)
        self._endpoint = None
        if options.metrics_port is not None:
            self._endpoint = Endpoint(options.host, options.metrics_port, Pages(self._families))

    @property
    def address(self) -> str | None:
        """The host and port of the page for Prometheus; None: there is none."""
        return None if self._endpoint is None else self._endpoint.address

    def start(self) -> None:
        """Begin to answer scrapers, and to push."""
        if self._endpoint is not None:
            self._endpoint.start()
            log.info("metrics are served on http://%s%s", self._endpoint.address, PATH)
        if self._push is not None:
            self._push.start()
        if self._endpoint is not None or self._push is not None:
            self._lag.start()

    def attach(self, engine: Backend) -> None:
        """Show the metrics of this engine, too."""
        self._engine = engine

    def close(self) -> None:
        """Give the port back, of a server that was never started."""
        if self._endpoint is not None:
            self._endpoint.stop()

    async def stop(self, timeout_s: float) -> None:
        """Push once more, within about `timeout_s` seconds, and end."""
        self._lag.stop()
        if self._push is not None:
            await in_thread(partial(self._push.stop, timeout_s))
        if self._endpoint is not None:
            await in_thread(self._endpoint.stop)

    def _snapshots(self) -> Sequence[Snapshot]:
        """Take snapshots of the engine, if there is one, and of the service. Called on other threads."""
        engine = self._engine
        return [*([] if engine is None else [engine.registry.snapshot()]), self.registry.snapshot()]

    def _families(self) -> Iterator[Family]:
        metrics: list[Metric] = []
        for snapshot in self._snapshots():
            metrics.extend(snapshot.metrics)
        yield from families(metrics)
        if self._has_vllm_names and self._engine is not None:
            yield from vllm_families(metrics, _vllm_labels(self._engine))


def _vllm_labels(engine: Backend) -> VllmLabels:
    return VllmLabels(
        model_name=engine.info.name,
        page_size=engine.info.page_size,
        num_pages=engine.info.num_pages,
        has_prefix_cache=engine.config.prefix_cache_pages != 0,
    )


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
    exporter = None if to is None else metric_exporter(otlp)
    if to is None or exporter is None:
        if metrics.otlp_metrics_interval_s:
            if not (why := why_off("metrics")):
                raise ConfigError("otlp_metrics_interval_s: needs an otlp_endpoint to push metrics to")
            log.warning("metrics are not pushed, because of %s", why)
        return None
    log.info("metrics go to %s over %s, every %g s", to.url, to.protocol, interval_s)
    return Collector(
        exporter=exporter,
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
