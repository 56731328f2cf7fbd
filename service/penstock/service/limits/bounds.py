"""How much may go on at once, of each kind: one group of the server's options.

Each bound is a number in `Bounds` with a flag of the same name (`max_rpcs` is `--max-rpcs`), and 0 switches
it off. What goes past one is refused as BUSY, which names the bound, its value and a time to come back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.runtime.errors import ConfigError
from penstock.service.limits.open_files import connections

_MOST = 2**31 - 1
"""gRPC's own options are 32-bit numbers."""
_BACKLOG = 16_384
"""Calls that may wait to be looked at at all, at least. gRPC refuses a share of those past it without a word
of ours, so it is far above any burst of honest clients; a waiting call costs some kilobytes.
"""
UNASKED_BYTES = 65_536
"""Of each message gRPC takes so much before anybody looks at its call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What one server takes on at once."""

    max_rpcs: int = 8192
    """Generate, Stream, UpdateWeights, Tokenize and Detokenize, all together, from when their headers came
    until their reply has left.
    """
    max_rpcs_per_address: int = 6144
    """The same of one IPv4 address or IPv6 /64 network: all that comes through one proxy is one address."""
    max_rpcs_per_connection: int = 4096
    """The same of one TCP connection."""
    max_tokenize_rpcs: int = 1024
    """Tokenize and Detokenize, which also count as RPCs. One address may have half of them."""
    max_control_rpcs: int = 512
    """Every other RPC of penstock.v1, Abort and GetLoad for example: these count apart, so that a server that
    is full of work can still be asked and told. One address may have half of them.
    """
    max_health_rpcs: int = 2048
    """Check and Watch. One address may have half of them."""
    max_reflection_rpcs: int = 64
    """Of server reflection. One address may have half of them."""
    max_connections: int = 4096
    """Connections of one listening address. What is above is closed before a word is said: gRPC cannot answer
    there.
    """
    max_receiving_rpcs: int = 128
    """Messages that are on their way in for longer than a moment. One address has at most half of them."""
    receive_limit_s: float = 60.0
    """Seconds that the message of a request may take to come after its headers."""

    def __post_init__(self) -> None:
        bad: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.startswith("max_"):
                if not 0 <= value <= _MOST:
                    bad.append(f"{field.name}: must be from 0 (off) to {_MOST}, not {value}")
            elif not (math.isfinite(value) and value >= 0):
                bad.append(f"{field.name}: must be at least 0 (off), not {value}")
        if bad:
            raise ConfigError("; ".join(bad))


def grpc_options(bounds: Bounds, num_addresses: int = 1) -> Sequence[tuple[str, int]]:
    """What gRPC's own core must know of the bounds, for a process that listens on so many addresses.

    Its backlog of calls that nobody looked at yet refuses with a bare CANCELLED, by default from 1,000 calls
    on, so that bursts of honest clients would be lost at random before `Admission` could answer them.
    """
    backlog = max(_BACKLOG, 2 * bounds.max_rpcs)
    options = [
        ("grpc.server.max_pending_requests", min(backlog, _MOST)),
        ("grpc.server.max_pending_requests_hard_limit", min(2 * backlog, _MOST)),
        # What gRPC takes of a message that it was not asked for. Left to itself it soon takes 4 MiB.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", UNASKED_BYTES),
        # A peer that takes no answers holds so many streams and not one more. It is no lower because a client
        # would then keep its Abort back behind its other calls, and because what a client begins before it
        # knows the number is reset without a word.
        ("grpc.max_concurrent_streams", min(backlog, _MOST)),
    ]
    most = connections(bounds.max_connections, num_addresses)
    if most:
        options.append(("grpc.max_allowed_incoming_connections", min(most, _MOST - 1)))
    return options
