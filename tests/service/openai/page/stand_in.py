"""A small server that stands in for the OpenAI front: it serves the real page, and answers as a test says.

So a test can let an answer stop where it wants to look, break off, or hold what no model writes on demand.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from penstock.openai.routes.page import show_page, show_page_file

WAIT_S = 60.0


@dataclass(frozen=True)
class Hold:
    """Nothing more is sent until the test calls `release`."""


@dataclass(frozen=True)
class Refusal:
    """An HTTP error instead of an answer."""

    status: int
    error: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Break:
    """The stream ends without its last event."""


Step = Mapping[str, Any] | Hold | Break
Answer = Sequence[Step] | Refusal


def delta(
    content: str | None = None, *, tokens: int = 1, prompt: int = 12, finish: str | None = None, **more: Any
) -> dict[str, Any]:
    """Make a chunk. `tokens` is how many there are so far."""
    fields = ({} if content is None else {"content": content}) | more
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "toy",
        "choices": [{"index": 0, "delta": fields, "finish_reason": finish}],
        "usage": usage,
    }


def said(text: str) -> list[dict[str, Any]]:
    """Return the chunks of an answer that ends by itself, one for each word."""
    words = text.split(" ")
    chunks = [delta(word if at == 0 else f" {word}", tokens=at + 1) for at, word in enumerate(words)]
    return [*chunks, delta(tokens=len(words), finish="stop")]


def called(name: str, arguments: str, *, call_id: str = "call_1") -> list[dict[str, Any]]:
    """Return the chunks of an answer that calls one tool, its arguments in two pieces."""
    half = len(arguments) // 2
    first = {"index": 0, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
    pieces = [{"index": 0, "function": {"arguments": part}} for part in (arguments[:half], arguments[half:])]
    return [
        *(delta(tool_calls=[piece], tokens=at + 1) for at, piece in enumerate((first, *pieces))),
        delta(tokens=3, finish="tool_calls"),
    ]


class StandIn:
    """The server, and what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.models: Sequence[str] | Refusal = ("toy",)
        self.seeing: Sequence[str] = ()
        """Those of the models that take images."""
        self.answers: list[Answer] = []
        """One for each request to come, in turn."""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.left = threading.Event()
        """Set when a client went away before its answer was whole."""
        self._released = threading.Event()

    def release(self) -> None:
        """Go on after a Hold."""
        self._released.set()

    def app(self) -> Starlette:
        routes = [
            Route("/", show_page),
            Route("/page/{name:path}", show_page_file),
            Route("/v1/models", self._list_models),
            Route("/v1/chat/completions", self._answer, methods=["POST"]),
        ]
        return Starlette(
            routes=[Mount("/under/a-prefix", routes=routes), *routes]  # as a proxy may serve it
        )

    async def _list_models(self, request: Request) -> Response:
        self.headers.append(request.headers)
        if isinstance(self.models, Refusal):
            return _refused(self.models)
        data = [
            {
                "id": name,
                "object": "model",
                "input_modalities": ["text", "image"] if name in self.seeing else ["text"],
            }
            for name in self.models
        ]
        return JSONResponse({"object": "list", "data": data})

    async def _answer(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        answer = self.answers.pop(0)
        if isinstance(answer, Refusal):
            return _refused(answer)
        return StreamingResponse(
            self._events(answer), media_type="text/event-stream", headers={"x-request-id": "request-7"}
        )

    async def _events(self, steps: Sequence[Step]) -> AsyncIterator[str]:
        try:
            for step in steps:
                if isinstance(step, Break):
                    return
                if isinstance(step, Hold):
                    await self._hold()
                else:
                    yield f"data: {json.dumps(step)}\n\n"
            yield "data: [DONE]\n\n"
        except BaseException:  # however the reader leaves
            self.left.set()
            raise

    async def _hold(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while not self._released.is_set():  # noqa: ASYNC110 -- another thread sets it
                await asyncio.sleep(0.005)
        self._released.clear()


def _refused(refusal: Refusal) -> Response:
    headers = {"x-request-id": "request-7", **refusal.headers}
    return JSONResponse({"error": refusal.error}, refusal.status, headers)


@contextlib.contextmanager
def standing_in() -> Iterator[StandIn]:
    """Serve a StandIn on a port of its own."""
    stand_in = StandIn()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stand_in.url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        config = uvicorn.Config(
            stand_in.app(), ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
        thread.start()
        deadline = time.monotonic() + WAIT_S
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.005)
        try:
            yield stand_in
        finally:
            server.should_exit = True
            thread.join(WAIT_S)
