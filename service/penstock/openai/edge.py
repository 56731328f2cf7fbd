"""What every request passes first and last: ids, refusals while the front drains, metrics, and the access
log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.openai.calls import Call, make_call
from penstock.openai.endpoints import endpoint_of, ignored_in
from penstock.openai.failures import ApiError, ClientGone, draining, error_of, error_response
from penstock.openai.front import Front
from penstock.shared.logs import Line

log = logging.getLogger("penstock.openai")
access = logging.getLogger("penstock.openai.access")

GONE: Final = 499
"""The status that the log and the metrics have for a client that went away."""
_ALWAYS_SERVED: Final = frozenset({"/health", "/metrics"})
_MAX_PATH: Final = 100
"""The most characters of a path, and of the path of a field, in a line of the log."""


class Edge:
    """The outermost part of the app."""

    def __init__(self, app: ASGIApp, front: Front) -> None:
        self._app = app
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # of the lifespan, which is not used
            raise RuntimeError(f"the front serves HTTP, not {scope['type']}")
        call = make_call(scope, self._front.settings.request_timeout_s)
        reply = _Reply(send, call, ignored_in(scope))
        meters = self._front.meters
        meters.running.inc()
        status = GONE
        try:
            with self._front.life.running():
                await self._serve(scope, receive, reply)
            status = reply.status
        except ClientGone:
            pass
        finally:
            meters.running.dec()
            self._tell(scope, call, reply, status)

    async def _serve(self, scope: Scope, receive: Receive, reply: _Reply) -> None:
        life = self._front.life
        if life.is_draining and scope["path"] not in _ALWAYS_SERVED:
            await _refusal(reply.call)(scope, receive, reply.send)
            return
        try:
            await self._app(scope, receive, reply.send)
        except ClientGone:
            raise
        except asyncio.CancelledError:
            if not life.is_over or reply.status:
                raise
            await _refusal(reply.call)(scope, receive, reply.send)
        except Exception:  # of Starlette itself: those of handlers are answered in app.py
            log.exception("request %r failed", reply.call.request_id)
            raise ClientGone from None  # its reply ends early, if it has begun, which tells the client

    def _tell(self, scope: Scope, call: Call, reply: _Reply, status: int) -> None:
        endpoint = endpoint_of(scope)
        name = "other" if endpoint is None else endpoint.path
        seconds = time.perf_counter() - reply.began
        meters = self._front.meters
        error = error_of(scope)
        meters.count(name, status, None if error is None else error.code)
        meters.seconds.labels(name).observe(seconds)
        if reply.first_byte is not None:
            meters.first_byte_seconds.labels(name).observe(reply.first_byte - reply.began)
        if self._front.settings.access_log and (endpoint is None or endpoint.is_api):
            ignored = ", ".join(sorted(ignored_in(scope)))
            path = scope["path"][:_MAX_PATH]
            access.info(_AccessLine(scope["method"], path, status, seconds, call, error, ignored))


@dataclass(frozen=True, slots=True)
class _AccessLine(Line):
    """What the access log says about one request: ids, numbers and names of fields, and nothing that a caller
    or the model wrote but the path, and the field of an error.
    """

    method: str
    path: str
    status: int
    seconds: float
    call: Call
    error: ApiError | None
    ignored: str

    def __str__(self) -> str:
        call, error = self.call, self.error
        said = f"{self.method} {self.path}: {self.status} after {self.seconds:.3f} s"
        said += f", request {call.request_id!r}"
        if not call.request_id.endswith(call.number):
            said += f", number {call.number}"
        if call.trace_id:
            said += f", trace {call.trace_id}"
        if error is not None:
            said += f", code {error.code}"
            if error.param:
                said += f", field {error.param[:_MAX_PATH]!r}"
        return said + f", without effect: {self.ignored}" * bool(self.ignored)

    def fields(self) -> Mapping[str, object]:
        error = self.error
        fields = {
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(self.seconds, 6),
            "request_id": self.call.request_id,
            "number": self.call.number,
            "trace_id": self.call.trace_id,
            "code": None if error is None else error.code,
            "param": None if error is None or not error.param else error.param[:_MAX_PATH],
            "ignored": self.ignored,
        }
        told_only_if_there = ("trace_id", "code", "param", "ignored")
        return {name: value for name, value in fields.items() if value or name not in told_only_if_there}


def _refusal(call: Call) -> Response:
    """Make the reply to a request that comes too late. It ends the connection."""
    response = error_response(draining(), call)
    response.headers["connection"] = "close"
    return response


class _Reply:
    """Watches a reply on its way out, and puts into its headers the request's id, and which fields had no
    effect.
    """

    def __init__(self, send: Send, call: Call, ignored: set[str]) -> None:
        self.began = time.perf_counter()
        self.call = call
        self.status = 0
        """The status of HTTP; 0 until the reply has begun."""
        self.first_byte: float | None = None
        self._send = send
        self._ignored = ignored

    async def send(self, message: Message) -> None:
        if self.first_byte is None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = self.call.request_id
                if self.call.is_anthropic:
                    headers["request-id"] = self.call.request_id
                if self._ignored:
                    headers["x-penstock-ignored"] = ", ".join(sorted(self._ignored))
            else:
                self.first_byte = time.perf_counter()
        await self._send(message)
