"""What of an HTTP request goes on to the server with each RPC that is made for it."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from starlette.requests import Request
from starlette.types import Scope

ValueT = TypeVar("ValueT")

_SANE_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_MAX_TRACESTATE: Final = 512
_MAX_AUTHORIZATION: Final = 4096
_NO_KEY: Final = "unreadable"
"""What goes on instead of a header that cannot be sent on. A server with keys refuses it. If nothing went on,
the request would be made with the front's own key.
"""
_KEY: Final = "penstock.call"
_MESSAGES: Final = "/v1/messages"
_MODELS: Final = "/v1/models"


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, as far as the server and the log know it."""

    request_id: str
    """The caller's own X-Request-Id, or one that was made; every reply has it in its headers."""
    number: str
    """32 hexadecimal digits that no other request has, of which the ids of answers are made."""
    metadata: tuple[tuple[str, str], ...]
    """The metadata of each RPC: authorization, traceparent and tracestate, where the request brought them."""
    created: int
    """When the request came, in seconds of Unix time."""
    timeout: float | None
    """Seconds that an RPC may take; None means no limit."""
    trace_id: str = ""
    """The trace that the caller's traceparent names; empty without one."""
    is_anthropic: bool = False
    """Whether the caller speaks Anthropic's API, and so wants errors and lists of models in its form."""

    @property
    def key(self) -> str:
        """What goes on as `authorization`; empty without it."""
        return next((value for name, value in self.metadata if name == "authorization"), "")

    def answer_id(self, prefix: str) -> str:
        """Make the id of the answer, and of its request at the server: "chatcmpl-<32 hexadecimal digits>"."""
        return f"{prefix}-{self.number}"


class Shared(Generic[ValueT]):
    """Asks the server once for all calls that want to know the same at a time. Only calls with the same key
    share an answer, as the server may refuse it to others. It belongs to one event loop.
    """

    def __init__(self, ask: Callable[[Call], Coroutine[Any, Any, ValueT]]) -> None:
        self._ask = ask
        self._asking: dict[str, asyncio.Task[ValueT]] = {}

    async def of(self, call: Call) -> ValueT:
        """Return what `ask` returns, for this call or for one that came before it and still waits. Raises
        what `ask` raises. A caller that goes away takes the answer from nobody.
        """
        asking = self._asking.get(call.key)
        if asking is None:
            asking = self._asking[call.key] = asyncio.create_task(self._ask(call))
            asking.add_done_callback(lambda task: self._asked(call.key, task))
        return await asyncio.shield(asking)

    async def close(self) -> None:
        """End what is under way."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _asked(self, key: str, task: asyncio.Task[ValueT]) -> None:
        del self._asking[key]
        if not task.cancelled():
            task.exception()  # whoever waited has it; nobody may wait any more


def make_call(scope: Scope, timeout_s: float) -> Call:
    """Make the call of a request, or of work of the front itself, whose scope has headers alone. `timeout_s`
    of 0 means no limit.
    """
    headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # of a repeated header, the first counts
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    number = uuid.uuid4().hex
    metadata = []
    authorization = headers.get(b"authorization", b"").decode("latin-1").strip()
    key = headers.get(b"x-api-key", b"").decode("latin-1").strip()
    if key and not authorization:
        authorization = f"Bearer {key}"
    if authorization:
        can_be_sent = len(authorization) <= _MAX_AUTHORIZATION and _is_ascii(authorization)
        metadata.append(("authorization", authorization if can_be_sent else _NO_KEY))
    traceparent = headers.get(b"traceparent", b"").decode("latin-1").strip()
    trace = _TRACEPARENT.match(traceparent)
    if trace is not None:
        metadata.append(("traceparent", trace[0]))
        tracestate = headers.get(b"tracestate", b"").decode("latin-1").strip()
        if tracestate and len(tracestate) <= _MAX_TRACESTATE and _is_ascii(tracestate):
            metadata.append(("tracestate", tracestate))
    call = Call(
        request_id=given if _SANE_ID.fullmatch(given) else f"req-{number}",
        number=number,
        metadata=tuple(metadata),
        created=int(time.time()),
        timeout=timeout_s or None,
        trace_id="" if trace is None else trace[1],
        is_anthropic=_is_anthropic(scope.get("path", ""), names_version=b"anthropic-version" in headers),
    )
    scope[_KEY] = call
    return call


def call_of(request: Request) -> Call:
    """Return the call of a request."""
    call: Call = request.scope[_KEY]
    return call


def _is_anthropic(path: str, *, names_version: bool) -> bool:
    """Say whether a request is one of Anthropic's API. Both APIs have models, and only its clients name the
    version of their API.
    """
    at = "/".join(path.split("/", 3)[:3])
    return at == _MESSAGES or (at == _MODELS and names_version)


def _is_ascii(text: str) -> bool:
    return text.isascii() and text.isprintable()
