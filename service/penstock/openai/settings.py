"""All options of the OpenAI front: frozen, and checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock.client import DEFAULT_ADDR, Tls
from penstock.client.connection.address import is_loopback, parse
from penstock.shared.logs import LOG_FORMATS, LogFormat

MAX_WORKERS: Final = 256
_LEAST_STORE: Final = 1 << 20
_MOST_DAYS: Final = 36_500


class SettingsError(ValueError):
    """An option cannot be honoured. The message begins with the option's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the operator says. Times are in seconds, and 0 switches a limit of time off where that is said."""

    addr: str = DEFAULT_ADDR
    """The gRPC server, or several that serve the same, in the client's form."""
    tls: Tls | bool = False
    """TLS towards the server."""
    token: str | None = field(default=None, repr=False)
    """The key of requests that bring none."""
    insecure: bool = False
    """Whether keys may cross the network without TLS, on either side, and whether other machines may use
    `token`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    """0 lets the system choose."""
    tls_cert: Path | None = None
    """A certificate chain in PEM form: the front speaks HTTPS."""
    tls_key: Path | None = None
    client_ca: Path | None = None
    """Authorities in PEM form: clients must show a certificate of one of them."""
    workers: int = 1
    """How many processes serve the port."""

    max_connections: int = 4096
    """Of all workers together."""
    max_connections_per_address: int = 3072
    """Of one IPv4 address or IPv6 /64 network."""
    max_header_bytes: int = 32 << 10
    """Of the first line and the headers of one request."""
    header_timeout_s: float = 10.0
    """How long a connection may take to send the headers of a request."""
    max_body_bytes: int = 16 << 20
    max_waiting_body_bytes: int = 256 << 20
    """Of all bodies together that are on their way in, in one worker."""
    receive_limit_s: float = 60.0
    """How long a body may take to arrive."""
    keep_alive_s: int = 75
    """How long a connection may stay without a request."""
    stall_limit_s: float = 30.0
    """How long a client may take nothing of a reply that waits for it."""
    request_timeout_s: float = 3600.0
    """How long a request may take at the server; 0: no limit."""
    grace_s: float = 30.0
    """How long running requests may go on after SIGTERM."""

    store: Path | None = None
    """The file that keeps responses; None to keep none."""
    store_max_bytes: int = 1 << 30
    """The most bytes of that file."""
    store_days: float = 30.0
    """How long a response is kept."""

    files: Path | None = None
    """The folder of callers' files and batches; without it there are none."""
    files_max_bytes: int = 10 << 30
    """Of all that is in it."""
    files_days: float = 30.0
    """How long a file is kept, and a batch after its end."""
    batch_concurrency: int = 32
    """How many lines of a batch run at a time."""

    cors_origins: tuple[str, ...] = ()
    """The origins whose pages may call the front; "*" allows all."""
    adapter_updates: bool = False
    """Whether callers may have the server load and unload adapters, as far as their keys allow it there."""
    page: bool = True
    """Whether the web page is served at `/`."""
    log_format: LogFormat = "text"
    access_log: bool = True
    """Whether each request to the API has a line in the log."""

    def __post_init__(self) -> None:
        problems = [*self._wrong_numbers(), *self._wrong_texts()]
        if problems:
            raise SettingsError("; ".join(problems))

    def _wrong_numbers(self) -> list[str]:
        bad = []
        if not 0 <= self.port <= 65535:
            bad.append(f"port: must be from 0 to 65535, not {self.port}")
        if not 1 <= self.workers <= MAX_WORKERS:
            bad.append(f"workers: must be from 1 to {MAX_WORKERS}, not {self.workers}")
        for name, least in (
            ("max_connections", self.workers),
            ("max_connections_per_address", self.workers),
            ("max_header_bytes", 1024),
            ("max_body_bytes", 1024),
            ("max_waiting_body_bytes", self.max_body_bytes),
            ("store_max_bytes", _LEAST_STORE),
            ("files_max_bytes", 1 << 20),
            ("batch_concurrency", 1),
        ):
            if getattr(self, name) < least:
                bad.append(f"{name}: must be at least {least}, not {getattr(self, name)}")
        for name, may_be_0 in (
            ("header_timeout_s", False),
            ("receive_limit_s", False),
            ("keep_alive_s", False),
            ("stall_limit_s", False),
            ("request_timeout_s", True),
            ("grace_s", True),
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and (value >= 0 if may_be_0 else value > 0)):
                bad.append(f"{name}: must be {'at least' if may_be_0 else 'above'} 0 seconds, not {value}")
        if not 0 < self.store_days <= _MOST_DAYS:
            bad.append(f"store_days: must be above 0 and at most {_MOST_DAYS}, not {self.store_days}")
        if not 1 <= self.files_days <= _MOST_DAYS:
            bad.append(f"files_days: must be from 1 to {_MOST_DAYS}, not {self.files_days}")
        return bad

    def _wrong_texts(self) -> list[str]:
        bad = []
        if (self.tls_cert is None) != (self.tls_key is None):
            bad.append("tls_cert: must be given together with tls_key")
        if self.client_ca is not None and self.tls_cert is None:
            bad.append("client_ca: needs tls_cert")
        if self.log_format not in LOG_FORMATS:
            bad.append(f"log_format: must be {' or '.join(LOG_FORMATS)}, not {self.log_format!r}")
        bad += [
            f"cors_origins: must be * or like https://example.org, not {origin!r}"
            for origin in self.cors_origins
            if origin != "*" and not _is_origin(origin)
        ]
        try:
            address = parse(self.addr)
        except ValueError as error:
            return [*bad, f"addr: {error}"]
        if not self.insecure:
            if self.tls_cert is None and not is_loopback(self.host):
                bad.append(
                    f"host: {self.host} can be reached from other machines, and keys would cross the network "
                    "in plaintext; give tls_cert, or allow it with insecure"
                )
            if self.token is not None and not is_loopback(self.host):
                bad.append(
                    f"token: requests that bring no key would use it, and {self.host} can be reached "
                    "from other machines; leave it out, or allow it with insecure"
                )
            if not self.tls and not address.local:
                bad.append(
                    f"addr: keys would be sent to {address.target} in plaintext, readable for others on the "
                    "network; use tls, or allow it with insecure"
                )
        return bad


def _is_origin(text: str) -> bool:
    scheme, slashes, host = text.partition("://")
    return (
        scheme in ("http", "https") and bool(slashes) and bool(host) and "/" not in host and " " not in host
    )
