"""Options of traces, and of where telemetry goes: frozen, and checked once.

What is None here may be given by OpenTelemetry's environment variables (`otlp/environment.py`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, get_args

from penstock.runtime.errors import ConfigError

OtlpProtocol = Literal["grpc", "http/protobuf"]
OTLP_PROTOCOLS: tuple[OtlpProtocol, ...] = get_args(OtlpProtocol)
MOST_WAITING_SPANS = 1_000_000


class TraceLevel(enum.IntEnum):
    """How much of a sampled request is recorded. Each level has what those below it have."""

    OFF = 0
    """Nothing at all."""
    REQUESTS = 1
    """The RPC, the request and its phases."""
    STEPS = 2
    """The engine's steps, the chunks of a prefill and the windows of a decode."""
    DETAILED = 3
    """A span for each request and step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingOptions:
    """What the server's operator says about traces, and about the collector of traces and metrics."""

    otlp_endpoint: str | None = None
    """The collector's base address, with http:// (plaintext) or https:// (TLS). Over http/protobuf,
    "/v1/traces" and "/v1/metrics" are added to its path.
    """
    otlp_protocol: OtlpProtocol | None = None
    """How the collector is spoken to; grpc unless the environment says otherwise."""
    trace_level: TraceLevel = TraceLevel.STEPS
    """How much is recorded from the start on. It can be changed while the server runs."""
    trace_sample_ratio: float | None = None
    """The share of the calls without a `traceparent` that is recorded, from 0 to 1. With a `traceparent` its
    sender has decided.
    """
    max_waiting_spans: int = 8192
    """How many spans may wait for the collector. Those beyond are dropped, and counted."""

    def __post_init__(self) -> None:
        bad = []
        if self.otlp_protocol is not None and self.otlp_protocol not in OTLP_PROTOCOLS:
            bad.append(f"otlp_protocol: must be {' or '.join(OTLP_PROTOCOLS)}, not {self.otlp_protocol!r}")
        if self.trace_sample_ratio is not None and not 0 <= self.trace_sample_ratio <= 1:
            bad.append(f"trace_sample_ratio: must be from 0 to 1, not {self.trace_sample_ratio}")
        if not 1 <= self.max_waiting_spans <= MOST_WAITING_SPANS:
            bad.append(
                f"max_waiting_spans: must be from 1 to {MOST_WAITING_SPANS}, not {self.max_waiting_spans}"
            )
        if bad:
            raise ConfigError("; ".join(bad))
