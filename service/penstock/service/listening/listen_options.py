"""Options of the addresses besides the first port, and of TLS; and checks of who can reach them."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from penstock.service.listening.tls import TlsFiles

MAX_SOCKET_MODE = 0o777


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Addresses and TLS. What is not given is not used."""

    unix_socket: Path | None = None
    """A Unix socket to listen on, beside the port or instead of it. It never speaks TLS: the mode of its file
    decides who may connect.
    """
    unix_socket_mode: int = 0o600
    """The mode of that file. A client needs the right to write."""
    control_port: int | None = None
    """The port that serves ControlService and UpdateWeights instead of the first address; 0 lets the system
    choose one.
    """
    control_host: str | None = None
    """The host of `control_port`; None means the same host as the first address."""
    tls_cert: Path | None = None
    """The server's certificate chain in PEM form. With it and its key all ports speak TLS only."""
    tls_key: Path | None = None
    client_ca: Path | None = None
    """Authorities of clients' certificates. If it is given, clients without such a certificate
    are refused.
    """
    insecure: bool = False
    """Whether a port that other machines can reach may lack TLS, or a way to tell callers apart."""

    @property
    def tls(self) -> TlsFiles | None:
        """The files for TLS, or None without TLS."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.client_ca)

    def problems(self) -> list[str]:
        """Say what is wrong with these options among themselves, one line for each."""
        bad: list[str] = []
        if self.unix_socket is not None and not self.unix_socket.name:
            bad.append(f"unix_socket: must be the path of a file, not {str(self.unix_socket)!r}")
        if not 0 <= self.unix_socket_mode <= MAX_SOCKET_MODE:
            bad.append(f"unix_socket_mode: must be from 0 to 777 (octal), not {self.unix_socket_mode:o}")
        if self.control_port is not None and not 0 <= self.control_port <= 65535:
            bad.append(f"control_port: must be from 0 to 65535, not {self.control_port}")
        if self.control_host is not None:
            bad.extend(host_problems("control_host", self.control_host))
            if self.control_port is None:
                bad.append("control_host: needs a control_port")
        if (self.tls_cert is None) != (self.tls_key is None):
            lacking, given = ("tls_key", "tls_cert") if self.tls_key is None else ("tls_cert", "tls_key")
            bad.append(f"{lacking}: is required with {given}: TLS needs both")
        if self.client_ca is not None and self.tls_cert is None and self.tls_key is None:
            bad.append("client_ca: needs tls_cert and tls_key: clients show certificates within TLS only")
        return bad

    def exposure_problem(self, hosts: tuple[str, ...], *, keys: bool) -> str | None:
        """Say why the server may not listen on one of these hosts; None if it may.

        A port that other machines can reach needs TLS, and keys or clients' certificates, unless `insecure`.
        """
        lacking = self.lacking(hosts, keys=keys)
        if self.insecure or not lacking:
            return None
        host = next(host for host in hosts if not is_loopback(host))
        return (
            f"host: {host} can be reached from other machines, and the server has {' and '.join(lacking)}; "
            "give that, listen on 127.0.0.1 or a Unix socket, or accept it with --insecure"
        )

    def lacking(self, hosts: tuple[str, ...], *, keys: bool) -> list[str]:
        """Say what a server that others can reach should have and this one lacks. Nothing is lacking if only
        this machine can reach it.
        """
        if all(is_loopback(host) for host in hosts):
            return []
        lacking = []
        if self.tls is None:
            lacking.append("no TLS (--tls-cert and --tls-key)")
        if not keys and self.client_ca is None:
            lacking.append("no way to tell callers apart (--keys or --client-ca)")
        return lacking


def is_loopback(host: str) -> bool:
    """Say whether only this machine can connect to the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_problems(name: str, host: str) -> list[str]:
    """Say what is wrong with a host, given as the option `name`."""
    if not host:
        return [f"{name}: must not be empty"]
    if host.startswith("unix:") or "/" in host:
        return [f"{name}: must be a name or an IP address, not {host!r}; a Unix socket is a unix_socket"]
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            return [f"{name}: must be a name or an IP address without brackets or port, not {host!r}"]
    return []


def tcp_address(host: str, port: int) -> str:
    """Write the address as host:port, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unix_address(path: Path) -> str:
    """Write the address of a Unix socket as gRPC reads it: with an absolute path, and %20 for a space."""
    return f"unix:{quote(str(path.absolute()))}"
