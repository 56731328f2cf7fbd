"""What an address means: gRPC's target, whether it stays on this machine, and which proxy stands before it.

    host:port               one server; also [::1]:50051
    unix:/run/penstock.sock a Unix socket
    a:50051,b:50051         several servers, asked in turns
    dns:///name:50051       all addresses that a name has, asked in turns

Anything else that gRPC knows ("ipv4:...", "xds:///...") is handed on as it is.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

DEFAULT_PORT: Final = 50051

_SCHEME = re.compile(r"(unix-abstract|unix|vsock|ipv4|ipv6|dns|xds|passthrough)(:.*)", re.IGNORECASE)
_PROXY_VARIABLES: Final = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXY_VARIABLES: Final = ("no_grpc_proxy", "no_proxy")


@dataclass(frozen=True, slots=True)
class Address:
    """One address that a client was given, understood."""

    target: str
    """As gRPC takes it."""
    hosts: tuple[str, ...] = ()
    """Names or IP addresses of the servers; empty for a socket of this machine and where gRPC alone knows."""
    local: bool = False
    """Whether all of it stays on this machine: loopback, or a Unix socket."""
    balanced: bool = False
    """Whether calls go to several servers in turns."""


def parse(addr: str) -> Address:
    """The address; ValueError, which says what is wrong, for what cannot be one."""
    if not addr.strip() or addr != addr.strip():
        raise ValueError(f"an address is HOST:PORT or unix:/PATH, not {addr!r}")
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
            # A DNS server that is named before the name says where the name is, "localhost" too.
            plain = "/" not in re.sub("^(///|/)", "", rest)
            return Address(addr, (host,), plain and is_loopback(host), balanced=rest.startswith("//"))
        case _:
            return Address(addr)


def host_of(text: str) -> str:
    """The host of host:port, [v6]:port, or a host alone."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text if text.count(":") > 1 else text.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, whatever its network; a name other than localhost is not."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _with_port(text: str, host: str) -> str:
    """gRPC would try port 443 where none is given."""
    if text in (host, f"[{host}]"):
        return f"[{host}]:{DEFAULT_PORT}" if ":" in host else f"{host}:{DEFAULT_PORT}"
    return text


def _resolved(part: str) -> tuple[int, str]:
    """The family and the text of one of several servers.

    gRPC wants them as IP addresses, so names are looked up, once.
    """
    host = host_of(part)
    port = _with_port(part, host).rpartition(":")[2]
    try:
        family, _, _, _, sockaddr = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{part!r} is not an address that can be found: {error}") from error
    return family, f"[{sockaddr[0]}]:{port}" if family == socket.AF_INET6 else f"{sockaddr[0]}:{port}"


def proxy_of(addr: str, environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """The proxy through which gRPC reaches an address and the variable that names it, without its password.

    None where there is none: we ask none for this machine's own addresses.
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
    """By the end of its name, or by a network that it is in."""
    if any(host.endswith(entry) for entry in entries):
        return True
    for entry in entries:
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                return True
    return False
