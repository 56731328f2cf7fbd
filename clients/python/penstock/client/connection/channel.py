"""Channel options and metadata that both clients share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

DEFAULT_ADDR: Final = "127.0.0.1:50051"

Metadata = Mapping[str, str | bytes] | Sequence[tuple[str, str | bytes]]
"""Metadata of a call, as a mapping such as `{"traceparent": "00-..."}` or as pairs. Keys of values of type
bytes end in "-bin".
"""

ChannelOptions = Sequence[tuple[str, str | int]]

_KEEPALIVE_TIMEOUT: Final = "grpc.keepalive_timeout_ms"
_PING_TIMEOUT: Final = "grpc.http2.ping_timeout_ms"
"""How long gRPC waits for the answer to a ping, by default a minute; the option above applies to
the socket.
"""

_OPTIONS: Final[ChannelOptions] = (
    # Log-probabilities of a long prompt are larger than gRPC's default of 4 MiB.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # A long prefill sends nothing for a while. Pings tell a quiet connection from a dead one, within 40 s.
    ("grpc.keepalive_time_ms", 30_000),
    (_KEEPALIVE_TIMEOUT, 10_000),
    # By default gRPC sends no more than two such pings until it has data to send.
    ("grpc.http2.max_pings_without_data", 0),
    # By default gRPC waits up to two minutes before it reconnects, and would find a server that has just
    # started late.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

SERVING_SERVICE: Final = "penstock.v1.InferenceService"
AUTHORIZATION: Final = "authorization"


def channel_options(more: ChannelOptions) -> list[tuple[str, str | int]]:
    """The client's channel options, overridden by the caller's."""
    merged = {**dict(_OPTIONS), **dict(more)}
    return list({_PING_TIMEOUT: merged[_KEEPALIVE_TIMEOUT], **merged}.items())


def pairs(*parts: Metadata | None) -> tuple[tuple[str, str | bytes], ...]:
    """The metadata of a call: the client's own, then the call's. Only the last authorization is kept."""
    found: list[tuple[str, str | bytes]] = []
    for part in parts:
        new = list(part.items() if isinstance(part, Mapping) else part or ())
        if any(key.lower() == AUTHORIZATION for key, _ in new):
            found = [(key, value) for key, value in found if key.lower() != AUTHORIZATION]
        found.extend(new)
    return tuple(found)
