"""From what a client is told about its server to a channel's target, credentials, options and metadata."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

import grpc

from penstock.client.connection import channel
from penstock.client.connection.address import parse
from penstock.client.connection.channel import ChannelOptions, Metadata, channel_options, pairs
from penstock.client.connection.tls import Tls

_BALANCED: Final = json.dumps(
    {
        "loadBalancingConfig": [{"round_robin": {}}],
        "healthCheckConfig": {"serviceName": channel.SERVING_SERVICE},
    }
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to reach a server."""

    target: str
    credentials: grpc.ChannelCredentials | None
    """None: plaintext."""
    options: list[tuple[str, str | int]]
    metadata: tuple[tuple[str, str | bytes], ...]
    """Of every call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What the constructors of both clients take besides the address."""

    tls: Tls | bool = False
    token: str | None = None
    insecure: bool = False
    credentials: grpc.ChannelCredentials | None = None
    metadata: Metadata | None = None
    options: ChannelOptions = ()


def endpoint(addr: str | None, access: Access) -> Endpoint:
    """ValueError for what cannot be, among it a token that would be readable on the network."""
    if access.tls and access.credentials is not None:
        raise TypeError("tls and credentials both say how the channel is secured; give either")
    address = parse(addr or channel.DEFAULT_ADDR)
    tls = Tls() if access.tls is True else access.tls or None
    credentials = access.credentials if tls is None else tls.credentials()
    if access.token is not None and credentials is None and not (address.local or access.insecure):
        raise ValueError(
            f"the token would go to {address.target} in plaintext, for the network between to read; "
            "use TLS, or say that it may be so (insecure)"
        )
    ours: dict[str, str | int] = {}
    if address.local:
        ours["grpc.enable_http_proxy"] = 0  # no proxy reaches this machine's own addresses better
    if address.balanced:
        ours["grpc.service_config"] = _BALANCED
    if tls is not None and tls.name is not None:
        ours["grpc.ssl_target_name_override"] = tls.name
        ours["grpc.default_authority"] = tls.name
    elif credentials is not None and address.balanced and len(address.hosts) > 1:
        raise ValueError(
            "several servers under TLS need the one name that their certificates share (tls name)"
        )
    return Endpoint(
        target=address.target,
        credentials=credentials,
        options=channel_options([*ours.items(), *access.options]),
        metadata=pairs(_authorization(access.token), access.metadata),
    )


def check_existing(addr: str | None, access: Access) -> None:
    """TypeError where an existing channel is given what only a new one could have."""
    if addr is not None or access.tls or access.credentials is not None or access.token is not None:
        raise TypeError(
            "an existing channel has its address and credentials; give either it or those "
            '(and a token as metadata={"authorization": ...})'
        )


def _authorization(token: str | None) -> Metadata | None:
    if token is None:
        return None
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("a token is one word of printable ASCII characters")
    return {channel.AUTHORIZATION: f"Bearer {token}"}
