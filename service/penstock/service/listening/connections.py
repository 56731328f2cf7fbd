"""How long a connection lives, and how the server finds out that the peer at its other end is gone."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Limits of every connection, in seconds; 0 switches a limit off."""

    handshake_timeout_s: float = 20.0
    """How long the handshakes of TLS and HTTP/2 may take. Without it a peer that connects and sends nothing
    would hold one of `Bounds.max_connections` for two minutes.
    """
    keepalive_s: float = 60.0
    """The server sends a ping to a peer that has sent nothing for this long."""
    keepalive_timeout_s: float = 20.0
    """A peer that does not answer a ping for this long is gone: its requests end, and what they hold is
    freed.
    """
    max_connection_age_s: float = 0.0
    """A connection this old is closed as soon as its RPCs have ended; the client opens another one. Load
    balancers that balance connections spread the load again that way. gRPC varies the time by 10 %.
    """
    max_connection_age_grace_s: float = 0.0
    """How long RPCs may go on after that; 0 means until their end."""
    max_connection_idle_s: float = 3600.0
    """A connection without an RPC for this long is closed; the client opens another one when it needs it."""

    def problems(self) -> list[str]:
        """Say what is wrong with the values, one line for each."""
        bad = []
        for field in fields(self):
            value: float = getattr(self, field.name)
            if not (math.isfinite(value) and 0 <= value <= _MOST_S):
                bad.append(f"{field.name}: must be from 0 to {_MOST_S} seconds, not {value}")
        if not bad and self.keepalive_s and not self.keepalive_timeout_s:
            bad.append("keepalive_timeout_s: must be above 0, unless keepalive_s is 0")
        return bad

    def arguments(self) -> list[tuple[str, int]]:
        """Write the options as gRPC's channel arguments, in milliseconds."""
        arguments = [
            # A long prefill sends nothing. Clients may ping meanwhile, and also while they have no RPC.
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
                # Without these two gRPC pings a silent peer twice, and then waits for another minute.
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.http2.ping_timeout_ms", _ms(self.keepalive_timeout_s)),
            ]
        return arguments


_MOST_S = 1_000_000
_NEVER_MS = 2**31 - 1


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000)) if seconds else _NEVER_MS
