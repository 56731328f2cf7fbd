"""Runs what a request asks for, ends it when its client goes away, and sends replies.

What the request does races with the disconnect. Whatever loses is cancelled, which cancels the RPC, and so
frees the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.client import PenstockClientError
from penstock.openai.calls import call_of
from penstock.openai.endpoints import params_of
from penstock.openai.failures import (
    ApiError,
    ClientGone,
    defect,
    draining,
    envelope,
    note_error,
    of_client_error,
)
from penstock.openai.front import Front, front_of
from penstock.openai.jsonbytes import json_bytes

log = logging.getLogger("penstock.openai")

ValueT = TypeVar("ValueT")
Events = AsyncGenerator[bytes, None]
"""The events of a reply, each with its "data: " and its empty line."""

_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would gather events otherwise
]


def json_response(value: Any, status: int = 200) -> Response:
    """Make a reply with this value as its body."""
    return Response(json_bytes(value), status, media_type="application/json")


def event(data: bytes) -> bytes:
    """Make an event with this JSON as its data."""
    return b"data: " + data + b"\n\n"


async def answered(request: Request, work: Coroutine[Any, Any, ValueT]) -> ValueT:
    """Run `work` to its end and return its result. If the client goes away, `work` is cancelled, which frees
    its request at the server, and ClientGone is raised. Call it after the body was read.
    """
    front = front_of(request)
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    except asyncio.CancelledError:
        if not front.life.is_over:
            raise
        _uncancel()
        raise draining() from None
    finally:
        left = [task for task in (working, gone) if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)


async def sse(request: Request, events: Events) -> Response:
    """Make a reply that sends these events as they come. It waits for the first one, so that an error before
    it is told by the HTTP status. An error after it is one event with the envelope, and the last one. The
    events are closed as soon as the client goes away, and in any case at the end.
    """
    try:
        first = await answered(request, _first(events))
    except BaseException:  # whatever it is, the events do not stay open
        await events.aclose()
        raise
    return _EventStream(front_of(request), request, first, events)


def late_error(request: Request, error: ApiError | PenstockClientError) -> ApiError:
    """Make what the client is told of an error after its reply began. The log and the metrics are told as
    well.
    """
    told = error if isinstance(error, ApiError) else of_client_error(error, params_of(request.scope))
    note_error(request.scope, told)
    return told


async def _first(events: Events) -> bytes:
    return await anext(events, b"")


async def _gone(receive: Receive) -> None:
    """Wait until the client has gone, or has its whole reply."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _uncancel() -> None:
    task = asyncio.current_task()
    assert task is not None, "requests run in tasks"
    task.uncancel()


class _EventStream(Response):
    """Sends events. No task and no timer is made for an event: the protocol ends connections that take
    nothing.
    """

    def __init__(self, front: Front, request: Request, first: bytes, events: Events) -> None:
        super().__init__()
        self._front = front
        self._request = request
        self._first = first
        self._events = events
        self._is_gone = False
        self._has_ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        me = asyncio.current_task()
        assert me is not None, "requests run in tasks"

        def left(task: asyncio.Task[None]) -> None:
            if not (task.cancelled() or self._has_ended):
                self._is_gone = True
                me.cancel()

        watching = asyncio.create_task(_gone(receive))
        watching.add_done_callback(left)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            last = b""
        except asyncio.CancelledError:
            last = self._cancelled()
        except (ApiError, PenstockClientError) as error:
            last = self._failure(error)
        except Exception:  # a defect: the reply has begun, so its last event must tell of it
            log.exception("request %r failed after its reply began", call_of(self._request).request_id)
            last = self._failure(defect())
        finally:
            self._has_ended = True
            watching.cancel()
            await self._events.aclose()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _cancelled(self) -> bytes:
        """Return what is sent last after the task was cancelled. Raises ClientGone if nobody is there to take
        it.
        """
        if self._is_gone:
            _uncancel()
            raise ClientGone
        if not self._front.life.is_over:
            raise asyncio.CancelledError
        _uncancel()
        return self._failure(draining())

    def _failure(self, error: ApiError | PenstockClientError) -> bytes:
        call = call_of(self._request)
        told = event(json_bytes(envelope(late_error(self._request, error), call)))
        return b"event: error\n" + told if call.is_anthropic else told
