"""In the engine's process: one call that a front process carries, and what handlers see of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Self

import grpc

from penstock.service.fronts.frames import Kind, Metadata, Opening, Status
from penstock.service.fronts.link import Link


class LinkContext:
    """The part of grpc.aio's ServicerContext that the service uses, for one call. It behaves as gRPC's own.

    The task of the call is cancelled when the client is gone.
    """

    def __init__(self, link: Link, number: int, opening: Opening) -> None:
        self._link, self._number, self._opening = link, number, opening
        self._loop = asyncio.get_running_loop()
        self._received: asyncio.Future[bytes | None] | None = None
        self._sent: asyncio.Future[None] | None = None
        self._code: grpc.StatusCode | None = None
        self._is_finishing = False
        self.serialize: Callable[[Any], bytes] | None = None
        """Makes bytes of what a handler writes; None if it writes bytes."""
        self.has_ended = False
        """Whether the front process has said that the call has ended."""

    # -- what handlers use --

    def peer(self) -> str:
        return self._opening.peer

    def invocation_metadata(self) -> Metadata:
        return self._opening.metadata

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._opening.identity

    def time_remaining(self) -> float | None:
        deadline_s = self._opening.deadline_s
        return None if deadline_s is None else max(deadline_s - time.time(), 0.0)

    def code(self) -> grpc.StatusCode | None:
        return self._code

    async def read(self) -> Any:
        """The next message, or gRPC's EOF."""
        self._received = self._loop.create_future()
        self._link.send(Kind.READ, self._number)
        try:
            message = await self._received
        finally:
            self._received = None  # which would hold the message
        return grpc.aio.EOF if message is None else message

    async def write(self, message: Any) -> None:
        """Send a message, and return once gRPC asks for more."""
        data = message if self.serialize is None else self.serialize(message)
        await self._send(Kind.MESSAGE, data)

    async def send_initial_metadata(self, metadata: tuple[()]) -> None:
        """Send the initial metadata, which must be empty."""
        assert not metadata, "the service sends none"
        await self._send(Kind.INITIAL)

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Metadata = ()) -> NoReturn:
        """End the call with this status. Raises AbortError once the status has left."""
        self._code = code
        await self.finish(Status(code.value[0], details, tuple(trailing_metadata)))
        raise grpc.aio.AbortError("Locally aborted.")

    def finish(self, status: Status) -> Awaitable[None]:
        """End the call with this status. What is returned waits until it has left, and holds no reply."""
        self._is_finishing = True
        return self._send(Kind.FINISH, status.packed())

    async def _send(self, kind: Kind, payload: bytes = b"") -> None:
        self._sent = self._loop.create_future()
        self._link.send(kind, self._number, payload)
        del payload  # the link alone holds it from now on
        await self._sent

    def __aiter__(self) -> Self:
        """The messages, for handlers that iterate over them."""
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    # -- what the front process tells --

    def receive(self, message: bytes | None) -> None:
        """Take the answer to `read`; None means that there is no further message."""
        if self._received is not None and not self._received.done():
            self._received.set_result(message)

    def sent(self) -> None:
        """What was written has left."""
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(None)

    def end(self) -> bool:
        """The call has ended. Returns whether that was asked for; otherwise the client is gone."""
        self.has_ended = True
        self.sent()
        return self._is_finishing
