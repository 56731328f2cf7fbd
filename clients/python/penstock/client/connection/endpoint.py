"""Derives a channel's target, credentials, options and metadata from what a client is given."""

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
    """None means plaintext."""
    options: list[tuple[str, str | int]]
    metadata: tuple[tuple[str, str | bytes], ...]
    """Sent with every call."""
    balanced: bool
    """Whether calls go to several servers in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The arguments of both clients' constructors besides the address."""

    tls: Tls | bool = False
    token: str | None = None
    insecure: bool = False
    credentials: grpc.ChannelCredentials | None = None
    metadata: Metadata | None = None
    options: ChannelOptions = ()


def endpoint(addr: str | None, access: Access) -> Endpoint:
    """Derive the endpoint. Raises ValueError or TypeError for arguments that contradict each other, and
    ValueError for a token that others could read on the network.
    """
    if access.tls and access.credentials is not None:
        raise TypeError("tls and credentials both secure the channel; give only one of them")
    address = parse(addr or channel.DEFAULT_ADDR)
    tls = Tls() if access.tls is True else access.tls or None
    credentials = access.credentials if tls is None else tls.credentials()
    if access.token is not None and credentials is None and not (address.local or access.insecure):
        raise ValueError(
            f"the token would be sent to {address.target} in plaintext, readable for others on the network; "
            "use TLS, or allow it with insecure"
        )
    ours: dict[str, str | int] = {}
    if address.local:
        ours["grpc.enable_http_proxy"] = 0  # a proxy must not be used for this machine's own addresses
    if address.balanced:
        ours["grpc.service_config"] = _BALANCED
    if tls is not None and tls.name is not None:
        ours["grpc.ssl_target_name_override"] = tls.name
        ours["grpc.default_authority"] = tls.name
    elif credentials is not None and address.balanced and len(address.hosts) > 1:
        raise ValueError("several servers with TLS need the name that all their certificates have (tls name)")
    return Endpoint(
        target=address.target,
        credentials=credentials,
        options=channel_options([*ours.items(), *access.options]),
        metadata=pairs(_authorization(access.token), access.metadata),
        balanced=address.balanced,
    )


def check_existing(addr: str | None, access: Access) -> None:
    """Raise TypeError if an existing channel is combined with arguments that only apply to a new one."""
    if addr is not None or access.tls or access.credentials is not None or access.token is not None:
        raise TypeError(
            "an existing channel has its own address and access; give no addr, tls, credentials or token "
            'with it (a token may be given as metadata={"authorization": "Bearer ..."})'
        )


def _authorization(token: str | None) -> Metadata | None:
    if token is None:
        return None
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("a token must be one word of printable ASCII characters")
    return {channel.AUTHORIZATION: f"Bearer {token}"}
