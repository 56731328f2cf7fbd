"""In the engine's process: runs the calls of one front process, as grpc.aio runs those of a server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc

from penstock.service.fronts.context import LinkContext
from penstock.service.fronts.frames import Kind, Metadata, Opening, Status
from penstock.service.fronts.link import Link
from penstock.service.listening.grpc_server import Refuse

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
        """The method's handler, as the interceptors from `first` on wrap it."""
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
        """The front process is gone, and with it the clients of its calls."""
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
