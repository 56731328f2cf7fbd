"""The port for Prometheus: plain HTTP, one page, on a thread and an event loop of its own.

Whoever can connect to the `Endpoint` may be slow, hostile or many, and must not hold up what serves the
model. So a connection is closed after its one reply and after a few seconds at the latest, few are open at a
time, few are accepted per second, and a newcomer takes the place of the oldest one that has had its time.

`Pages` writes the page that scrapers read, in Prometheus' text format or in OpenMetrics, which has exemplars.
Writing the page takes five to ten milliseconds of Python. So it gives way to the other threads after each
metric family, and a page is served again to whoever asks within KEEP_S: however many scrapers there are, and
however often they ask, writing pages takes a bounded share of the time.

`parsed` reads the head of an HTTP request, and `reply` writes replies. Requests with bodies are not needed
here.

Scraping as fast as possible did not show in the latency of 64 streams of the demo model, as far as a busy
machine can tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client import exposition as text
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics

from penstock.runtime.errors import ConfigError
from penstock.service.listening.listen_options import tcp_address

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 8192
END_OF_HEAD = b"\r\n\r\n"


class BadHead(Exception):
    """A head that is no HTTP/1 request. Its text is one of ours, and quotes nothing."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request."""

    method: str
    target: str
    headers: Mapping[str, str]
    """By their names in lower case. Values of a name that comes several times are joined by commas."""


def parsed(data: bytes) -> Head:
    """Parse the head of these bytes, which end with END_OF_HEAD. Raises BadHead."""
    first, *lines = data.removesuffix(END_OF_HEAD).decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.0", "HTTP/1.1"):
        raise BadHead("this is no HTTP/1 request")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise BadHead("a header of the request has no name")
        name, value = name.lower(), value.strip()
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    return Head(words[0], words[1], headers)


def reply(
    status: HTTPStatus,
    body: bytes,
    content_type: str = "text/plain; charset=utf-8",
    *,
    headers: Mapping[str, str] | None = None,
    with_body: bool = True,
) -> bytes:
    """Write a whole reply, after which the connection is closed. Without `with_body` it is that to HEAD."""
    lines = {
        "Content-Type": content_type,
        "Content-Length": str(len(body)),
        "Connection": "close",
        "X-Content-Type-Options": "nosniff",
        **(headers or {}),
    }
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return head.encode("latin-1") + b"\r\n" + (body if with_body else b"")


KEEP_S = 0.25
"""For how long a page is served again, in seconds."""
GIVE_WAY_S = 0.0001
"""How long the writer sleeps after each family, in seconds, so that another thread gets the interpreter."""
OPENMETRICS = "application/openmetrics-text"
_TEXTS = ("text/plain", "text/*", "*/*")


@dataclass(frozen=True, slots=True)
class Page:
    """What is sent to a scraper."""

    content_type: str
    body: bytes
    is_gzip: bool = False


class Pages:
    """Makes pages. Used on one thread."""

    def __init__(
        self,
        families: Callable[[], Iterable[Family]],
        *,
        keep_s: float = KEEP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`families` is asked for each page, and may raise. Metrics of the process are added to its own."""
        self._families = families
        self._keep_s = keep_s
        self._clock = clock
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        GCCollector(registry=self._process)
        self._kept: dict[bool, tuple[float, Page]] = {}
        """When each form was written, and what it is; by whether it is OpenMetrics."""
        self._zipped: dict[bool, Page] = {}

    def page(self, accept: str, accept_encoding: str) -> Page:
        """Write the page in the form that these headers of a request prefer. Raises what `families`
        raises.
        """
        is_openmetrics = prefers_openmetrics(accept)
        made_s, page = self._kept.get(is_openmetrics, (0.0, None))
        if page is None or self._clock() >= made_s + self._keep_s:
            page = self._write(is_openmetrics)
            self._kept[is_openmetrics] = self._clock(), page
            self._zipped.pop(is_openmetrics, None)
        if not _accepts_gzip(accept_encoding):
            return page
        if is_openmetrics not in self._zipped:
            self._zipped[is_openmetrics] = _zipped(page)
        return self._zipped[is_openmetrics]

    def _write(self, is_openmetrics: bool) -> Page:
        if is_openmetrics:
            # No name needs UTF-8, but prometheus_client's default breaks names with a colon, as vLLM's are.
            write: Callable[..., bytes] = openmetrics.generate_latest
            return Page(openmetrics.CONTENT_TYPE_LATEST, write(self, escaping=openmetrics.ALLOWUTF8))
        return Page(text.CONTENT_TYPE_PLAIN_0_0_4, text.generate_latest(self))

    def collect(self) -> Iterator[Family]:
        """Yield all families, for prometheus_client."""
        for family in self._families():
            yield family
            time.sleep(GIVE_WAY_S)
        yield from self._process.collect()


def _zipped(page: Page) -> Page:
    return Page(page.content_type, gzip.compress(page.body, compresslevel=1), is_gzip=True)


def prefers_openmetrics(accept: str) -> bool:
    """Say whether an Accept header weighs OpenMetrics at least as much as plain text."""
    weights = {name: weight for name, weight in _weights(accept) if weight > 0}
    plain = max((weights.get(name, 0.0) for name in _TEXTS), default=0.0)
    return OPENMETRICS in weights and weights[OPENMETRICS] >= plain


def _accepts_gzip(accept_encoding: str) -> bool:
    return any(name == "gzip" and weight > 0 for name, weight in _weights(accept_encoding))


def _weights(header: str) -> Iterator[tuple[str, float]]:
    """Yield the names in a header such as "text/plain;version=0.0.4;q=0.5, */*;q=0.1", each with its weight.
    The weight of a name that stands there twice is that of its heaviest.
    """
    found: dict[str, float] = {}
    for part in header.lower().split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        weight = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "q":
                weight = _number(value)
        found[name] = max(weight, found.get(name, 0.0))
    yield from found.items()


def _number(value: str) -> float:
    """Read a weight, from 0 to 1. What is none counts as 0, so that it is not chosen."""
    try:
        number = float(value)
    except ValueError:
        return 0.0
    return number if 0 <= number <= 1 else 0.0


PATH = "/metrics"
MOST_CONNECTIONS = 8
"""How many connections may be open at a time."""
PATIENCE_S = 1.0
"""A connection that has been open for this long gives its place to a new one, if all are taken."""
CONNECTION_S = 10.0
"""After this many seconds a connection is closed, whatever its state."""
HEAD_S = 5.0
"""Seconds that a request may take to arrive."""
LINGER_S = 0.5
"""Seconds that a peer may take to close after the reply."""
PACE_S = 0.005
"""Seconds between two connections that are accepted: at most 200 a second. The others wait in the kernel."""
AGAIN_S = 1.0
"""Seconds until it is tried again to accept a connection, if the system refuses."""
_BACKLOG = 64
_RECEIVE_BYTES = 4096
_STOP_S = 5.0


class Endpoint:
    """Serves pages at one port."""

    def __init__(self, host: str, port: int, pages: Pages) -> None:
        """Take the port; 0 lets the system choose one. Raises ConfigError if it cannot be had."""
        self._pages = pages
        self._host = host
        self._socket = _listening(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="penstock-metrics", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun = threading.Event()
        self._stopped = asyncio.Event()
        self._open: dict[asyncio.Task[None], float] = {}
        """The connections and when each began, the oldest first."""
        self._is_failing = False
        """Whether the last page could not be written."""
        self._cannot_accept = False

    @property
    def address(self) -> str:
        """The host and port, as in an URL."""
        return tcp_address(self._host, self.port)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()
        self._begun.wait()

    def stop(self) -> None:
        """Close the port and all connections. May be called twice, and without `start`."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it was stopped before
                self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(_STOP_S)
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        accepting = asyncio.create_task(self._accept())
        stopping = asyncio.create_task(self._stopped.wait())
        self._begun.set()
        await asyncio.wait((accepting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if accepting.done():
            log.error("the port for metrics is lost; this is a bug", exc_info=accepting.exception())
        tasks = [accepting, stopping, *self._open]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await _readable(self._socket)
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:  # its peer has given up
                continue
            except OSError as error:  # such as too many open files
                if not self._cannot_accept:
                    log.warning("cannot accept connections for metrics: %s; trying on", error)
                self._cannot_accept = True
                await asyncio.sleep(AGAIN_S)
                continue
            self._cannot_accept = False
            connection.setblocking(False)
            if self._has_place():
                task = asyncio.create_task(self._handle(connection))
                self._open[task] = loop.time()
                task.add_done_callback(partial(self._closed, connection))
            else:
                _refuse(connection)
            await asyncio.sleep(PACE_S)

    def _has_place(self) -> bool:
        """Say whether there is a place for one connection more; the oldest may have to go for it."""
        if len(self._open) < MOST_CONNECTIONS:
            return True
        oldest, begun = next(iter(self._open.items()))
        if asyncio.get_running_loop().time() - begun < PATIENCE_S:
            return False
        oldest.cancel()
        del self._open[oldest]
        return True

    def _closed(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        connection.close()  # also if the task was cancelled before it began
        self._open.pop(task, None)

    async def _handle(self, connection: socket.socket) -> None:
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(CONNECTION_S):
                answer = await self._answer(connection)
                await asyncio.get_running_loop().sock_sendall(connection, answer)
                await _linger(connection)

    async def _answer(self, connection: socket.socket) -> bytes:
        try:
            async with asyncio.timeout(HEAD_S):
                head = parsed(await _received_head(connection))
        except BadHead as error:
            return _error(HTTPStatus.BAD_REQUEST, str(error))
        return self.answer(head)

    def answer(self, head: Head) -> bytes:
        """Make the whole reply to a request."""
        path, question, _ = head.target.partition("?")
        if path != PATH:
            return _error(HTTPStatus.NOT_FOUND, f"there is only {PATH} here")
        if head.method not in ("GET", "HEAD"):
            return _error(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are served", Allow="GET, HEAD")
        if question:
            return _error(HTTPStatus.BAD_REQUEST, f"{PATH} has no parameters")
        try:
            page = self._pages.page(head.headers.get("accept", ""), head.headers.get("accept-encoding", ""))
        except Exception:  # a defect of one instrument: the port must go on answering
            if not self._is_failing:
                log.exception("metrics could not be read; this is told once until they can be read again")
            self._is_failing = True
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR, "metrics could not be read; the log says why")
        self._is_failing = False
        headers = {"Vary": "Accept, Accept-Encoding", "Cache-Control": "no-store"}
        if page.is_gzip:
            headers["Content-Encoding"] = "gzip"
        return reply(
            HTTPStatus.OK,
            page.body,
            page.content_type,
            headers=headers,
            with_body=head.method == "GET",
        )


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        where = tcp_address(host, port)
        raise ConfigError(
            f"cannot listen on {where}: {error.strerror}; "
            "choose another with --metrics-port, or 0 for any free one"
        ) from error
    made.setblocking(False)
    return made


async def _readable(listening: socket.socket) -> None:
    """Wait until there is a connection to accept. The caller accepts it, and not asyncio, which would lose
    one that comes just when the task is cancelled.
    """
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listening, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(listening)


async def _received_head(connection: socket.socket) -> bytes:
    """Receive the bytes up to the end of a request's head. Raises BadHead if there is none, or if it is too
    long.
    """
    loop, data, end = asyncio.get_running_loop(), b"", -1
    while end < 0:
        received = await loop.sock_recv(connection, _RECEIVE_BYTES)
        if not received:
            raise BadHead("the request ends within its head")
        data += received
        end = data.find(END_OF_HEAD)
        if (len(data) if end < 0 else end) > MAX_HEAD_BYTES:
            raise BadHead(f"the head of the request has more than {MAX_HEAD_BYTES} bytes")
    return data[: end + len(END_OF_HEAD)]


async def _linger(connection: socket.socket) -> None:
    """Wait a moment for the peer to close: if a socket is closed while a part of the request, such as a body,
    was not read, the system resets the connection, and the peer may lose the reply.
    """
    connection.shutdown(socket.SHUT_WR)
    async with asyncio.timeout(LINGER_S):
        while await asyncio.get_running_loop().sock_recv(connection, _RECEIVE_BYTES):
            pass


def _refuse(connection: socket.socket) -> None:
    """Answer without waiting for anything, and close."""
    answer = _error(
        HTTPStatus.SERVICE_UNAVAILABLE, "too many connections ask for metrics", **{"Retry-After": "1"}
    )
    with connection, contextlib.suppress(OSError):
        connection.send(answer)
        connection.shutdown(socket.SHUT_WR)


def _error(status: HTTPStatus, text: str, **headers: str) -> bytes:
    return reply(status, f"{text}\n".encode(), headers=headers)
