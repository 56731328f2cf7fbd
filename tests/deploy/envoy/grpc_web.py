"""A client of gRPC-Web on plain HTTP/1.1, written from the description of the protocol (PROTOCOL-WEB.md)."""

from __future__ import annotations

import base64
import http.client
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.message import Message
from google.rpc import status_pb2  # type: ignore[import-untyped]  # ships no hints

TRAILERS = 0x80
"""The flag of the frame that holds trailers."""


@dataclass(frozen=True, slots=True)
class WebReply:
    """What a call was answered."""

    http_status: int
    messages: Sequence[bytes]
    trailers: Mapping[str, str]
    """From the last frame, or from the headers where the call was refused before any message."""

    @property
    def code(self) -> int:
        return int(self.trailers["grpc-status"])

    @property
    def status(self) -> status_pb2.Status:
        """The status with its details."""
        packed = self.trailers["grpc-status-details-bin"]
        return status_pb2.Status.FromString(base64.b64decode(packed + "=" * (-len(packed) % 4)))


def call(
    address: str,
    method: str,
    request: Message,
    headers: Mapping[str, str] | None = None,
    *,
    text: bool = False,
) -> WebReply:
    """Call a method. With `text`, both bodies are base64, as browsers without streams of bytes want it."""
    kind = "application/grpc-web-text" if text else "application/grpc-web+proto"
    packed = request.SerializeToString()
    body = struct.pack(">BI", 0, len(packed)) + packed
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request(
            "POST",
            f"/{method}",
            base64.b64encode(body) if text else body,
            {"content-type": kind, "accept": kind, "x-grpc-web": "1", **(headers or {})},
        )
        reply = connection.getresponse()
        found = list(frames(_from_base64(reply.read()) if text else reply.read()))
        named = {name.lower(): value for name, value in reply.getheaders()}
    finally:
        connection.close()
    ends = [payload for flag, payload in found if flag & TRAILERS]
    assert len(ends) <= 1
    trailers = _parsed(ends[0]) if ends else named
    return WebReply(reply.status, [payload for flag, payload in found if not flag & TRAILERS], trailers)


def frames(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the flag and the payload of each frame: a byte, four bytes of length, big-endian, and the
    payload.
    """
    at = 0
    while at < len(body):
        flag, size = struct.unpack_from(">BI", body, at)
        assert len(body) >= at + 5 + size, "a frame is cut"
        yield flag, body[at + 5 : at + 5 + size]
        at += 5 + size


def _from_base64(body: bytes) -> bytes:
    """Decode parts that each have a padding of their own, one after the other."""
    return b"".join(base64.b64decode(body[at : at + 4]) for at in range(0, len(body), 4))


def _parsed(payload: bytes) -> dict[str, str]:
    lines = payload.decode("ascii").split("\r\n")
    return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
