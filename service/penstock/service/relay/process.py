"""The program of a front process: `python -m penstock.service.relay.process FILE_DESCRIPTOR`.

The engine's process starts it, and gives it one end of a link as that file descriptor. It ends when the other
end is closed, which is also what happens when the engine's process dies; signals that end a server are meant
for the engine's process, which then tells its front processes to stop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from functools import partial

import grpc

from penstock.runtime.errors import ConfigError
from penstock.service.lifecycle.underway import Calls
from penstock.service.limits.bounds import FOR_OTHERS, MANY, connection_options, raise_limit
from penstock.service.listening.grpc_server import refusing_server
from penstock.service.listening.tls import Certificates
from penstock.service.relay.link import Kind, Line, Link, seconds_of
from penstock.service.relay.relay import Relay
from penstock.service.relay.settings import FrontSettings
from penstock.service.telemetry.logs import grpc_log


class _LinkHandler(logging.Handler):
    """Sends lines of the log to the engine's process. Lines may come from any thread."""

    def __init__(self, link: Link, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))  # the engine's process adds the rest
        self._link, self._loop = link, loop

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = Line(min(record.levelno, logging.CRITICAL), record.name, self.format(record))
            self._loop.call_soon_threadsafe(partial(self._link.send, Kind.LOG, 0, line.packed()))
        except Exception:  # noqa: BLE001 -- as logging's own handlers: a line must not end what it tells of
            self.handleError(record)


class Program:
    """One front process, from START to its end."""

    def __init__(self) -> None:
        self.link = Link(self._receive, self._lose)
        self._relay: Relay | None = None
        self._server: grpc.aio.Server | None = None
        self._calls = Calls()
        self._tasks: set[asyncio.Task[None]] = set()

    def _receive(self, kind: int, call: int, payload: bytes) -> None:
        if kind == Kind.START:
            self._begin(self._start(FrontSettings.of(payload)))
        elif kind == Kind.STOP:
            self._begin(self._stop(seconds_of(payload)))
        elif kind == Kind.PING:
            self.link.send(Kind.PONG)
        elif self._relay is not None:
            self._relay.receive(kind, call, payload)

    def _lose(self) -> None:
        """Exit: the engine's process is gone, or wants no more of this one. Nothing is left to be done
        here.
        """
        os._exit(0)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the event loop itself keeps no reference to a task
        task.add_done_callback(self._tasks.discard)

    async def _start(self, settings: FrontSettings) -> None:
        logging.basicConfig(
            level=settings.log_level, handlers=[_LinkHandler(self.link, asyncio.get_running_loop())]
        )
        grpc_log.hush()
        raise_limit((settings.max_connections or MANY) + FOR_OTHERS)
        has_identity = settings.tls is not None and settings.tls.client_ca is not None
        relay = Relay(self.link, max_calls=settings.max_calls, tells_identity=has_identity)
        server = refusing_server(
            relay.refuse,
            interceptors=[self._calls],
            options=[*settings.options, *connection_options(settings.max_connections)],
        )
        for method, streaming in settings.methods.items():
            service, _, name = method.removeprefix("/").rpartition("/")
            server.add_registered_method_handlers(service, {name: relay.handler(method, streaming=streaming)})
        try:
            if settings.tls is None:
                server.add_insecure_port(settings.address)
            else:
                server.add_secure_port(settings.address, Certificates(settings.tls).credentials())
        except (ConfigError, RuntimeError) as error:
            self.link.send(Kind.REFUSED, 0, str(error).encode())
            return
        self._relay, self._server = relay, server
        await server.start()
        self.link.send(Kind.LISTENING)
        try:
            await server.wait_for_termination()
            await relay.until_idle()
        finally:  # it ends by STOP, or by an error of its own, after which this process is of no use
            self.link.close()

    async def _stop(self, grace_s: float) -> None:
        if self._server is None:
            self.link.close()
            return
        await self._calls.wait_settled()
        await self._server.stop(grace_s)


async def _run(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: Program().link, sock=connection)
    await asyncio.Event().wait()  # `Program` ends the process


def main() -> None:
    """Run until the link is closed."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(_run(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
