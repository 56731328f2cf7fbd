"""The service grpc.health.v1: tells whether services take requests, to clients that ask once and to watchers.

No peer can block it. A status is set without waiting for anybody, a message to a watcher is sent outside of
any lock, and a watcher that does not read is given up after a while. Everybody who can connect may ask,
because the probes of an orchestrator cannot carry a key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.service.errors import StalledReader, UnknownService
from penstock.service.limits.admission import Gate

Request = health_pb2.HealthCheckRequest
Response = health_pb2.HealthCheckResponse
SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
MAX_WATCHERS = 1000
WRITE_LIMIT_S = 20.0
"""Seconds that a status may wait until a watcher reads it."""


class Health(health_pb2_grpc.HealthServicer):
    """The servicer. All its methods must be called on the server's event loop."""

    def __init__(self, *, max_watchers: int = MAX_WATCHERS, write_limit_s: float = WRITE_LIMIT_S) -> None:
        # Health needs no key, so one address may not have all places.
        self._gate = Gate("max_watchers", max_watchers, time.monotonic, per_address=(max_watchers + 1) // 2)
        self._write_limit_s = write_limit_s
        self._statuses: dict[str, int] = {}
        self._watchers: set[asyncio.Event] = set()
        self._closed = False

    def set(self, *services: str, serving: bool) -> None:
        """Set the status of these services. Watchers get it as fast as each of them reads."""
        status = Response.SERVING if serving else Response.NOT_SERVING
        self._statuses.update(dict.fromkeys(services, status))
        self._wake()

    def close(self) -> None:
        """End all watches, each after it has sent the last status. Later watches send one status and end at
        once.
        """
        self._closed = True
        self._wake()

    @property
    def num_watchers(self) -> int:
        """How many watches have not ended."""
        return self._gate.active

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()

    async def Check(self, request: Request, context: Any) -> Response:
        """Return the status of one service. Raises UnknownService."""
        status = self._statuses.get(request.service)
        if status is None:
            raise UnknownService(request.service)
        return Response(status=status)

    async def List(self, request: Any, context: Any) -> Any:
        """Return the status of every service."""
        listed: Any = vars(health_pb2)["HealthListResponse"]
        return listed(statuses={name: Response(status=status) for name, status in self._statuses.items()})

    async def Watch(self, request: Request, context: Any) -> None:
        """Send the status of one service now and whenever it changes. A status that changes again before the
        watcher reads may be skipped. Raises Busy and StalledReader.
        """
        changed = asyncio.Event()
        leave = self._gate.enter(context.peer())
        try:
            # The initial metadata are sent by themselves, because no flow control holds them up. If they went
            # with a first message that is given up, they would hold the status back, too.
            await context.send_initial_metadata(())
            self._watchers.add(changed)
            reads = await self._tell(request.service, changed, context)
        finally:
            self._watchers.discard(changed)
            leave()
        if not reads:
            raise StalledReader(self._write_limit_s)

    async def _tell(self, service: str, changed: asyncio.Event, context: Any) -> bool:
        """Send statuses until `close`. Returns false if the watcher does not read."""
        told: int | None = None
        while True:
            changed.clear()
            status = self._statuses.get(service, Response.SERVICE_UNKNOWN)
            if status != told:
                # The status may change while this waits; the next round sees it.
                try:
                    async with asyncio.timeout(self._write_limit_s):
                        await context.write(Response(status=status))
                except TimeoutError:
                    return False
                told = status
            elif self._closed:
                return True
            else:
                await changed.wait()


class Readiness:
    """Reports services as SERVING unless there is a reason against it: the server is starting or stopping,
    its engine has died or hangs (`watchdog`), or a failed update in place has left no whole weights.
    """

    def __init__(self, health: Health, services: Sequence[str], against: str) -> None:
        """`against` is the first reason against SERVING."""
        self._health = health
        self._services = services
        self._against = {against}
        self._say()

    @property
    def is_serving(self) -> bool:
        """Whether the services are SERVING."""
        return not self._against

    def refuse(self, reason: str) -> None:
        """Add a reason against SERVING."""
        self._against.add(reason)
        self._say()

    def allow(self, reason: str) -> None:
        """Remove a reason against SERVING."""
        self._against.discard(reason)
        self._say()

    def _say(self) -> None:
        self._health.set(*self._services, serving=not self._against)
