"""How much may go on at once: one group of the server's options, and the limit on open files.

Each bound is a field of `Bounds` with a flag of the same name (`max_rpcs` is `--max-rpcs`); 0 switches it
off. A call beyond a bound is refused as BUSY; the error names the bound, its value and when to retry.

The process may have only so many files open, and every connection is one of them: `raise_limit` raises that
limit, and `connections` says how many connections fit under it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import resource
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.runtime.errors import ConfigError

log = logging.getLogger(__name__)

FOR_OTHERS = 256
"""Open files kept free for everything but connections: weights, compiled programs, pipes to the processes
that compile grammars.
"""
MANY = 65_536
"""The limit for a server whose connections have no bound."""


def raise_limit(wanted: int) -> None:
    """Allow this process `wanted` open files, or as many as the system permits. A common default is only
    1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def connections(wanted: int, num_addresses: int = 1) -> int:
    """Tell how many connections each listening address may have: as many as `wanted`, or fewer, so that open
    files are left for the rest of the process; 0 stays 0.

    Without this a server that is full of connections would have no file left to work with.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    room = max(max(soft - FOR_OTHERS, soft // 2) // num_addresses, 1)
    if wanted <= room:
        return wanted
    log.warning(
        "an address may have %d connections, not %d: the process may open only %d files; raise `ulimit -n`",
        room,
        wanted,
        soft,
    )
    return room


_MOST = 2**31 - 1
"""The largest value: gRPC's own options are 32-bit numbers."""
_BACKLOG = 16_384
"""The least number of calls that may wait until the server looks at them. gRPC refuses calls beyond it at
random and without any details, so it is far above any burst of honest clients. A waiting call costs some
kilobytes.
"""
_UNSEEN_S = 3600
"""How many seconds a call may wait until the server looks at it. When the server looks at one that has waited
longer, gRPC refuses it without any details, by default after 30 s, which a burst takes on a busy machine.
Callers that wait no longer give a deadline.
"""
UNASKED_BYTES = 65_536
"""How many bytes of each message gRPC receives before the server looks at the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much one server takes on at once."""

    max_rpcs: int = 8192
    """Generate, Stream, Embed, Score, Rerank, Classify, Tokenize and Detokenize, all together. An RPC counts
    from the arrival of its headers until its reply has left.
    """
    max_rpcs_per_address: int = 6144
    """The part of `max_rpcs` that one IPv4 address, or one IPv6 /64 network, may have. Everything that comes
    through one proxy has one address.
    """
    max_rpcs_per_connection: int = 4096
    """The part of `max_rpcs` that one TCP connection may have."""
    max_tokenize_rpcs: int = 1024
    """Tokenize and Detokenize, which count against `max_rpcs`, too. One address may have half of them."""
    max_control_rpcs: int = 512
    """Every other RPC of penstock.v1, such as Abort and GetLoad. They are counted apart, so that a server
    that is full of work can still be asked and told. One address may have half of them.
    """
    max_update_rpcs: int = 8
    """UpdateWeights and PushAdapter. Only one update goes on at a time, and the others learn that at once.
    They are counted apart, so that they take no place of a request. One address may have half of them.
    """
    max_watch_rpcs: int = 128
    """WatchLoad, which goes on for as long as somebody watches. One address may have half of them."""
    max_health_rpcs: int = 2048
    """Check and Watch of the health service. One address may have half of them."""
    max_reflection_rpcs: int = 64
    """RPCs of server reflection. One address may have half of them."""
    max_connections: int = 4096
    """Connections of one listening address. Further ones are closed at once, because gRPC cannot send a
    status there.
    """
    max_receiving_rpcs: int = 128
    """Messages that take longer than a moment to arrive. One address may have half of them."""
    receive_limit_s: float = 60.0
    """Seconds that the message of a request may take to arrive after its headers."""
    update_stall_limit_s: float = 60.0
    """Seconds that may pass until the next message of an UpdateWeights or a PushAdapter has arrived."""

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


def grpc_options(bounds: Bounds, max_receive_bytes: int, num_addresses: int = 1) -> Sequence[tuple[str, int]]:
    """Make the options for gRPC's core that follow from the bounds, for a process that listens on
    `num_addresses` addresses, each of which is its own.
    """
    return [
        ("grpc.so_reuseport", 0),
        *call_options(bounds, max_receive_bytes),
        *connection_options(bounds.max_connections, num_addresses),
    ]


def call_options(bounds: Bounds, max_receive_bytes: int) -> Sequence[tuple[str, int]]:
    """Return those of them that are about calls.

    gRPC refuses calls beyond its backlog with a bare CANCELLED, by default from 1,000 calls on, and those
    that nobody has looked at for 30 s. Bursts of honest clients would be refused at random before
    `Admission` could answer them.
    """
    backlog = backlog_of(bounds)
    return [
        # Above this size gRPC refuses a message with a bare status; below it the interceptor refuses with
        # details.
        ("grpc.max_receive_message_length", 2 * max_receive_bytes),
        ("grpc.server.max_pending_requests", min(backlog, _MOST)),
        ("grpc.server.max_pending_requests_hard_limit", min(2 * backlog, _MOST)),
        ("grpc.server_max_unrequested_time_in_server", _UNSEEN_S),
        # These two limit what gRPC receives of a message before it is asked for it. By default it soon
        # receives 4 MiB.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", UNASKED_BYTES),
        # The most streams that a peer can hold open without taking any answer. It is no lower for two
        # reasons: a client at the limit would hold its Abort back behind its other calls, and streams that a
        # client opens before it knows the limit are reset without any details.
        ("grpc.max_concurrent_streams", min(backlog, _MOST)),
    ]


def backlog_of(bounds: Bounds) -> int:
    """Tell how many calls may wait until the server looks at them."""
    return max(_BACKLOG, 2 * bounds.max_rpcs)


def connection_options(max_connections: int, num_addresses: int = 1) -> Sequence[tuple[str, int]]:
    """Make the option that bounds the connections of an address, for a process that listens on
    `num_addresses` addresses.
    """
    most = connections(max_connections, num_addresses)
    return [("grpc.max_allowed_incoming_connections", min(most, _MOST - 1))] if most else []
