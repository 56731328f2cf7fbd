"""Reads the streams of several prompts at once, as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TypeVar

EventT = TypeVar("EventT")

_MOST_WAITING = 64
"""Events that may wait for a reader who is slower than the server. What comes after them waits at the server.
"""


async def merged(streams: Sequence[AsyncIterator[EventT]]) -> AsyncGenerator[tuple[int, EventT], None]:
    """The events of all streams as they come, each with the number of the stream that it belongs to.

    Raises the first error of any stream. Then, and when it is closed, the others are read no further; to end
    them is the caller's part.
    """
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    waiting: asyncio.Queue[tuple[int, EventT] | Exception | None] = asyncio.Queue(_MOST_WAITING)

    async def read(number: int, stream: AsyncIterator[EventT]) -> None:
        try:
            async for event in stream:
                await waiting.put((number, event))
        except Exception as error:  # noqa: BLE001 -- it is raised where the events are read
            await waiting.put(error)
        else:
            await waiting.put(None)

    readers = [asyncio.create_task(read(number, stream)) for number, stream in enumerate(streams)]
    left = len(readers)
    try:
        while left:
            read_last = await waiting.get()
            if isinstance(read_last, Exception):
                raise read_last
            if read_last is None:
                left -= 1
            else:
                yield read_last
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
