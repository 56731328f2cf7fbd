"""In the engine's process: runs the calls of one front process, as grpc.aio runs those of a server, and what
handlers see of each.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Self, TypeAlias

import grpc

from penstock.service.listening.grpc_server import Refuse
from penstock.service.relay.link import Kind, Link, Metadata, Opening, Status


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
        """Return the next message, or gRPC's EOF."""
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
        """Return the messages, for handlers that iterate over them."""
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
        """Note that what was written has left."""
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(None)

    def end(self) -> bool:
        """Note that the call has ended. Returns whether that was asked for; otherwise the client is gone."""
        self.has_ended = True
        self.sent()
        return self._is_finishing


log = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


@dataclass(frozen=True, slots=True)
class CallDetails(grpc.HandlerCallDetails):
    """What interceptors are told of a call."""

    method: str
    invocation_metadata: Metadata


@dataclass(frozen=True, slots=True)
class Served:
    """What a server does with calls."""

    refuse: Refuse
    """Ends a call of a method that the server does not have."""
    interceptors: Sequence[grpc.aio.ServerInterceptor]
    handlers: Mapping[str, Handler]
    """By method, such as "/penstock.v1.InferenceService/Generate"."""

    async def handler_of(self, details: grpc.HandlerCallDetails, first: int = 0) -> Handler | None:
        """Find the method's handler, as the interceptors from `first` on wrap it."""
        if first == len(self.interceptors):
            return self.handlers[details.method]
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]] = partial(
            self.handler_of, first=first + 1
        )
        return await self.interceptors[first].intercept_service(continuation, details)


class LinkCalls:
    """The calls of one link. Used on its event loop only."""

    def __init__(self, served: Served, link: Link) -> None:
        self._served, self._link = served, link
        self._calls: dict[int, tuple[LinkContext, asyncio.Task[None]]] = {}

    def receive(self, kind: int, number: int, payload: bytes) -> None:
        """Take a frame about a call. Calls that have ended here already are left alone."""
        if kind == Kind.OPEN:
            self._open(number, Opening.of(payload))
            return
        context, task = self._calls.get(number, (None, None))
        if context is None or task is None:
            return
        if kind == Kind.SENT:
            context.sent()
        elif kind == Kind.MESSAGE:
            context.receive(payload)
        elif kind == Kind.NO_MESSAGE:
            context.receive(None)
        elif kind == Kind.ENDED and not context.end():
            task.cancel()

    def _open(self, number: int, opening: Opening) -> None:
        context = LinkContext(self._link, number, opening)
        task = asyncio.get_running_loop().create_task(self._run_rpc(opening, context), name=opening.method)
        self._calls[number] = context, task
        task.add_done_callback(partial(self._close, number))

    def _close(self, number: int, _task: object) -> None:
        context, _ = self._calls.pop(number)
        if not context.has_ended:  # the handler was ended, and nobody told the client
            self._link.send(Kind.DROP, number)

    def lose(self) -> None:
        """End all calls: the front process is gone, and with it the clients of its calls."""
        for context, task in list(self._calls.values()):
            if not context.end():
                task.cancel()

    async def _run_rpc(self, opening: Opening, context: LinkContext) -> None:
        seen: Any = context  # it is a ServicerContext as far as the service knows
        try:
            if opening.method not in self._served.handlers:
                await self._served.refuse(seen)
                return
            handler: Any = await self._served.handler_of(CallDetails(opening.method, opening.metadata))
            context.serialize = handler.response_serializer
            if handler.response_streaming:
                await handler.stream_stream(context, seen)
                await context.finish(Status(0))
            else:
                reply = await handler.stream_unary(context, seen)
                finishing = context.finish(Status(0, reply=handler.response_serializer(reply)))
                del reply  # the link alone holds it from now on
                await finishing
        except grpc.aio.AbortError:  # the status has left
            return
        except asyncio.CancelledError:  # the task would keep the error, and with it what the handler had
            return
        except Exception as error:
            log.exception("a call of %s has no status; this is a bug in the service", opening.method)
            unknown: int = grpc.StatusCode.UNKNOWN.value[0]
            await context.finish(Status(unknown, f"unexpected {type(error).__name__}"))
