"""A link: the connection between a front process and the engine's process, which carries the frames of all
calls of that front process.

Frames that are sent in one turn of the event loop leave in one write. A large payload leaves in parts, in
turn with those of other calls, and no faster than the other process takes them, so that it neither delays
other calls nor lies in the buffers of the connection as a whole.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeAlias, cast

from penstock.service.fronts.frames import HEADER, IS_LAST_PART, IS_PART, PART_BYTES, Kind

Receive: TypeAlias = Callable[[int, int, bytes], None]
"""Takes a frame: its kind, the number of its call, and its payload."""
_BUFFERED_BYTES = 4 * PART_BYTES
"""No part of a large payload is sent while so much waits for the other process."""
MOST_WAITING_BYTES = 2**21
"""There is no room while so much waits for the other process: more than large payloads alone make wait."""


class Link(asyncio.Protocol):
    """One end of the connection. Used on its event loop only."""

    def __init__(self, receive: Receive, lost: Callable[[], None]) -> None:
        """`lost` is called once, when the other process has closed its end or is gone."""
        self._receive, self._lost = receive, lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._large: deque[tuple[int, int, memoryview]] = deque()
        """What is left of large payloads, each with the kind and the call of its frame."""
        self._is_scheduled = False
        self._may_send_parts = asyncio.Event()
        """Cleared while no part of a large payload may be sent."""
        self._may_send_parts.set()
        self._rest = b""
        """The beginning of a frame that has not arrived whole."""
        self._parts: dict[tuple[int, int], list[bytes]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(_BUFFERED_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._out.clear()
        self._large.clear()
        self._may_send_parts.set()
        self._lost()

    def close(self) -> None:
        """Close this end. What was sent before still arrives, except for large payloads."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    # -- sending --

    def send(self, kind: Kind, call: int = 0, payload: bytes = b"") -> None:
        """Send a frame soon. It is dropped if the other process is gone.

        A large payload is overtaken by frames that are sent later. Of one call and kind there may be only one
        at a time; a call has one message under way in each direction.
        """
        if len(payload) > PART_BYTES:
            self._large.append((kind, call, memoryview(payload)))
        else:
            self._out.append(HEADER.pack(len(payload), kind, call))
            if payload:
                self._out.append(payload)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._flush)

    async def room(self) -> None:
        """Wait while very much was sent that the other process has not taken."""
        transport = self._transport
        if transport is not None and transport.get_write_buffer_size() > MOST_WAITING_BYTES:
            await self._may_send_parts.wait()

    def _flush(self) -> None:
        self._is_scheduled = False
        if self._transport is None:
            self._out.clear()
            self._large.clear()
            return
        if self._out:
            self._transport.write(b"".join(self._out))  # writelines of Python 3.12.8 never pauses this end
            self._out.clear()
        while self._large and self._may_send_parts.is_set():
            kind, call, left = self._large.popleft()
            part, left = left[:PART_BYTES], left[PART_BYTES:]
            self._transport.write(HEADER.pack(len(part), kind | (IS_PART if left else IS_LAST_PART), call))
            self._transport.write(part)
            if left:
                self._large.append((kind, call, left))

    def pause_writing(self) -> None:
        self._may_send_parts.clear()

    def resume_writing(self) -> None:
        self._may_send_parts.set()
        self._flush()

    # -- receiving --

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        begin, end = 0, len(data)
        while end - begin >= HEADER.size:
            length, kind, call = HEADER.unpack_from(data, begin)
            payload_begin = begin + HEADER.size
            if end - payload_begin < length:
                break
            begin = payload_begin + length
            payload = data[payload_begin:begin]
            if kind < IS_PART:
                self._receive(kind, call, payload)
            elif kind & IS_PART:
                self._parts.setdefault((kind - IS_PART, call), []).append(payload)
            else:
                kind -= IS_LAST_PART
                parts = self._parts.pop((kind, call))
                self._receive(kind, call, b"".join([*parts, payload]))
        self._rest = data[begin:] if begin else data
