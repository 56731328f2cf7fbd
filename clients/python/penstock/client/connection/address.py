"""Parses addresses (gRPC's target, whether it stays on this machine, and which proxy gRPC uses to reach it),
and derives a channel's target, credentials, options and metadata from what a client is given.

    host:port               one server; also [::1]:50051
    unix:/run/penstock.sock a Unix socket
    a:50051,b:50051         several servers, called in turn
    dns:///name:50051       all addresses of a name, called in turn

Other forms that gRPC knows ("ipv4:...", "xds:///...") are passed to it unchanged.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import grpc

from penstock.client.connection.channel import (
    AUTHORIZATION,
    DEFAULT_ADDR,
    SERVING_SERVICE,
    ChannelOptions,
    Metadata,
    Tls,
    channel_options,
    pairs,
)

DEFAULT_PORT: Final = 50051

_SCHEME = re.compile(r"(unix-abstract|unix|vsock|ipv4|ipv6|dns|xds|passthrough)(:.*)", re.IGNORECASE)
_PROXY_VARIABLES: Final = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXY_VARIABLES: Final = ("no_grpc_proxy", "no_proxy")


@dataclass(frozen=True, slots=True)
class Address:
    """One parsed address."""

    target: str
    """The target in gRPC's form."""
    hosts: tuple[str, ...] = ()
    """Names or IP addresses of the servers; empty for a socket of this machine, and if only gRPC
    knows them.
    """
    local: bool = False
    """Whether all of it stays on this machine: loopback, or a Unix socket."""
    balanced: bool = False
    """Whether calls go to several servers in turn."""


def parse(addr: str) -> Address:
    """Parse an address. Raises ValueError, which says what is wrong, if it is none."""
    if not addr.strip() or addr != addr.strip():
        raise ValueError(f"an address must be HOST:PORT or unix:/PATH, not {addr!r}")
    scheme = _SCHEME.fullmatch(addr)
    if scheme is not None:
        return _with_scheme(addr, scheme[1].lower(), scheme[2][1:])
    parts = addr.split(",")
    if len(parts) == 1:
        host = host_of(addr)
        return Address(_with_port(addr, host), (host,), is_loopback(host))
    found = [_resolved(part) for part in parts]
    families = {family for family, _ in found}
    if len(families) > 1:
        raise ValueError(f"{addr}: the servers must all have IPv4 or all have IPv6 addresses")
    hosts = tuple(host_of(part) for part in parts)
    name = "ipv6" if socket.AF_INET6 in families else "ipv4"
    listed = ",".join(text for _, text in found)
    return Address(f"{name}:{listed}", hosts, all(map(is_loopback, hosts)), balanced=True)


def _with_scheme(addr: str, scheme: str, rest: str) -> Address:
    match scheme:
        case "unix" | "unix-abstract" | "vsock":
            return Address(addr, local=scheme != "vsock")
        case "ipv4" | "ipv6":
            hosts = tuple(host_of(part) for part in rest.split(","))
            return Address(addr, hosts, all(map(is_loopback, hosts)), balanced=len(hosts) > 1)
        case "dns":
            host = host_of(rest.rpartition("/")[2])
            # If a DNS server is given before the name, that server decides where the name is, even for
            # "localhost".
            plain = "/" not in re.sub("^(///|/)", "", rest)
            return Address(addr, (host,), plain and is_loopback(host), balanced=rest.startswith("//"))
        case _:
            return Address(addr)


def host_of(text: str) -> str:
    """Return the host in host:port, in [v6]:port, or in a host alone."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text if text.count(":") > 1 else text.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Say whether a host is this machine. A name other than localhost counts as another machine."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _with_port(text: str, host: str) -> str:
    """Add the default port if there is none, because gRPC would use 443."""
    if text in (host, f"[{host}]"):
        return f"[{host}]:{DEFAULT_PORT}" if ":" in host else f"{host}:{DEFAULT_PORT}"
    return text


def _resolved(part: str) -> tuple[int, str]:
    """Return the family and the address of one of several servers. gRPC needs IP addresses for those, so a
    name is looked up once.
    """
    host = host_of(part)
    port = _with_port(part, host).rpartition(":")[2]
    try:
        family, _, _, _, sockaddr = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"the address {part!r} cannot be resolved: {error}") from error
    return family, f"[{sockaddr[0]}]:{port}" if family == socket.AF_INET6 else f"{sockaddr[0]}:{port}"


def proxy_of(addr: str, environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """Return the environment variable that names the proxy for this address, and the proxy without its
    password. None if gRPC uses none: the client never uses one for addresses of this machine.
    """
    address = parse(addr)
    if address.local or not address.hosts:
        return None
    variable = next((name for name in _PROXY_VARIABLES if environ.get(name)), None)
    if variable is None:
        return None
    excluded = next((environ[name] for name in _NO_PROXY_VARIABLES if environ.get(name)), "")
    entries = [entry.strip() for entry in excluded.split(",") if entry.strip()]
    if all(_is_excluded(host, entries) for host in address.hosts):
        return None
    try:
        proxy = urlsplit(environ[variable])
    except ValueError:
        return variable, "an address that cannot be read"
    return variable, f"{proxy.scheme}://{proxy.netloc.rpartition('@')[2]}"


def _is_excluded(host: str, entries: Sequence[str]) -> bool:
    """Say whether the end of the host's name, or a network that it is in, is among the entries."""
    if any(host.endswith(entry) for entry in entries):
        return True
    for entry in entries:
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                return True
    return False


_BALANCED: Final = json.dumps(
    {
        "loadBalancingConfig": [{"round_robin": {}}],
        "healthCheckConfig": {"serviceName": SERVING_SERVICE},
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
    address = parse(addr or DEFAULT_ADDR)
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
    return {AUTHORIZATION: f"Bearer {token}"}
