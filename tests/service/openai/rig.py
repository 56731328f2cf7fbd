"""The OpenAI front on a real socket, in front of a gRPC server on the fake engine, with clients of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from penstock.openai.app import ENDPOINTS
from penstock.openai.endpoints import Endpoint
from penstock.openai.front import Front
from penstock.openai.serving.worker import HttpServer
from penstock.openai.settings import Settings
from tests.service.rig import WAIT_S, Rig, serving


@dataclass
class FrontRig:
    """Everything that a test needs of a front."""

    url: str
    """Such as "http://127.0.0.1:41234"."""
    http: httpx.AsyncClient
    """Its requests go to paths such as "/v1/models"."""
    openai: openai.AsyncOpenAI
    """OpenAI's client. It does not try again by itself."""
    grpc: Rig
    """The gRPC server behind the front."""
    front: Front
    server: HttpServer

    @property
    def engine(self) -> Any:
        """The engine of the server, by default a fake one."""
        return self.grpc.engine

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, for peers that do not speak HTTP as they should."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)


def listening() -> socket.socket:
    """Make a socket that listens on a loopback port that the system chose."""
    made = socket.create_server(("127.0.0.1", 0))
    made.setblocking(False)
    return made


@contextlib.asynccontextmanager
async def fronting(
    addr: str, endpoints: Sequence[Endpoint] = ENDPOINTS, **settings: Any
) -> AsyncIterator[tuple[Front, HttpServer, str]]:
    """Run a front of a server that runs, and yield the front, what serves it, and its URL."""
    chosen: dict[str, Any] = {"addr": addr, "port": 0, "grace_s": 0.0}
    front = Front.made(Settings(**(chosen | settings)))
    server, found = HttpServer(front, endpoints), listening()
    url = f"http://127.0.0.1:{found.getsockname()[1]}"
    await server.start(found)
    try:
        yield front, server, url
    finally:
        async with asyncio.timeout(WAIT_S):
            await server.stop(0.0)
            await front.close()


@contextlib.asynccontextmanager
async def front_rig(
    engine: Any = None,
    *,
    endpoints: Sequence[Endpoint] = ENDPOINTS,
    settings: dict[str, Any] | None = None,
    key: str = "unused",
    **options: Any,
) -> AsyncIterator[FrontRig]:
    """Run a front with these settings, before a server with these options on `engine` (by default a
    free-running fake one). `key` is what OpenAI's client sends.
    """
    async with (
        serving(engine, **options) as grpc,
        fronting(grpc.server.address, endpoints, **(settings or {})) as (front, server, url),
        # Nothing here is encrypted, and the certificates of a client take 30 ms to read.
        httpx.AsyncClient(base_url=url, timeout=3 * WAIT_S, verify=False) as http,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key=key,
            max_retries=0,
            timeout=3 * WAIT_S,
            http_client=openai.DefaultAsyncHttpxClient(verify=False),
        ) as client,
    ):
        yield FrontRig(url, http, client, grpc, front, server)
