"""Options of metrics' ways out: frozen, and checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from penstock.service.listening.listen_options import host_problems, is_loopback

MetricsNames = Literal["penstock", "vllm"]
METRICS_NAMES: tuple[MetricsNames, ...] = get_args(MetricsNames)
DEFAULT_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsOptions:
    """Where metrics can be read, and how often they are pushed."""

    metrics_port: int | None = None
    """The port of the page for Prometheus, in plain HTTP; 0 lets the system choose one; None: no page."""
    metrics_host: str | None = None
    """The address of that port; None: 127.0.0.1, this machine only."""
    metrics_names: MetricsNames = "penstock"
    """Under which names the page has them. With "vllm" vLLM's names stand there beside ours."""
    otlp_metrics_interval_s: float | None = None
    """Seconds between two pushes to an OpenTelemetry collector; 0: never; None: as the environment says, or
    15.
    """

    @property
    def host(self) -> str:
        """The address of the page's port."""
        return self.metrics_host or DEFAULT_HOST

    @property
    def is_exposed(self) -> bool:
        """Whether other machines can read the page."""
        return self.metrics_port is not None and not is_loopback(self.host)

    def problems(self) -> list[str]:
        """Say what is wrong with these options among themselves, one line for each."""
        bad = [] if self.metrics_host is None else host_problems("metrics_host", self.metrics_host)
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            bad.append(f"metrics_port: must be from 0 to 65535, not {self.metrics_port}")
        if self.metrics_names not in METRICS_NAMES:
            bad.append(f"metrics_names: must be {' or '.join(METRICS_NAMES)}, not {self.metrics_names!r}")
        if self.metrics_port is None:
            if self.metrics_host is not None:
                bad.append("metrics_host: needs a metrics_port")
            if self.metrics_names != "penstock":
                bad.append("metrics_names: needs a metrics_port, because only the page has other names")
        seconds = self.otlp_metrics_interval_s
        if seconds is not None and not (seconds == 0 or (math.isfinite(seconds) and seconds >= 1)):
            bad.append(f"otlp_metrics_interval_s: must be 0, or at least 1, not {seconds}")
        return bad
