"""Says where a collector is and how it is spoken to, of an address and of what the environment adds."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import SplitResult, urlsplit

from penstock.runtime.errors import ConfigError
from penstock.service.telemetry.options import OtlpProtocol

Signal = Literal["traces", "metrics"]
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """One collector for one kind of telemetry."""

    signal: Signal
    protocol: OtlpProtocol
    url: str
    """As it may be logged: it never holds a password."""
    host: str
    port: int
    path: str
    """The path of HTTP requests; empty over gRPC."""
    is_tls: bool
    headers: tuple[tuple[str, str], ...] = ()
    """Names are in lower case."""
    certificate: Path | None = None
    """The authorities that the collector's certificate is checked with, in PEM form; None: the system's."""
    client_certificate: Path | None = None
    client_key: Path | None = None
    timeout_s: float = 10.0
    """How long one batch may take, with all attempts."""
    is_compressed: bool = False
    """Whether batches are sent as gzip."""

    def tls_context(self) -> ssl.SSLContext:
        """Make what TLS needs of the files. Raises ConfigError if one cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.certificate)
            if self.client_certificate is not None:
                context.load_cert_chain(self.client_certificate, self.client_key)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise ConfigError(
                f"{self.url}: the certificates for {self.signal} cannot be used: {error}"
            ) from error
        return context


@dataclass(frozen=True, slots=True)
class Address:
    """An address that was taken apart."""

    url: str
    host: str
    port: int
    path: str
    is_tls: bool


def address_of(named: str, text: str, protocol: OtlpProtocol, *, signal_path: str) -> Address:
    """Take an address apart. `named` is what the operator has to mend. `signal_path`, such as "/v1/traces",
    is added to the path of HTTP requests; it is empty if the address is whole. Raises ConfigError.
    """
    parts, port = _split(named, text)
    path = parts.path.rstrip("/") if signal_path else (parts.path or "/")
    if protocol == "grpc":
        if parts.path not in ("", "/"):
            raise ConfigError(
                f"{named}: an address for gRPC has no path; leave {parts.path!r} out, or choose http/protobuf"
            )
        path = ""
    elif signal_path:
        if path.endswith(("/v1/traces", "/v1/metrics", "/v1/logs")):
            raise ConfigError(f"{named}: must be without {signal_path}, which is added to it: {text!r}")
        path += signal_path
    host = parts.hostname or ""
    shown = f"[{host}]" if ":" in host else host
    return Address(f"{parts.scheme}://{shown}:{port}{path}", host, port, path, parts.scheme == "https")


def _split(named: str, text: str) -> tuple[SplitResult, int]:
    """Split an address into its parts and its port."""
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError(f"{named}: must be an address without blanks or special characters, not {text!r}")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{named}: {text!r} is no address: {error}") from error
    if parts.username is not None or parts.password is not None:  # never quoted: it holds a secret
        raise ConfigError(f"{named}: must not hold a user or password; use OTEL_EXPORTER_OTLP_HEADERS")
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ConfigError(
            f"{named}: must begin with http:// (plaintext) or https:// (TLS), and have a host, not {text!r}"
        )
    if parts.query or parts.fragment:
        raise ConfigError(f"{named}: must not have a query or a fragment: {text!r}")
    if port == 0:
        raise ConfigError(f"{named}: the port must be from 1 to 65535: {text!r}")
    return parts, port or _PORTS[parts.scheme]
