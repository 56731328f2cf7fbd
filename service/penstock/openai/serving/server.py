"""Listens on a socket, and ends without cutting off what runs.

A drain is no disconnect. The socket stays open until the last request has ended; who comes meanwhile is told
503, and so is `/health`. Requests that outlast the grace end with an error that says so, also in the middle
of a stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from email.utils import formatdate
from socket import socket
from typing import Final

from uvicorn.config import Config

from penstock.openai.app import ENDPOINTS, create_app
from penstock.openai.endpoints import Endpoint
from penstock.openai.front import Front
from penstock.openai.serving.protocol import BoundedProtocol, Bounds, Connections
from penstock.openai.serving.tls import Certificate
from penstock.openai.settings import Settings

SWEEP_S: Final = 0.5
"""How often connections are looked at, in seconds."""
CLOSE_S: Final = 5.0
"""How long the connections have to close after the last request, in seconds."""
_BACKLOG: Final = 2048


class HttpServer:
    """Serves one front at one listening socket, on the running event loop."""

    def __init__(self, front: Front, endpoints: Sequence[Endpoint] = ENDPOINTS) -> None:
        self._front = front
        self._config = Config(
            create_app(front, endpoints),
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

    async def start(self, listening: socket, certificate: Certificate | None = None) -> None:
        """Accept connections of this socket, which the server closes at its end."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: BoundedProtocol(self._config, self._connections),
            sock=listening,
            ssl=None if certificate is None else certificate.context,
            ssl_handshake_timeout=None if certificate is None else self._front.settings.header_timeout_s,
            backlog=_BACKLOG,
        )
        self._sweeping = asyncio.create_task(self._sweep(certificate))

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, let those that run go on for at most `grace_s` seconds, and close all
        connections.

        The socket stays open meanwhile: callers and load balancers that come then are told where they stand.
        """
        for protocol in self._connections.protocols:
            protocol.stop_keeping()
        await self._front.life.drain(grace_s)
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
    """The bounds of each worker: an equal share of those of all."""
    return Bounds(
        max_connections=-(-settings.max_connections // settings.workers),
        max_connections_per_address=-(-settings.max_connections_per_address // settings.workers),
        max_header_bytes=settings.max_header_bytes,
        header_timeout_s=settings.header_timeout_s,
        stall_limit_s=settings.stall_limit_s,
    )
