"""Peers that speak HTTP/1.0, as nginx does to its upstreams unless it is told otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import json

from tests.service.openai.rig import FrontRig, front_rig
from tests.service.rig import WAIT_S


async def asked(rig: FrontRig, request: bytes) -> tuple[list[bytes], bytes]:
    """Return the lines of the reply's head, and all that comes after it until the connection is closed."""
    reader, writer = await asyncio.open_connection(*rig.address)
    with contextlib.closing(writer):
        writer.write(request)
        async with asyncio.timeout(WAIT_S):
            data = await reader.read()
    head, _, body = data.partition(b"\r\n\r\n")
    return head.split(b"\r\n"), body


async def test_a_stream_is_not_cut_into_chunks() -> None:
    """HTTP/1.0 does not know them (RFC 9112, 6.1): the end of the connection is the end of the reply."""
    sent = json.dumps({"model": "fake", "prompt": "a", "max_tokens": 3, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    async with front_rig() as rig:
        lines, body = await asked(rig, head % len(sent) + sent)
    assert lines[0] == b"HTTP/1.1 200 OK"
    assert b"connection: close" in lines
    assert not [line for line in lines if line.startswith(b"transfer-encoding")]
    events = body.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert all(json.loads(event.removeprefix(b"data: ")) for event in events[:-2])


async def test_a_whole_reply_has_its_length() -> None:
    async with front_rig() as rig:
        lines, body = await asked(rig, b"GET /v1/models HTTP/1.0\r\n\r\n")
        head_only, nothing = await asked(rig, b"HEAD /v1/models HTTP/1.0\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in lines
    assert f"content-length: {len(body)}".encode() in head_only
    assert nothing == b""
