"""A link: the connection between a front process and the engine's process, which carries the frames of all
calls of that front process.

Frames that are sent in one turn of the event loop leave in one write. A large payload leaves in parts, in
turn with those of other calls, and no faster than the other process takes them, so that it neither delays
other calls nor lies in the buffers of the connection as a whole.

What a front process and the engine's process tell each other: the kinds of frames, and what is in them.

A frame is a header and a payload. The header has the payload's length, the frame's kind, and the number of
the call that it is about, 0 if it is about none; numbers are little-endian. The front process numbers its
calls from 1 on.
"""

from __future__ import annotations

import asyncio
import enum
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

Metadata: TypeAlias = "tuple[tuple[str, str | bytes], ...]"

HEADER = struct.Struct("<IBQ")
PART_BYTES = 65_536
"""A larger payload is sent in parts of this size, so that frames of other calls can go between them."""
IS_PART = 0x40
"""Set in the kind of every part but the last."""
IS_LAST_PART = 0x80
"""Set in the kind of the last part."""

_LENGTH = struct.Struct("<I")
_TIME = struct.Struct("<d")
_BINARY = "-bin"
"""Ends the names of metadata whose values are bytes."""


class Kind(enum.IntEnum):
    """The kinds of frames. The first ones are about no call."""

    START = 1
    """To the front: what to listen on, as JSON (`settings`)."""
    LISTENING = 2
    """To the engine: the front process listens."""
    REFUSED = 3
    """To the engine: the front process cannot listen; the payload says why."""
    STOP = 4
    """To the front: take no further calls, and end after so many seconds at the latest."""
    LOG = 5
    """To the engine: a line for the log."""
    PING = 6
    """To the front: answer this with PONG."""
    PONG = 7
    """To the engine: the front process is alive."""

    OPEN = 16
    """To the engine: a call has begun (`Opening`)."""
    READ = 17
    """To the front: the next message of the call is wanted."""
    MESSAGE = 18
    """A message. To the engine it is the answer to READ; to the front it is one to send to the client."""
    NO_MESSAGE = 19
    """To the engine, as the answer to READ: the client sends no further message."""
    INITIAL = 20
    """To the front: send the initial metadata, which are empty."""
    SENT = 21
    """To the engine: what INITIAL or MESSAGE asked for has left, so that there is room for the next one."""
    FINISH = 22
    """To the front: end the call with this status (`Status`)."""
    DROP = 23
    """To the front: end the call without a status, whatever it is waiting for."""
    ENDED = 24
    """To the engine: the call has ended, by the status of FINISH or because the client is gone."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What is known of a call when its headers have arrived."""

    method: str
    """Such as "/penstock.v1.InferenceService/Generate"; empty for a method that the server does not have."""
    peer: str
    """gRPC's name of the other end of the connection."""
    deadline_s: float | None
    """As Unix time, in seconds; None if the call has no deadline."""
    metadata: Metadata
    identity: dict[str, list[bytes]]
    """What the client's verified certificate says, by the names of gRPC's authentication context."""

    def packed(self) -> bytes:
        """Pack the payload of OPEN."""
        deadline = b"" if self.deadline_s is None else _TIME.pack(self.deadline_s)
        identity = ((key, value) for key, values in self.identity.items() for value in values)
        return _pack(
            self.method.encode(),
            self.peer.encode(),
            deadline,
            _pack_pairs(self.metadata),
            _pack_pairs(identity),
        )

    @classmethod
    def of(cls, payload: bytes) -> Opening:
        """Take the payload of OPEN apart."""
        method, peer, deadline, metadata, identity = _unpack(payload)
        found: dict[str, list[bytes]] = {}
        for key, value in _pairs(identity):
            found.setdefault(key.decode(), []).append(value)
        return cls(
            method.decode(),
            peer.decode(),
            _TIME.unpack(deadline)[0] if deadline else None,
            _metadata(metadata),
            found,
        )


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ends."""

    code: int
    """gRPC's number of the status."""
    details: str = ""
    trailing_metadata: Metadata = ()
    reply: bytes = b""
    """The only message of a method that has one, if the call succeeded."""

    def packed(self) -> bytes:
        """Pack the payload of FINISH."""
        metadata = _pack_pairs(self.trailing_metadata)
        return _pack(bytes([self.code]), self.details.encode(), metadata, self.reply)

    @classmethod
    def of(cls, payload: bytes) -> Status:
        """Take the payload of FINISH apart."""
        code, details, metadata, reply = _unpack(payload)
        return cls(code[0], details.decode(), _metadata(metadata), reply)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the log."""

    level: int
    logger: str
    text: str

    def packed(self) -> bytes:
        """Pack the payload of LOG."""
        return _pack(bytes([self.level]), self.logger.encode(), self.text.encode(errors="backslashreplace"))

    @classmethod
    def of(cls, payload: bytes) -> Line:
        """Take the payload of LOG apart."""
        level, logger, text = _unpack(payload)
        return cls(level[0], logger.decode(), text.decode())


def pack_seconds(seconds: float) -> bytes:
    """Pack the payload of STOP."""
    return _TIME.pack(seconds)


def seconds_of(payload: bytes) -> float:
    """Take the payload of STOP apart."""
    seconds: float = _TIME.unpack(payload)[0]
    return seconds


def _pack(*values: bytes) -> bytes:
    return b"".join([part for value in values for part in (_LENGTH.pack(len(value)), value)])


def _unpack(payload: bytes) -> Sequence[bytes]:
    values, at = [], 0
    while at < len(payload):
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(payload, at)[0]
        values.append(payload[begin:at])
    return values


def _pack_pairs(pairs: Iterable[tuple[str, str | bytes]]) -> bytes:
    return _pack(*(part if isinstance(part, bytes) else part.encode() for pair in pairs for part in pair))


def _pairs(payload: bytes) -> Iterable[tuple[bytes, bytes]]:
    values = _unpack(payload)
    return zip(values[::2], values[1::2], strict=True)


def _metadata(payload: bytes) -> Metadata:
    decoded = ((key.decode(), value) for key, value in _pairs(payload))
    return tuple((key, value if key.endswith(_BINARY) else value.decode()) for key, value in decoded)


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
