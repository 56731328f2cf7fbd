"""Reads OpenTelemetry's environment variables, and says where a collector is and how it is spoken to.

A flag wins over a variable, and the variable of one signal, such as OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, over
that of all. An empty variable counts as none, as the specification says. Times are in milliseconds, which it
says, too.

Every function raises ConfigError for a value that it cannot use, and names the variable. No message quotes
the value of a header, which may be a key.

A `Destination` is made of an address (`address_of`) and of what the environment adds.
"""

from __future__ import annotations

import math
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import SplitResult, unquote, urlsplit

from penstock.runtime.errors import ConfigError
from penstock.service.telemetry.options import OTLP_PROTOCOLS, OtlpProtocol, TracingOptions

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


Environ = Mapping[str, str]
DISABLED = "OTEL_SDK_DISABLED"
_DEFAULT_ENDPOINTS = {"grpc": "http://localhost:4317", "http/protobuf": "http://localhost:4318"}
_EXPORTERS: Mapping[Signal, tuple[str, ...]] = {
    "traces": ("otlp", "none"),
    "metrics": ("otlp", "prometheus", "none"),
}
_MOST_TIMEOUT_MS = 3_600_000
_HEADER_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")


def destination(options: TracingOptions, signal: Signal, environ: Environ = os.environ) -> Destination | None:
    """Tell where telemetry of this kind goes; None if no address is given, or a variable switches it off."""
    if why_off(signal, environ):
        return None
    values = _Values(signal, environ)
    protocol = options.otlp_protocol or _protocol(values)
    named, text, is_whole = _endpoint(options, values)
    if not text:
        if not environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip():
            return None
        text = _DEFAULT_ENDPOINTS[protocol]
    if "://" not in text and protocol == "grpc" and options.otlp_endpoint is None:
        text = f"{_scheme(values, named)}://{text}"
    address = address_of(named, text, protocol, signal_path="" if is_whole else f"/v1/{signal}")
    certificate, client_certificate, client_key = (
        _file(values, name) for name in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")
    )
    if client_key is not None and client_certificate is None:
        raise ConfigError(f"{values.find('CLIENT_KEY')[0]}: needs OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE")
    made = Destination(
        signal=signal,
        protocol=protocol,
        url=address.url,
        host=address.host,
        port=address.port,
        path=address.path,
        is_tls=address.is_tls,
        headers=_headers(values, protocol),
        certificate=certificate,
        client_certificate=client_certificate,
        client_key=client_key,
        timeout_s=_timeout_ms(values) / 1000,
        is_compressed=_is_compressed(values),
    )
    if made.is_tls:
        made.tls_context()  # so that a bad file is told at the start
    return made


def why_off(signal: Signal, environ: Environ = os.environ) -> str:
    """Name the variable and value that switch this signal off, such as "OTEL_SDK_DISABLED=true"; empty if
    none does.
    """
    disabled = environ.get(DISABLED, "").strip().lower()
    if disabled not in ("", "true", "false"):
        raise ConfigError(f"{DISABLED}: must be true or false, not {disabled!r}")
    if disabled == "true":
        return f"{DISABLED}=true"
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    text = environ.get(variable, "").strip()
    names = [name.strip() for name in text.split(",")] if text else []
    for name in names:
        if name not in _EXPORTERS[signal]:
            raise ConfigError(f"{variable}: must be of {', '.join(_EXPORTERS[signal])}, not {name!r}")
    if "none" in names and len(names) > 1:
        raise ConfigError(f"{variable}: none cannot stand beside others: {text!r}")
    return f"{variable}={text}" if names and "otlp" not in names else ""


class _Values:
    """The variables OTEL_EXPORTER_OTLP_... of one signal."""

    def __init__(self, signal: Signal, environ: Environ) -> None:
        self._prefixes = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_", "OTEL_EXPORTER_OTLP_")
        self._environ = environ

    def find(self, name: str) -> tuple[str, str]:
        """Return the variable that counts, and its value; the value is empty if none is set."""
        for prefix in self._prefixes:
            value = self._environ.get(prefix + name, "").strip()
            if value:
                return prefix + name, value
        return self._prefixes[1] + name, ""

    def is_own(self, variable: str) -> bool:
        """Say whether the variable is this signal's own."""
        return variable.startswith(self._prefixes[0])


def _protocol(values: _Values) -> OtlpProtocol:
    variable, text = values.find("PROTOCOL")
    for protocol in OTLP_PROTOCOLS:
        if text == protocol:
            return protocol
    if text:
        raise ConfigError(f"{variable}: must be {' or '.join(OTLP_PROTOCOLS)}, not {text!r}")
    return "grpc"


def _endpoint(options: TracingOptions, values: _Values) -> tuple[str, str, bool]:
    """Return what names the address, the address, and whether it has the whole path of its signal. The
    address is empty if none is given.
    """
    if options.otlp_endpoint is not None:
        return "otlp_endpoint", options.otlp_endpoint or " ", False
    variable, text = values.find("ENDPOINT")
    return variable, text, values.is_own(variable)


def _scheme(values: _Values, named: str) -> str:
    """Return the scheme of an address without one, which only gRPC's may lack."""
    variable, text = values.find("INSECURE")
    if text.lower() not in ("", "true", "false"):
        raise ConfigError(f"{variable}: must be true or false, not {text!r}")
    if not text:
        raise ConfigError(
            f"{named}: must begin with http:// (plaintext) or https:// (TLS), unless {variable} says which"
        )
    return "http" if text.lower() == "true" else "https"


def _headers(values: _Values, protocol: OtlpProtocol) -> tuple[tuple[str, str], ...]:
    variable, text = values.find("HEADERS")
    headers = {}
    for name, value in named_values(variable, text, are_secret=True):
        lower = name.lower()
        if not _HEADER_NAME.fullmatch(lower) or (protocol == "grpc" and lower.startswith(("grpc-", ":"))):
            raise ConfigError(f"{variable}: {name!r} is no name of a header")
        if protocol == "grpc" and lower.endswith("-bin"):
            raise ConfigError(f"{variable}: {name!r} would need bytes, which a variable cannot hold")
        if not value.isascii() or not value.isprintable():
            raise ConfigError(f"{variable}: the value of {name!r} must be printable ASCII")
        headers[lower] = value
    return tuple(headers.items())


def named_values(variable: str, text: str, *, are_secret: bool = False) -> list[tuple[str, str]]:
    """Read "name=value,name=value", percent-encoded."""
    pairs = []
    for number, item in enumerate(text.split(","), 1):
        if not item.strip():
            continue
        name, equals, value = item.partition("=")
        if not equals or not name.strip():
            shown = f"entry {number}" if are_secret else repr(item.strip())
            raise ConfigError(f"{variable}: must be name=value,name=value; {shown} is not of that form")
        pairs.append((unquote(name.strip()), unquote(value.strip())))
    return pairs


def _file(values: _Values, name: str) -> Path | None:
    variable, text = values.find(name)
    if not text:
        return None
    path = Path(text)
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{variable}: {text!r} cannot be read: {error.strerror}") from error
    return path


def _timeout_ms(values: _Values) -> float:
    variable, text = values.find("TIMEOUT")
    timeout = number_in(text or "10000")
    if timeout is None or not 0 < timeout <= _MOST_TIMEOUT_MS:
        raise ConfigError(
            f"{variable}: must be above 0 and at most {_MOST_TIMEOUT_MS} milliseconds, not {text!r}"
        )
    return timeout


def _is_compressed(values: _Values) -> bool:
    variable, text = values.find("COMPRESSION")
    if text.lower() not in ("", "none", "gzip"):
        raise ConfigError(f"{variable}: must be gzip or none, not {text!r}")
    return text.lower() == "gzip"


def number_in(text: str) -> float | None:
    """Read a finite number; None if the text is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
