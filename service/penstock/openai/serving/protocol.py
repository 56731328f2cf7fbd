"""uvicorn's HTTP/1.1, with bounds on what a peer may send and on how long it may take.

The connection bounds how large and how slow headers, trailers and bodies may be, and how long a reply may
wait to be taken. A sweep twice a second looks at all connections, so there is no timer for a request or an
event. A stream that is not taken waits, its RPC waits with it, and nothing gathers in between. uvicorn marks
only the newest request of a connection as disconnected; this protocol marks the one that runs.

A peer that closes its side of the connection counts as gone, as in uvicorn. It may only have closed the side
that it writes to, but TCP tells the two apart no sooner than the server writes, which for a reply that is no
stream is at its end: to wait for that would let every request of a client that has gone run to its end.
"""

from __future__ import annotations

import asyncio
import enum
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, cast

import httptools
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.openai.counts import Meters
from penstock.openai.failures import INVALID, ApiError, error_response
from penstock.shared.addresses import counted_address

DRAIN_BYTES_PER_S: Final = 64 << 10
"""The least that a client must take of a large reply, in bytes per second, once its time is over."""
MOST_PIPELINED: Final = 8
"""How many requests of a connection may wait for an earlier one of it."""
_HEADER_BYTES: Final = len(b": \r\n")
_HOST: Final = re.compile(
    rb"(\[[\w.~!$&'()*+,;=:%-]+\]|([\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(:[0-9]*)?", re.ASCII
)
"""What the header Host may hold (RFC 9112, 3.2): a name, which may be empty, or an address, and a port."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of one worker. Times are in seconds."""

    max_connections: int
    max_connections_per_address: int
    max_header_bytes: int
    header_timeout_s: float
    stall_limit_s: float


@dataclass(frozen=True, slots=True)
class Connections:
    """The open connections of one worker."""

    bounds: Bounds
    meters: Meters
    state: ServerState = field(default_factory=ServerState)
    by_address: Counter[str] = field(default_factory=Counter)

    @property
    def protocols(self) -> list[BoundedProtocol]:
        """One for each connection."""
        return cast("list[BoundedProtocol]", list(self.state.connections))

    def sweep(self) -> None:
        """Close the connections whose time is over."""
        now = time.monotonic()
        for protocol in self.protocols:
            protocol.check(now)


class _Phase(enum.Enum):
    """Where in the peer's requests the parser stands."""

    HEAD = enum.auto()
    BODY = enum.auto()
    BETWEEN = enum.auto()
    """After a request, before the next one's first byte."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, config: Config, connections: Connections) -> None:
        super().__init__(config, connections.state, {}, asyncio.get_running_loop())
        self._all = connections
        self._address = ""
        self._phase = _Phase.HEAD
        self._head_since = time.monotonic()
        self._head_bytes = 0
        """How many bytes of the head have come; within a body, how many since the last of them that were its
        own.
        """
        self._trailer_bytes = 0
        self._answering: RequestResponseCycle | None = None
        """The request that runs, or ran last. uvicorn's `cycle` is the newest, which may wait for it."""
        self._is_refused = False
        self._offers_other = False
        """Whether the request that is being read offers to go on in another protocol."""
        self._must_read_by: float | None = None
        """Until when the peer must have taken what waits for it; None while nothing does."""
        self._must_send_by: float | None = None
        """Until when the rest of a body may come that nobody reads, because its reply has been sent."""

    def check(self, now: float) -> None:
        """Close the connection if the peer's time is over. Called every now and then."""
        if self._must_read_by is not None and now > self._must_read_by:
            self._all.meters.closed_connections.labels("stalled_reader").inc()
            self.transport.abort()
        elif self._must_send_by is not None and now > self._must_send_by:
            self._all.meters.closed_connections.labels("unread_body").inc()
            self.transport.abort()
        elif self._phase is _Phase.HEAD and now > self._head_since + self._all.bounds.header_timeout_s:
            self._refuse(408, "the headers of the request took too long", "header_timeout")

    def stop_keeping(self) -> None:
        """Close the connection after the request that runs; one without a request may still send one."""
        if self._answering is not None:
            self._answering.keep_alive = False

    @property
    def _is_answering(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer with an error without asking the app, and close the connection."""
        if self._is_refused:
            return
        self._is_refused = True
        self._all.meters.closed_connections.labels(code).inc()
        if self._is_answering:
            self.transport.abort()  # an earlier request is being answered, and its reply must not be mixed up
            return
        if status == 503:
            error = ApiError(status, message, "server_error", None, code, retry_after=1.0)
        else:
            error = ApiError(status, message, INVALID, None, code)
        reply = error_response(error)
        headers = b"".join(name + b": " + value + b"\r\n" for name, value in reply.raw_headers)
        line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
        self.transport.write(line + headers + b"connection: close\r\n\r\n" + bytes(reply.body))
        self.transport.close()

    # -- asyncio's --

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = counted_address(self.client[0] if self.client else "")
        self._all.by_address[self._address] += 1
        self._all.meters.connections.inc()
        bounds = self._all.bounds
        if len(self.connections) > bounds.max_connections:
            self._refuse(503, "too many connections", "too_many_connections")
        elif self._address and self._all.by_address[self._address] > bounds.max_connections_per_address:
            self._refuse(503, "too many connections from your address", "too_many_connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.by_address[self._address] -= 1
        if not self._all.by_address[self._address]:
            del self._all.by_address[self._address]
        self._all.meters.connections.dec()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._phase is _Phase.BETWEEN:
            self._begin_head()
        self._head_bytes += len(data)
        self._parse(data)
        if self._phase is not _Phase.BETWEEN and self._head_bytes > self._all.bounds.max_header_bytes:
            self._refuse_head()

    def pause_writing(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        allowed_s = self._all.bounds.stall_limit_s + waiting / DRAIN_BYTES_PER_S
        self._must_read_by = time.monotonic() + allowed_s
        super().pause_writing()

    def resume_writing(self) -> None:
        self._must_read_by = None
        super().resume_writing()

    # -- the parser's --

    def _parse(self, data: bytes) -> None:
        """Parse what has come. A request that offers another protocol, as Java's HttpClient offers HTTP/2, is
        parsed again without the offer, which nobody here takes: the parser stops at the end of its headers,
        and its body would be lost.
        """
        self._unset_keepalive_if_required()
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as stopped:
                    if not self._offers_other:  # CONNECT; what follows is for somebody else
                        self.cycle.keep_alive = False
                        return
                    data = self._head_without_offer() + data[stopped.args[0] :]
        except httptools.HttpParserError:
            self.send_400_response("")

    def _head_without_offer(self) -> bytes:
        first = b" ".join(
            (self.parser.get_method(), self.url, b"HTTP/" + self.parser.get_http_version().encode())
        )
        lines = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join((first, *lines, b"", b""))

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not HTTP/1.1", "invalid_http")

    def on_message_begin(self) -> None:
        if self._phase is _Phase.BETWEEN:
            self._begin_head()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is _Phase.BODY:  # a trailer, for which nobody has a use
            self._trailer_bytes += len(name) + len(value) + _HEADER_BYTES
            if self._trailer_bytes > self._all.bounds.max_header_bytes:
                self._refuse_head()
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._offers_other = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._offers_other:
            return
        self._phase = _Phase.BODY
        self._head_bytes = self._trailer_bytes = 0
        if self._is_answering and len(self.pipeline) >= MOST_PIPELINED:
            self._refuse(400, "too many requests wait for an earlier one", "pipelining")
        size = len(self.url) + sum(len(name) + len(value) + _HEADER_BYTES for name, value in self.headers)
        if size > self._all.bounds.max_header_bytes:
            self._refuse_head()
        self._check_host()
        self._check_transfer_coding()
        if not self._is_refused:
            super().on_headers_complete()

    def _check_host(self) -> None:
        """Refuse what RFC 9112, 3.2 wants refused. HTTP/1.0 has no need of a host."""
        hosts = self._values(b"host")
        is_missing = not hosts and self.parser.get_http_version() == "1.1"
        if is_missing or len(hosts) > 1 or not all(map(_HOST.fullmatch, hosts)):
            self._refuse(400, "a request has one header Host, with a name or an address", "invalid_http")

    def _check_transfer_coding(self) -> None:
        """Refuse a body of which nobody can tell where it ends, or that is coded in a way that nobody here
        reads (RFC 9112, 6.1). The parser refuses the first too, but only when the request runs already.
        """
        codings = b",".join(self._values(b"transfer-encoding")).lower()
        if codings in (b"", b"chunked"):
            return
        if codings.rpartition(b",")[2].strip() != b"chunked":
            self._refuse(400, "the last Transfer-Encoding of a request must be chunked", "invalid_http")
        else:
            message = "the only Transfer-Encoding that is read is chunked"
            self._refuse(501, message, "unsupported_transfer_encoding")

    def _values(self, name: bytes) -> list[bytes]:
        """Return the values of all headers of this name, which is in lower case."""
        return [value.strip() for found, value in self.headers if found == name]

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers_other:
            return
        self._phase = _Phase.BETWEEN
        self._must_send_by = None
        if not self._is_refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the end of the request after its reply, which may be written before the request's body has
        come: an error does not wait for that. The rest is dropped, but not for ever, and not cut off at once:
        the client would lose the reply.
        """
        if self._phase is _Phase.BODY:
            self._must_send_by = time.monotonic() + self._all.bounds.header_timeout_s
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(
            cycle, app if cycle.scope["http_version"] != "1.0" else _unchunked(app, cycle)
        )

    def _begin_head(self) -> None:
        self._phase = _Phase.HEAD
        self._head_since = time.monotonic()
        self._head_bytes = 0

    def _refuse_head(self) -> None:
        most = self._all.bounds.max_header_bytes
        self._refuse(431, f"the headers of a request may have at most {most} bytes", "headers_too_large")


def _unchunked(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """Wrap the app for a peer that speaks HTTP/1.0, which has no chunks: a reply ends with the connection."""

    async def serve(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def send_plain(message: ASGISendEvent) -> None:
            cycle.chunked_encoding = False
            if message["type"] == "http.response.body":
                cycle.expected_content_length = len(message.get("body", b""))  # what uvicorn lets pass next
            await send(message)

        await app(scope, receive, send_plain)

    return serve
