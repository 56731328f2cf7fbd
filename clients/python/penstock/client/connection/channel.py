"""How a client's calls reach the server: options and metadata of the channel, TLS, time limits, and whether
and when a call is tried again.
"""

from __future__ import annotations

import math
import os
import random
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from penstock.client.errors import (
    DuplicateRequestId,
    PenstockClientError,
    UnavailableError,
    Unreachable,
    UpdateUnderWay,
)

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
    """Return the client's channel options, overridden by the caller's."""
    merged = {**dict(_OPTIONS), **dict(more)}
    return list({_PING_TIMEOUT: merged[_KEEPALIVE_TIMEOUT], **merged}.items())


def pairs(*parts: Metadata | None) -> tuple[tuple[str, str | bytes], ...]:
    """Return the metadata of a call: the client's own, then the call's. Only the last authorization is
    kept.
    """
    found: list[tuple[str, str | bytes]] = []
    for part in parts:
        new = list(part.items() if isinstance(part, Mapping) else part or ())
        if any(key.lower() == AUTHORIZATION for key, _ in new):
            found = [(key, value) for key, value in found if key.lower() != AUTHORIZATION]
        found.extend(new)
    return tuple(found)


File = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Tls:
    """Use TLS. Files are in PEM form, and are read when a client is made.

    Without `ca` the server's certificate must lead to one of the well-known authorities that gRPC ships, or
    to one in GRPC_DEFAULT_SSL_ROOTS_FILE_PATH.
    """

    ca: File | None = None
    """Authorities to trust instead."""
    cert: File | None = None
    """The client's own certificate, followed by those that lead to its authority; for a server that asks for
    one.
    """
    key: File | None = None
    """The private key of `cert`, without a password."""
    name: str | None = None
    """The name in the server's certificate; by default the host of the address."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key: must be given together")

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raises ValueError for a file that cannot be read, or has the wrong content. gRPC
        would notice only when it connects, and says little then.
        """
        roots = _checked_roots(self.ca) if self.ca is not None else None
        if self.cert is None or self.key is None:
            return grpc.ssl_channel_credentials(roots)
        _check_pair(self.cert, self.key)
        return grpc.ssl_channel_credentials(roots, _read(self.key), _read(self.cert))


def _read(file: File) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {os.fspath(file)}: {error.strerror}") from error


def _checked_roots(file: File) -> bytes:
    data = _read(file)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii", "replace"))
    except ssl.SSLError as error:
        raise ValueError(f"{os.fspath(file)} holds no PEM certificates: {_reason(error)}") from error
    return data


def _check_pair(cert: File, key: File) -> None:
    _read(cert), _read(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        raise ValueError(
            f"{os.fspath(cert)} and {os.fspath(key)} are not a PEM certificate and its key: {_reason(error)}"
        ) from error


def _no_password() -> str:
    raise ValueError("the private key is locked with a password, which is not supported")


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()


INFO_TIMEOUT: Final = 10.0
"""Seconds for calls that a server answers at once: information, an abort."""
TEXT_TIMEOUT: Final = 60.0
"""Seconds for tokenizing, which takes longer for more text."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The default timeout of one client, in seconds. None means the defaults above, and no limit on
    generation.
    """

    default: float | None = None

    def __post_init__(self) -> None:
        _checked(self.default)

    def of(self, given: float | None, otherwise: float | None = None) -> float | None:
        """Return the timeout of one call: its own (math.inf means no limit), else the client's, else
        `otherwise`.
        """
        chosen = next(
            (value for value in (_checked(given), self.default, otherwise) if value is not None), None
        )
        return None if chosen is None or math.isinf(chosen) else chosen


def _checked(value: float | None) -> float | None:
    if value is not None and not value >= 0:  # NaN too
        raise ValueError(f"timeout: must be at least 0 seconds, not {value}")
    return value


@dataclass(frozen=True, slots=True)
class Retry:
    """Repeats calls that the server could not take: those that fail with an UnavailableError, and no others.

    A call is repeated only before the first message of its answer has come, so nobody reads a part of it
    twice. The wait before attempt n + 1 is what the server asks for (`retry_after`), and in addition a random
    part of `initial_delay` * 2 ** (n - 1) seconds, at most `max_delay`, so that callers who were refused
    together do not come back together.

    If a connection breaks, the request may have reached the server, which ends it when it notices. Until then
    its id is taken, so after a broken connection DuplicateRequestId is retried, too. What the lost attempt
    computed is lost. In the same way a weight update finds its own lost attempt under way, so UpdateUnderWay
    is retried then. An update is sent again under its id, so it is never applied twice.
    """

    attempts: int = 5
    """The most attempts, including the first."""
    initial_delay: float = 0.5
    """Seconds."""
    max_delay: float = 30.0
    """Seconds. If the server asks for a longer wait, the call is not repeated."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, not {self.attempts}")
        if not (math.isfinite(self.initial_delay) and self.initial_delay > 0):
            raise ValueError(f"initial_delay must be above 0 seconds, not {self.initial_delay}")
        if not (math.isfinite(self.max_delay) and self.max_delay >= self.initial_delay):
            raise ValueError(f"max_delay must be at least initial_delay, not {self.max_delay}")


class Attempts:
    """The attempts at one call. All of them and their waits share one `timeout`, in seconds."""

    def __init__(self, retry: Retry | None, timeout: float | None) -> None:
        self._retry = retry or Retry(attempts=1)
        self._made = 0
        self._may_have_arrived = False
        self._deadline = None if timeout is None else time.monotonic() + timeout

    def timeout(self) -> float | None:
        """Return the seconds that the next attempt may take; None means no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def delay_after(self, error: PenstockClientError) -> float | None:
        """Return the seconds to wait before the next attempt; None if the error is final."""
        self._made += 1
        again = isinstance(error, UnavailableError) or (
            isinstance(error, DuplicateRequestId | UpdateUnderWay) and self._may_have_arrived
        )
        self._may_have_arrived |= isinstance(error, Unreachable)
        asked = error.retry_after or 0.0
        if not again or self._made >= self._retry.attempts or asked > self._retry.max_delay:
            return None
        most = min(self._retry.max_delay, self._retry.initial_delay * 2 ** min(self._made - 1, 60))
        delay = asked + random.uniform(0, most)
        left = self.timeout()
        return delay if left is None or delay < left else None
