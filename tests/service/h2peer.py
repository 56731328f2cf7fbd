"""A peer that speaks HTTP/2 by hand, so that it can do what no gRPC client does: never open its window, never
read, send frames that make no sense, vanish. Only as much of RFC 9113 and 7541 as tests need.

    async with Peer(server.address) as peer:  # windows of 0: the server can send headers but no data
        stream = await peer.call("/grpc.health.v1.Health/Watch", HealthCheckRequest().SerializeToString())
        await peer.until(lambda: peer.headers(stream))
        await peer.open_window(stream, 1000)
        reply = await peer.message(stream)
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0x0, 0x1, 0x3, 0x4, 0x6, 0x7, 0x8
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
INITIAL_WINDOW_SIZE = 0x4
TRUE_BINARY_METADATA = 0xFE03
"""gRPC's own setting: the values of -bin headers come as they are, not as base64 in Huffman's code."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
WAIT_S = 20.0


@dataclass(frozen=True)
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def is_last(self) -> bool:
        """Whether the server ended the stream with this frame."""
        return self.kind == RST_STREAM or (self.kind in (DATA, HEADERS) and bool(self.flags & END_STREAM))


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Make a frame in the form of the wire."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: bytes) -> bytes:
    """Make a header field that no table remembers, without Huffman's code (RFC 7541, 6.2.2)."""
    return b"\0" + _length(len(name)) + name.encode() + _length(len(value)) + value


def _length(value: int) -> bytes:
    """Make an integer with a prefix of 7 bits (RFC 7541, 5.1)."""
    if value < 127:
        return bytes([value])
    out, value = [127], value - 127
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    return bytes([*out, value])


def grpc_message(data: bytes) -> bytes:
    """Make a message with gRPC's prefix: not compressed, four bytes of length."""
    return struct.pack(">BI", 0, len(data)) + data


@dataclass
class Peer:
    """One connection. It answers SETTINGS and, unless told otherwise, PING. It reads all the time, but
    windows stay as small as they are until `open_window`.
    """

    address: str
    initial_window: int = 0
    """Bytes of DATA that the server may send on each stream."""
    answer_pings: bool = True
    ssl: Any = None
    frames: list[Frame] = field(default_factory=list)
    """Everything that the server sent, in order."""

    def __post_init__(self) -> None:
        self._next_stream = 1
        self._decoder = Decoder()
        self._headers: dict[int, list[tuple[str, bytes]]] = {}
        self.is_closed = False
        """Whether the server closed the connection."""

    async def __aenter__(self) -> Self:
        host, _, port = self.address.rpartition(":")
        self._reader, self.writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=self.ssl)
        settings = struct.pack(">HIHI", INITIAL_WINDOW_SIZE, self.initial_window, TRUE_BINARY_METADATA, 1)
        await self.send(PREFACE + frame(SETTINGS, 0, 0, settings))
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection without any HTTP/2 frame."""
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await self._reading
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def send(self, data: bytes) -> None:
        """Send these bytes, whatever they mean."""
        self.writer.write(data)
        await self.writer.drain()

    async def call(
        self,
        method: str | bytes,
        message: bytes | None,
        *,
        metadata: Sequence[tuple[str, bytes]] = (),
        end: bool = True,
        window: int = 0,
    ) -> int:
        """Begin an RPC and return the number of its stream. `method` is a path such as
        "/grpc.health.v1.Health/Watch".

        Without a message only the headers are sent. `window` is what this stream alone may receive beyond
        `initial_window`.
        """
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        fields = [
            (":method", b"POST"),
            (":scheme", b"http"),
            (":path", method.encode() if isinstance(method, str) else method),
            (":authority", b"peer"),
            ("te", b"trailers"),
            ("content-type", b"application/grpc"),
            *metadata,
        ]
        ended = END_STREAM if end else 0
        block = b"".join(literal(*one) for one in fields)
        flags = END_HEADERS | (ended if message is None else 0)
        sent = frame(HEADERS, flags, stream, block)
        if message is not None:
            sent += frame(DATA, ended, stream, grpc_message(message))
        if window:
            sent += frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", window))
        await self.send(sent)
        return stream

    async def open_window(self, stream: int, size: int) -> None:
        """Let the server send this many bytes more. Stream 0 stands for all streams together, which may
        receive 65535 at first.
        """
        await self.send(frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", size)))

    async def reset(self, stream: int, code: int = 8) -> None:
        """Reset the RPC's stream; the code 8 is CANCEL."""
        await self.send(frame(RST_STREAM, 0, stream, struct.pack(">I", code)))

    # -- what came --

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for something that the server sends, for a bounded time. Fails at once if the server closes
        the connection.
        """
        async with asyncio.timeout(WAIT_S):
            while not condition():
                assert not self.is_closed, f"the server closed the connection; it had sent {self.frames}"
                await asyncio.sleep(0.005)

    async def until_closed(self) -> None:
        """Wait until the server closes the connection, for a bounded time."""
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait([self._reading])

    def of(self, stream: int, kind: int | None = None) -> list[Frame]:
        """Return the frames of a stream; 0 stands for those of the connection."""
        return [f for f in self.frames if f.stream == stream and kind in (None, f.kind)]

    def headers(self, stream: int) -> dict[str, bytes]:
        """Return the fields of headers and trailers so far."""
        return dict(self._headers.get(stream, ()))

    def ended(self, stream: int) -> bool:
        """Say whether the server ended the stream."""
        return any(f.is_last for f in self.of(stream))

    def body(self, stream: int) -> bytes:
        """All data so far, with gRPC's prefixes."""
        return b"".join(f.payload for f in self.of(stream, DATA))

    async def message(self, stream: int) -> bytes:
        """Return the first message of the stream, once it has arrived."""

        def is_whole() -> bool:
            body = self.body(stream)
            return len(body) >= 5 and len(body) >= 5 + struct.unpack(">I", body[1:5])[0]

        await self.until(is_whole)
        body = self.body(stream)
        return body[5 : 5 + struct.unpack(">I", body[1:5])[0]]

    async def status(self, stream: int) -> int:
        """Return the number of the status that the RPC ended with, once it has. Fails if the stream was
        reset.
        """
        await self.until(lambda: self.ended(stream))
        return int(self.headers(stream)["grpc-status"])

    # -- the connection --

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                size = int.from_bytes(head[:3], "big")
                kind, flags, stream = struct.unpack(">BBI", head[3:])
                payload = await self._reader.readexactly(size)
                await self._take(Frame(kind, flags, stream & 0x7FFFFFFF, payload))
        except (asyncio.IncompleteReadError, OSError):
            self.is_closed = True

    async def _take(self, got: Frame) -> None:
        if got.kind == HEADERS:
            assert got.flags & END_HEADERS, "long headers, in several frames, are not understood here"
            self._headers.setdefault(got.stream, []).extend(self._decoder.decode(got.payload))
        self.frames.append(got)
        if got.kind == SETTINGS and not got.flags & ACK:
            await self.send(frame(SETTINGS, ACK, 0))
        if got.kind == PING and not got.flags & ACK and self.answer_pings:
            await self.send(frame(PING, ACK, 0, got.payload))


class Decoder:
    """Decodes the header blocks of one side (RFC 7541). Text in Huffman's code stays as it is: gRPC uses it
    only for -bin headers, and only if TRUE_BINARY_METADATA is not agreed on.
    """

    def __init__(self) -> None:
        self._dynamic: list[tuple[str, bytes]] = []
        self._at = 0
        self._block = b""

    def decode(self, block: bytes) -> list[tuple[str, bytes]]:
        """Return the fields of a block. Only a few fields of the static table have names here."""
        self._block, self._at = block, 0
        fields = []
        while self._at < len(block):
            first = block[self._at]
            if first & 0x80:
                fields.append(self._entry(self._number(7)))
            elif first & 0x40:
                fields.append(self._field(self._number(6)))
                self._dynamic.insert(0, fields[-1])
            elif first & 0x20:
                self._number(5)  # another size of the table, which no test needs
            else:
                fields.append(self._field(self._number(4)))
        return fields

    def _field(self, index: int) -> tuple[str, bytes]:
        name = self._entry(index)[0] if index else self._text().decode()
        return name, self._text()

    def _entry(self, index: int) -> tuple[str, bytes]:
        if index > len(_STATIC):
            return self._dynamic[index - len(_STATIC) - 1]
        return _STATIC[index - 1]

    def _number(self, bits: int) -> int:
        most = (1 << bits) - 1
        value = self._block[self._at] & most
        self._at += 1
        if value < most:
            return value
        for shift in range(0, 35, 7):
            byte = self._block[self._at]
            self._at += 1
            value += (byte & 127) << shift
            if byte < 128:
                break
        return value

    def _text(self) -> bytes:
        size = self._number(7)
        self._at += size
        return self._block[self._at - size : self._at]


_KNOWN = {8: (":status", b"200"), 16: ("accept-encoding", b"gzip, deflate"), 31: ("content-type", b"")}
_STATIC = [_KNOWN.get(i, (f"static-{i}", b"")) for i in range(1, 62)]
"""The part of RFC 7541, appendix A, that servers of gRPC use."""
