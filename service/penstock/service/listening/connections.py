"""How long a connection lives, and how the server finds out that nobody is at its other end."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Of every connection; all in seconds, 0 switches the one off."""

    handshake_timeout_s: float = 20.0
    """How long TLS and HTTP/2 may take to begin. A peer that connects and says nothing would else have one of
    `Bounds.max_connections` for two minutes."""
    keepalive_s: float = 60.0
    """A peer of which nothing came for so long is sent a ping."""
    keepalive_timeout_s: float = 20.0
    """One that does not answer a ping for so long is gone: its requests end, and what they hold is freed."""
    max_connection_age_s: float = 0.0
    """A connection this old is closed as soon as its RPCs have ended; the client makes another one. Balancers
    that only know connections spread the load anew by it. gRPC varies it by 10 %."""
    max_connection_age_grace_s: float = 0.0
    """How long RPCs may go on after that; 0: to their end."""
    max_connection_idle_s: float = 3600.0
    """A connection without an RPC for so long is closed; the client makes another one when it needs one."""

    def problems(self) -> list[str]:
        """What is wrong with the values, one line each."""
        bad = []
        for field in fields(self):
            value: float = getattr(self, field.name)
            if not (math.isfinite(value) and 0 <= value <= _MOST_S):
                bad.append(f"{field.name}: must be from 0 to {_MOST_S} seconds, not {value}")
        if not bad and self.keepalive_s and not self.keepalive_timeout_s:
            bad.append("keepalive_timeout_s: must be above 0, unless keepalive_s is 0")
        return bad

    def arguments(self) -> list[tuple[str, int]]:
        """For gRPC, which counts milliseconds."""
        arguments = [
            # A long prefill sends nothing; clients may ping meanwhile, and without an RPC.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 5000),
            ("grpc.server_handshake_timeout_ms", _ms(self.handshake_timeout_s)),
            ("grpc.max_connection_age_ms", _ms(self.max_connection_age_s)),
            ("grpc.max_connection_age_grace_ms", _ms(self.max_connection_age_grace_s)),
            ("grpc.max_connection_idle_ms", _ms(self.max_connection_idle_s)),
            ("grpc.keepalive_time_ms", _ms(self.keepalive_s)),
        ]
        if self.keepalive_s:
            arguments += [
                ("grpc.keepalive_timeout_ms", _ms(self.keepalive_timeout_s)),
                # Without these two gRPC pings a silent peer twice, and then gives it a minute of its own.
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.http2.ping_timeout_ms", _ms(self.keepalive_timeout_s)),
            ]
        return arguments


_MOST_S = 1_000_000
_NEVER_MS = 2**31 - 1


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000)) if seconds else _NEVER_MS
