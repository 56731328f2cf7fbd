"""Sends batches to a collector, over gRPC or HTTP, and tries a batch again as OTLP's rules allow.

A `Sender` sends one batch after the other. A `Transport` makes one attempt to send a batch, and what can come
of it is `Taken` or `Failed`. `GrpcTransport` sends over gRPC, and `HttpTransport` over HTTP, as
http/protobuf.

For HTTP, Python's own client is used, because it lets another thread end an attempt: by shutting the socket
down. The time of a socket's operation says nothing about that of an answer which comes byte by byte.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import gzip
import http.client
import math
import random
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import SplitResult, unquote, urlsplit

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # ships no hints

from penstock.service.listening.listen_options import is_loopback
from penstock.service.telemetry.otlp.environment import Destination

MOST_ANSWER_BYTES = 64 * 1024
"""The largest answer that is read. A collector's has some hundred bytes at most."""
MOST_CHARS = 200
"""How much of a collector's own words a log line quotes."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The collector has taken the batch, or some of it: `answer` is its message, not decoded yet."""

    answer: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """The collector was not reached, or has refused the batch."""

    why: str
    may_retry: bool = False
    """Whether the same batch may be sent again, by OTLP's rules."""
    retry_after_s: float | None = None
    """How long the collector wants to be left alone; None if it does not say."""


class Transport(Protocol):
    """Sends batches, one at a time."""

    def attempt(self, batch: bytes, timeout_s: float) -> Taken | Failed:
        """Send a batch once. Raises nothing."""

    def close(self) -> None:
        """End for good, from any thread. An attempt that is under way fails soon."""


def quoted(text: str) -> str:
    """Quote a collector's own words, cut short, without anything that could move a cursor."""
    return ascii(text[:MOST_CHARS]) if text else ""


_METHODS = {
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "metrics": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
}
_RETRYABLE_CODES = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""After these a batch may be sent again over gRPC. By OTLP's rules RESOURCE_EXHAUSTED is one of them only if
the collector says when to come back."""
_OPTIONS = (
    ("grpc.max_receive_message_length", MOST_ANSWER_BYTES),
    # By default gRPC tries a lost collector again only after up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5000),
)


class GrpcTransport:
    """A channel to one collector."""

    def __init__(self, destination: Destination) -> None:
        """Make the channel, which connects at the first batch. Raises ConfigError for a bad certificate."""
        host = f"[{destination.host}]" if ":" in destination.host else destination.host
        target = f"{host}:{destination.port}"
        options = [*_OPTIONS, ("grpc.enable_http_proxy", int(not is_loopback(destination.host)))]
        gzip = grpc.Compression.Gzip if destination.is_compressed else grpc.Compression.NoCompression
        self._headers = destination.headers
        self._channel = (
            grpc.secure_channel(target, _credentials(destination), options=options, compression=gzip)
            if destination.is_tls
            else grpc.insecure_channel(target, options=options, compression=gzip)
        )
        self._export: Any = self._channel.unary_unary(_METHODS[destination.signal])

    def attempt(self, batch: bytes, timeout_s: float) -> Taken | Failed:
        """Send a batch once. Raises nothing."""
        try:
            return Taken(self._export(batch, timeout=timeout_s, metadata=self._headers))
        except grpc.RpcError as error:
            return _failure_of_rpc(error)
        except ValueError:  # the channel is closed
            return Failed("it is shut down")

    def close(self) -> None:
        """End for good. An attempt that is under way fails at once."""
        self._channel.close()


def _credentials(destination: Destination) -> grpc.ChannelCredentials:
    destination.tls_context()  # checks the files, which gRPC would only complain about in its log
    roots, chain, key = (
        None if path is None else path.read_bytes()
        for path in (
            destination.certificate,
            destination.client_certificate,
            destination.client_key or destination.client_certificate,
        )
    )
    return grpc.ssl_channel_credentials(roots, key, chain)


def _failure_of_rpc(error: Any) -> Failed:
    code = error.code()
    after_s = _retry_after_of_details(error.trailing_metadata() or ())
    told = quoted(error.details() or "")
    may_retry = code in _RETRYABLE_CODES or (
        code is grpc.StatusCode.RESOURCE_EXHAUSTED and after_s is not None
    )
    return Failed(f"{code.name} {told}".rstrip(), may_retry, after_s)


def _retry_after_of_details(trailers: Any) -> float | None:
    """Read the delay in a RetryInfo, whatever the collector has put there."""
    for name, value in trailers:
        if name != "grpc-status-details-bin":
            continue
        status, info = status_pb2.Status(), error_details_pb2.RetryInfo()
        try:
            status.ParseFromString(value)
            for detail in status.details:
                if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
                    seconds = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
                    return max(0.0, seconds) if math.isfinite(seconds) else None
        except DecodeError:
            return None
    return None


_RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})
"""After these a batch may be sent again over HTTP."""
_LOST = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)
"""How an idle connection looks that the collector has closed meanwhile."""

_CUT_S = 0.5
"""How long an attempt may take to notice that its socket was shut down."""


class HttpTransport:
    """A connection to one collector, which is kept between batches."""

    def __init__(self, destination: Destination) -> None:
        """Connect at the first batch. Raises ConfigError for a bad certificate."""
        self._destination = destination
        self._context = destination.tls_context() if destination.is_tls else None
        self._proxy = _proxy(destination)
        self._headers = {
            "content-type": "application/x-protobuf",
            "user-agent": "penstock",
            **({"content-encoding": "gzip"} if destination.is_compressed else {}),
            **dict(destination.headers),
        }
        self._connection: _Connection | None = None
        self._is_closed = False
        self._is_cut = False
        """Whether the attempt that is under way, or the last one, was ended by its time or by `close`."""
        self._in_use = threading.Lock()

    def attempt(self, batch: bytes, timeout_s: float) -> Taken | Failed:
        """Send a batch once. Raises nothing."""
        body = gzip.compress(batch, 1) if self._destination.is_compressed else batch
        until = time.monotonic() + timeout_s
        with self._in_use:
            was_open = self._connection is not None
            try:
                return self._post(body, timeout_s)
            except _LOST as error:
                if not was_open or self._is_cut:
                    return _failure_of_exchange(error)
            except (OSError, http.client.HTTPException, ValueError) as error:
                return _failure_of_exchange(error)
            try:
                return self._post(body, max(0.001, until - time.monotonic()))
            except (OSError, http.client.HTTPException, ValueError) as error:
                return _failure_of_exchange(error)

    def close(self) -> None:
        """End for good. An attempt that is under way fails soon."""
        self._is_closed = True
        self._cut()
        if self._in_use.acquire(timeout=_CUT_S):  # else it closes the connection itself
            self._drop()
            self._in_use.release()

    def _post(self, body: bytes, timeout_s: float) -> Taken | Failed:
        """Send and read the answer. Whatever is raised, and whatever is left unread, ends the connection."""
        if self._is_closed:
            return Failed("it is shut down")
        self._is_cut = False
        watch = threading.Timer(timeout_s, self._cut)
        watch.daemon = True
        watch.start()
        is_whole = False
        try:
            connection = self._connected(timeout_s)
            connection.request("POST", self._target(), body=body, headers=self._headers)
            response = connection.getresponse()
            answer = response.read(MOST_ANSWER_BYTES)
            if self._is_cut:  # what was read until then looks like a short answer
                raise TimeoutError("the answer did not come in time")
            is_whole = response.isclosed() and not response.will_close
            return _outcome(response, answer)
        finally:
            watch.cancel()
            if not is_whole:
                self._drop()

    def _connected(self, timeout_s: float) -> _Connection:
        connection = self._connection
        if connection is None:
            connection = self._connection = self._new(timeout_s)
            connection.connect()
            if self._is_cut:  # while there was no socket to shut down
                raise TimeoutError("no connection in time")
        elif connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        return connection

    def _new(self, timeout_s: float) -> _Connection:
        to = self._destination
        if self._proxy is None:
            return _Connection(to.host, to.port, timeout_s, self._context, to.host)
        connection = _Connection(self._proxy.host, self._proxy.port, timeout_s, self._context, to.host)
        if to.is_tls:
            connection.set_tunnel(to.host, to.port, headers=dict(self._proxy.headers))
        return connection

    def _target(self) -> str:
        """Return what stands in the first line of a request: a proxy without a tunnel needs the whole
        address.
        """
        to = self._destination
        return to.url if self._proxy is not None and not to.is_tls else to.path

    def _cut(self) -> None:
        """End what the connection waits for, from any thread."""
        self._is_cut = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                # Not the method of an SSLSocket, which changes what the other thread is using.
                socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()


class _Connection(http.client.HTTPConnection):
    """A connection whose socket is known from before TLS's handshake, so that it can be ended then, too."""

    def __init__(
        self, host: str, port: int, timeout_s: float, context: ssl.SSLContext | None, server_name: str
    ) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._tls, self._server_name = context, server_name

    def connect(self) -> None:
        super().connect()
        if self._tls is not None:
            wrapped = self._tls.wrap_socket(
                self.sock, server_hostname=self._server_name, do_handshake_on_connect=False
            )
            self.sock = wrapped
            wrapped.do_handshake()


class _Proxy:
    """A proxy that the environment names for this collector."""

    def __init__(self, parts: SplitResult) -> None:
        self.host, self.port = parts.hostname or "", parts.port or 80
        self.headers: Mapping[str, str] = {}
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self.headers = {"proxy-authorization": "Basic " + base64.b64encode(pair.encode()).decode()}


def _proxy(destination: Destination) -> _Proxy | None:
    host = destination.host
    text = urllib.request.getproxies().get("https" if destination.is_tls else "http")
    if not text or is_loopback(host) or urllib.request.proxy_bypass(f"{host}:{destination.port}"):
        return None
    return _Proxy(urlsplit(text if "://" in text else f"http://{text}"))


def _outcome(response: http.client.HTTPResponse, answer: bytes) -> Taken | Failed:
    """Say what came of it: by OTLP's rules any 2xx is a success, and a redirect is none."""
    if 200 <= response.status < 300:
        return Taken(answer)
    why = f"HTTP {response.status} {quoted(response.reason)}".rstrip()
    after_s = _retry_after_of_header(response.headers.get("retry-after"))
    return Failed(why, response.status in _RETRYABLE_STATUSES, after_s)


def _retry_after_of_header(text: str | None) -> float | None:
    """Read the seconds of a Retry-After header, whatever the collector has put there."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError, OSError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _failure_of_exchange(error: Exception) -> Failed:
    is_untrusted = isinstance(error, ssl.SSLCertVerificationError)
    return Failed(f"{type(error).__name__} {quoted(str(error))}", may_retry=not is_untrusted)


_FIRST_PAUSE_S = 1.0
_MOST_SILENCE_S = 30.0
"""How long a collector that asks for more time than a batch has is left alone, at most."""


class Sender:
    """Sends the batches of one thread. Every wait in it can be ended by another."""

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        """`timeout_s` is how long one batch may take, with all attempts."""
        self._transport = transport
        self._timeout_s = timeout_s
        self._hurried = threading.Event()
        self._end_s = float("inf")
        self._silent_until_s = 0.0

    def send(self, batch: bytes) -> Taken | Failed:
        """Send a batch. Raises nothing."""
        self._hurried.wait(max(0.0, self._silent_until_s - time.monotonic()))
        until_s = time.monotonic() + self._timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            left_s = min(until_s, self._end_s) - time.monotonic()
            if left_s <= 0:
                return Failed("no time is left")
            is_last = self._hurried.is_set()
            answer = self._transport.attempt(batch, left_s)
            if isinstance(answer, Taken) or not answer.may_retry or is_last:
                return answer
            wait_s = answer.retry_after_s
            if wait_s is None:
                wait_s = pause_s * random.uniform(0.8, 1.2)  # so that not all servers come back at once
            if time.monotonic() + wait_s >= until_s:
                if answer.retry_after_s is not None:
                    self._silent_until_s = time.monotonic() + min(wait_s, _MOST_SILENCE_S)
                return answer
            self._hurried.wait(wait_s)
            pause_s *= 2

    def hurry(self, within_s: float) -> None:
        """Wait for nothing from now on, try each batch once more, and end the last attempt within this time.
        From any thread.
        """
        self._end_s = time.monotonic() + within_s
        self._hurried.set()

    def close(self) -> None:
        """End for good, also an attempt that is under way. From any thread."""
        self.hurry(0.0)
        self._transport.close()


def sender_to(destination: Destination) -> Sender:
    """Make a sender to this collector. Raises ConfigError for a bad certificate."""
    transport = GrpcTransport(destination) if destination.protocol == "grpc" else HttpTransport(destination)
    return Sender(transport, destination.timeout_s)
