"""Sends batches over HTTP, as http/protobuf.

Python's own client is used, because it lets another thread end an attempt: by shutting the socket down. The
time of a socket's operation says nothing about that of an answer which comes byte by byte.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import gzip
import http.client
import math
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from urllib.parse import SplitResult, unquote, urlsplit

from penstock.service.listening.listen_options import is_loopback
from penstock.service.telemetry.otlp.destination import Destination
from penstock.service.telemetry.otlp.transport import MOST_ANSWER_BYTES, Failed, Taken, quoted

_RETRYABLE = frozenset({429, 502, 503, 504})
_LOST = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)
"""How an idle connection looks that the collector has closed meanwhile."""

_CUT_S = 0.5
"""How long an attempt may take to notice that its socket was shut down."""


class HttpTransport:
    """A connection to one collector, which is kept between batches."""

    def __init__(self, destination: Destination) -> None:
        """Connects at the first batch. Raises ConfigError for a bad certificate."""
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
                    return _failed(error)
            except (OSError, http.client.HTTPException, ValueError) as error:
                return _failed(error)
            try:
                return self._post(body, max(0.001, until - time.monotonic()))
            except (OSError, http.client.HTTPException, ValueError) as error:
                return _failed(error)

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
        """What stands in the first line of a request: a proxy without a tunnel needs the whole address."""
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
    """By OTLP's rules any 2xx is a success, and a redirect is none."""
    if 200 <= response.status < 300:
        return Taken(answer)
    why = f"HTTP {response.status} {quoted(response.reason)}".rstrip()
    after_s = _retry_after_s(response.headers.get("retry-after"))
    return Failed(why, response.status in _RETRYABLE, after_s)


def _retry_after_s(text: str | None) -> float | None:
    """The seconds of a Retry-After header, whatever the collector has put there."""
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


def _failed(error: Exception) -> Failed:
    is_untrusted = isinstance(error, ssl.SSLCertVerificationError)
    return Failed(f"{type(error).__name__} {quoted(str(error))}", may_retry=not is_untrusted)
