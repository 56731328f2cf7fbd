"""Runs the lines of a batch: each is a request to the front's own app, in this process and without a socket,
so that its body is read, and its answer made, by what serves HTTP.
"""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope

from penstock.openai.batches.lines import Line
from penstock.openai.batches.storing import to_its_end
from penstock.openai.jsonbytes import json_bytes

TRY_AGAIN: Final = (429, 503)
"""The statuses after which a line is tried again, unless the reply says that it shall not be."""
KEY_REFUSED: Final = (401, 403)
"""The statuses of what no line with this key will be taken after: it has ended, or does not allow this."""
_FIRST_PAUSE_S: Final = 0.25
_MOST_PAUSE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What the app answered."""

    status: int
    headers: Headers
    body: bytes

    @property
    def shall_be_tried_again(self) -> bool:
        """Whether the same request may be taken later."""
        return self.status in TRY_AGAIN and self.headers.get("x-should-retry") != "false"

    @property
    def retry_after_s(self) -> float:
        """How long the reply asks to wait, in seconds."""
        text = self.headers.get("retry-after-ms", "")
        return int(text) / 1000 if text.isdecimal() else 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """A line with its answer."""

    line: Line
    reply: Reply

    @property
    def is_ok(self) -> bool:
        """Whether it is no error."""
        return 200 <= self.reply.status < 300

    def written(self) -> bytes:
        """Write the line of the output, as in OpenAI's API."""
        request_id = self.reply.headers.get("x-request-id", "")
        response = {"status_code": self.reply.status, "request_id": request_id, "body": None}
        return output_line(self.line.custom_id, json_bytes(response), b"null", self.reply.body or b"null")


def output_line(custom_id: str, response: bytes, error: bytes, body: bytes | None = None) -> bytes:
    """Make a line of output from the JSON of its parts. A `body` takes the place of that null at the end of
    the response.
    """
    if body is not None:
        response = response.removesuffix(b"null}") + body + b"}"
    head = json_bytes({"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id}).removesuffix(b"}")
    return b'%s,"response":%s,"error":%s}\n' % (head, response, error)


class NotTaken(Exception):
    """A line has no answer, and no more are run: the server refused it for too long, or refuses the key."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.body.decode("utf-8", "replace"))
        error = json.loads(reply.body)["error"]
        self.code: str | None = error["code"]
        self.message: str = error["message"]


async def call(app: ASGIApp, method: str, path: str, body: bytes, key: str) -> Reply:
    """Call the app. `key` is the value of the header `authorization`; empty for none."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    if key:
        headers.append((b"authorization", key.encode("latin-1")))
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }
    is_sent, never = False, asyncio.Event()
    status, replied, parts = 500, Headers(), bytearray()

    async def receive() -> Message:
        nonlocal is_sent
        if is_sent:
            await never.wait()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, replied, parts
        if message["type"] == "http.response.start":
            status, replied = message["status"], Headers(raw=message["headers"])
        else:
            parts += message.get("body", b"")

    await app(scope, receive, send)
    return Reply(status, replied, bytes(parts))


async def run_line(app: ASGIApp, line: Line, key: str, patience_s: float) -> Done:
    """Run a line, and try again while it is refused for the moment, for about `patience_s` seconds. Raises
    NotTaken after that, and if the server refuses the key.
    """
    clock = asyncio.get_running_loop().time
    give_up_at, pause_s = clock() + patience_s, _FIRST_PAUSE_S
    while True:
        reply = await call(app, "POST", line.url, line.body, key)
        if reply.status in KEY_REFUSED:
            raise NotTaken(reply)
        if not reply.shall_be_tried_again:
            return Done(line, reply)
        wait_s = max(reply.retry_after_s, pause_s) * random.uniform(1.0, 1.25)
        if clock() + wait_s > give_up_at:
            raise NotTaken(reply)
        await asyncio.sleep(wait_s)
        pause_s = min(2 * pause_s, _MOST_PAUSE_S)


async def run_lines(
    app: ASGIApp,
    lines: Generator[Line, None, None],
    write: Callable[[Done], Awaitable[None]],
    *,
    key: str,
    concurrency: int,
    patience_s: float,
) -> None:
    """Run all lines, so many at a time, and hand each to `write` when it is done, in one call at a time.
    Raises NotTaken, and what `lines` and `write` raise. Those that run then are ended, which frees them at
    the server. `lines` is closed at the end.
    """
    reading, writing = asyncio.Lock(), asyncio.Lock()

    async def work() -> None:
        while True:
            async with reading:
                line = await to_its_end(next, lines, None)
            if line is None:
                return
            done = await run_line(app, line, key, patience_s)
            async with writing:
                await write(done)

    tasks = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in ended:
            task.result()
    finally:
        while left := [task for task in tasks if not task.done()]:
            for task in left:  # again: a request that is cancelled when its front ends is answered, with 503
                task.cancel()
            await asyncio.wait(left, timeout=_FIRST_PAUSE_S)
        await asyncio.gather(*tasks, return_exceptions=True)
        lines.close()
