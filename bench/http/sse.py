"""A client of `/v1/completions` that costs little processor time, because it shares the cores with what is
measured: HTTP/1.1 by hand, on a connection that is kept.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

_DONE = b"[DONE]"


class HttpError(Exception):
    """The front answered with something else than a stream of events."""


class Connection:
    """A connection for one request at a time."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """Send a request, and yield the data of each event but the last, `[DONE]`. Raises HttpError."""
        reader, writer = await self._open()
        text = json.dumps(body | {"stream": True}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(text), text)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise HttpError(head.decode() + (await reader.read(1000)).decode())
        if b"transfer-encoding: chunked" not in head.lower():
            raise HttpError("an answer of unknown length")
        done = False
        async for line in _lines(reader):
            if line.startswith(b"data: "):
                done = line == b"data: " + _DONE
                if not done:
                    yield line[6:]
        if not done:
            raise HttpError("the stream ended without [DONE]")

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address, limit=1 << 20)
        return self._reader, self._writer

    async def close(self) -> None:
        """Close the connection, also in the middle of a stream."""
        if self._writer is not None:
            self._writer.close()
            self._writer = self._reader = None


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a body that comes in chunks, without the empty ones."""
    rest = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        rest += (await reader.readexactly(size + 2))[:-2]
        *lines, rest = rest.split(b"\n")
        for line in lines:
            if line:
                yield line
    await reader.readuntil(b"\r\n")


def parts_of(data: bytes) -> tuple[str | None, int | None]:
    """Return the text of a chunk, None if it has no choice; and the completion's tokens where it tells the
    usage. Raises HttpError for an error.
    """
    chunk = json.loads(data)
    if "error" in chunk:
        raise HttpError(chunk["error"]["message"])
    choices, usage = chunk["choices"], chunk.get("usage")
    text = "".join(choice["text"] for choice in choices) if choices else None
    return text, None if usage is None else int(usage["completion_tokens"])
