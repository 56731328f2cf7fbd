"""What both clients share besides messages: the address, channel options, metadata, readiness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import grpc

DEFAULT_ADDR: Final = "127.0.0.1:50051"

Metadata = Mapping[str, str | bytes] | Sequence[tuple[str, str | bytes]]
"""Call metadata: `{"traceparent": "00-..."}` or pairs; keys of bytes values end in "-bin"."""

ChannelOptions = Sequence[tuple[str, str | int]]

_OPTIONS: Final[ChannelOptions] = (
    # Prompt log-probabilities of a long prompt are larger than gRPC's 4 MiB.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # A long prefill sends nothing for a while; pings tell a quiet connection from a dead one.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # gRPC waits up to two minutes before it tries again; a server that just started should be found at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

SERVING_SERVICE: Final = "penstock.v1.InferenceService"


def channel_options(more: ChannelOptions) -> list[tuple[str, str | int]]:
    """Ours, then the caller's, which win."""
    return list({**dict(_OPTIONS), **dict(more)}.items())


def pairs(*parts: Metadata | None) -> tuple[tuple[str, str | bytes], ...]:
    """Metadata of a call: the client's own, then that of the call."""
    found: list[tuple[str, str | bytes]] = []
    for part in parts:
        found.extend(part.items() if isinstance(part, Mapping) else part or ())
    return tuple(found)


def check_target(addr: str | None, channel: object, credentials: object) -> str:
    """The address to connect to. TypeError when a channel is given an address or credentials too."""
    if channel is not None and (addr is not None or credentials is not None):
        raise TypeError("an existing channel has its address and credentials; give either it or those")
    return addr or DEFAULT_ADDR


def is_final_health_error(error: grpc.RpcError) -> bool:
    """Whether waiting on cannot help: the server answered, and it is not "not yet"."""
    code: grpc.StatusCode = error.code()
    return code not in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.NOT_FOUND,  # the health service answers before ours is registered
    )
