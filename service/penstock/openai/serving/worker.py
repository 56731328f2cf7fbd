"""One worker: it serves the listening socket until it is told to stop, and ends without cutting off what
runs.

As a program it is one of several workers. It gets the socket and a pipe by the numbers of their descriptors,
and its settings on stdin; it says on the pipe that it serves, and ends when stdin does, because its parent is
gone then.

A drain is no disconnect. The socket stays open until the last request has ended; who comes meanwhile is told
503, and so is `/health`. Requests that outlast the grace end with an error that says so, also in the middle
of a stream.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from email.utils import formatdate
from typing import Final

import uvloop
from uvicorn.config import Config

from penstock.openai.app import ENDPOINTS, create_app
from penstock.openai.batches.runner import BatchRunner, opened_folder
from penstock.openai.endpoints import Endpoint
from penstock.openai.front import Front
from penstock.openai.serving.logs import open_logs
from penstock.openai.serving.protocol import BoundedProtocol, Bounds, Connections
from penstock.openai.serving.tls import Certificate, certificate_of
from penstock.openai.settings import Settings, SettingsError

SWEEP_S: Final = 0.5
"""How often connections are looked at, in seconds."""
CLOSE_S: Final = 5.0
"""How long the connections have to close after the last request, in seconds."""
_BACKLOG: Final = 2048


class HttpServer:
    """Serves one front at one listening socket, on the running event loop."""

    def __init__(self, front: Front, endpoints: Sequence[Endpoint] = ENDPOINTS) -> None:
        """Raise SettingsError for a folder of files that cannot be used."""
        self._front = front
        folder = opened_folder(front.settings)
        self._batches = None if folder is None else BatchRunner(folder, front.backend, front.settings)
        self._app = create_app(front, endpoints, self._batches)
        self._config = Config(
            self._app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=int(front.settings.keep_alive_s),
        )
        self._config.load()
        self._connections = Connections(bounds_of(front.settings), front.meters)
        self._server: asyncio.Server | None = None
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self, listening: socket.socket, certificate: Certificate | None = None) -> None:
        """Accept connections of this socket, which the server closes at its end."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: BoundedProtocol(self._config, self._connections),
            sock=listening,
            ssl=None if certificate is None else certificate.context,
            ssl_handshake_timeout=None if certificate is None else self._front.settings.header_timeout_s,
            backlog=_BACKLOG,
        )
        self._sweeping = asyncio.create_task(self._sweep(certificate))
        if self._batches is not None:
            self._batches.start(self._app)

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, let those that run go on for at most `grace_s` seconds, and close all
        connections.

        The socket stays open meanwhile: callers and load balancers that come then are told where they stand.
        Batches stop at once, because they go on when a front starts again.
        """
        for protocol in self._connections.protocols:
            protocol.stop_keeping()
        draining = [self._front.life.drain(grace_s)]
        if self._batches is not None:
            draining.append(self._batches.stop())
        await asyncio.gather(*draining)
        if self._server is not None:
            self._server.close()
        for protocol in self._connections.protocols:
            protocol.shutdown()
        try:
            async with asyncio.timeout(CLOSE_S):
                while self._connections.protocols or self._connections.state.tasks:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except TimeoutError:
            for protocol in self._connections.protocols:
                protocol.transport.abort()
            await _cancelled(list(self._connections.state.tasks))
        if self._sweeping is not None:
            await _cancelled([self._sweeping])
        if self._batches is not None:
            self._batches.folder.close()

    async def _sweep(self, certificate: Certificate | None) -> None:
        while True:
            if certificate is not None:
                certificate.refresh()
            date = formatdate(time.time(), usegmt=True).encode()
            self._connections.state.default_headers = [(b"date", date)]
            self._connections.sweep()
            await asyncio.sleep(SWEEP_S)


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def bounds_of(settings: Settings) -> Bounds:
    """Compute the bounds of each worker: an equal share of those of all."""
    return Bounds(
        max_connections=-(-settings.max_connections // settings.workers),
        max_connections_per_address=-(-settings.max_connections_per_address // settings.workers),
        max_header_bytes=settings.max_header_bytes,
        header_timeout_s=settings.header_timeout_s,
        stall_limit_s=settings.stall_limit_s,
    )


log = logging.getLogger("penstock.openai")

READY: Final = b"ready\n"
_FILES_FOR_OTHERS: Final = 128


def run_worker(
    settings: Settings, listening: socket.socket, on_ready: Callable[[], None], parent: int | None = None
) -> None:
    """Serve until SIGTERM or SIGINT. Raises ValueError for settings that cannot be honoured. With a `parent`,
    which is a descriptor that ends with it, SIGINT is left to the parent, whose end counts as a signal.
    """
    _raise_limit(settings.max_connections + _FILES_FOR_OTHERS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, listening, on_ready, parent))


async def _serve(
    settings: Settings, listening: socket.socket, on_ready: Callable[[], None], parent: int | None
) -> None:
    told_to_stop = asyncio.Event()
    _on_signals(told_to_stop)
    if parent is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which sends it to the parent, too
        _on_end(parent, told_to_stop)
    certificate = certificate_of(settings)
    front = Front.made(settings)
    server = HttpServer(front)
    try:
        await server.start(listening, certificate)
        on_ready()
        await told_to_stop.wait()
        log.info("stopping: no new requests; running ones have %g s", settings.grace_s)
        await server.stop(settings.grace_s)
    finally:
        await front.close()


def _on_signals(told_to_stop: asyncio.Event) -> None:
    """Let the first SIGTERM or SIGINT ask to stop, and the second end the process."""

    def stop(number: int) -> None:
        if told_to_stop.is_set():
            log.warning("second signal: ending at once")
            logging.shutdown()
            os._exit(128 + number)
        told_to_stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)


def _on_end(parent: int, told_to_stop: asyncio.Event) -> None:
    """Let the end of the parent ask to stop."""
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(parent)
        told_to_stop.set()

    loop.add_reader(parent, ended)


def _raise_limit(wanted: int) -> None:
    """Raise the limit on open files to what the connections may need, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def main() -> None:
    """Run as one of several workers; the arguments are the numbers of the socket's and the pipe's
    descriptors.
    """
    settings: Settings = pickle.load(sys.stdin.buffer)
    listening, pipe = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    open_logs(settings.log_format)

    def tell() -> None:
        os.write(pipe, READY)
        os.close(pipe)

    try:
        run_worker(settings, listening, tell, parent=sys.stdin.fileno())
    except SettingsError as error:  # of a store that cannot be used
        log.error("%s", error)
        sys.exit(2)


if __name__ == "__main__":
    main()
