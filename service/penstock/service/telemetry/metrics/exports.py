"""The metrics of a server: its own, and the ways out for them and for those of its engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric as Family

from penstock.runtime.measuring.registry import Registry
from penstock.runtime.measuring.snapshot import Metric, Snapshot
from penstock.service.backend import Backend
from penstock.service.telemetry.metrics.endpoint import PATH, Endpoint, Pages
from penstock.service.telemetry.metrics.families import VllmLabels, families, vllm_families
from penstock.service.telemetry.metrics.options import MetricsOptions
from penstock.service.telemetry.metrics.service_meters import LoopLag, ServiceMeters
from penstock.service.threads.lanes import in_thread

if TYPE_CHECKING:
    from penstock.service.telemetry.metrics.push import Collector

log = logging.getLogger(__name__)


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
        self._push = None if collector is None else collector.push_of(self._snapshots)
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
