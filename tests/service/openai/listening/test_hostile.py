"""Peers that speak HTTP slowly, hugely or wrongly. Others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from starlette.requests import Request
from starlette.responses import Response

from penstock.openai import app
from penstock.openai.endpoints import Endpoint
from penstock.openai.reading import read_body
from penstock.openai.replying import Events, event, json_response, sse
from penstock.openai.schemas.base import RequestBody
from penstock.openai.serving import protocol
from tests.service.openai.rig import FrontRig, front_rig
from tests.service.rig import WAIT_S, until

HEAD = b"POST /size HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
LARGE = 8 << 20


class Body(RequestBody):
    text: str


@dataclass
class Seen:
    """What became of the replies of one test."""

    ended: list[str] = field(default_factory=list)


def endpoints(seen: Seen) -> list[Endpoint]:
    async def size(request: Request) -> Response:
        return json_response({"size": len((await read_body(request, Body)).text)})

    async def large(_: Request) -> Response:
        return Response(b"x" * LARGE)

    async def flood(request: Request) -> Response:
        async def events() -> Events:
            try:
                while True:
                    yield event(b"x" * 65536)
                    await asyncio.sleep(0)  # as a stream of the server does, which waits for its next message
            finally:
                seen.ended.append("flood")

        return await sse(request, events())

    return [
        *app.ENDPOINTS,
        Endpoint("POST", "/size", size, "Counts characters.", Body),
        Endpoint("GET", "/large", large, "Sends much."),
        Endpoint("GET", "/flood", flood, "Sends without end."),
    ]


@contextlib.asynccontextmanager
async def hostile_rig(seen: Seen | None = None, **settings: float) -> AsyncIterator[FrontRig]:
    async with front_rig(endpoints=endpoints(seen or Seen()), settings=settings) as rig:
        yield rig


async def serves(rig: FrontRig) -> None:
    """Others are served."""
    assert (await rig.http.get("/v1/models")).status_code == 200


@contextlib.asynccontextmanager
async def peer(rig: FrontRig) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*rig.address)
    try:
        yield reader, writer
    finally:
        writer.close()


async def told(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Read the status and the code of the error that the front answers with, before it closes the
    connection.
    """
    async with asyncio.timeout(WAIT_S):
        data = await reader.read()
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    "sent", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nhost: x\r\n", b"\r\n"], ids=lambda sent: repr(sent)
)
async def test_headers_that_do_not_end_are_given_up(sent: bytes) -> None:
    async with hostile_rig(header_timeout_s=0.2) as rig, peer(rig) as (reader, writer):
        writer.write(sent)
        assert await told(reader) == (408, "header_timeout")
        await serves(rig)


async def test_headers_that_dribble_are_given_up() -> None:
    async with hostile_rig(header_timeout_s=0.4) as rig, peer(rig) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\n")
        dribble = asyncio.create_task(dribbling(writer))
        # What is sent after the answer makes the kernel reset the connection, which may overtake the answer.
        with contextlib.suppress(ConnectionResetError):
            assert await told(reader) == (408, "header_timeout")
        dribble.cancel()


async def dribbling(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"a: b\r\n")
        await asyncio.sleep(0.05)


async def test_the_second_request_of_a_connection_is_held_to_the_time_too() -> None:
    """Also where only empty lines come between the two, which HTTP allows."""
    async with hostile_rig(header_timeout_s=0.3) as rig, peer(rig) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
        writer.write(b"\r\n")
        assert await told(reader) == (408, "header_timeout")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"a" * 5000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"a" * 5000,
        b"GET /" + b"a" * 5000,
    ],
    ids=["path", "header", "headers", "endless header", "endless path"],
)
async def test_headers_that_are_too_large_are_refused(sent: bytes) -> None:
    async with hostile_rig(max_header_bytes=4096) as rig, peer(rig) as (reader, writer):
        writer.write(sent)
        assert await told(reader) == (431, "headers_too_large")
        await serves(rig)


async def closed(reader: asyncio.StreamReader) -> bytes:
    """Read what comes until the front has closed the connection."""
    data = b""
    async with asyncio.timeout(WAIT_S):
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(1 << 20):
                data += part
    return data


@pytest.mark.parametrize("trailer", [b"a: b\r\n", b"a"], ids=["many", "endless"])
async def test_trailers_that_do_not_end_are_refused(trailer: bytes) -> None:
    async with hostile_rig(max_header_bytes=4096) as rig, peer(rig) as (reader, writer):
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n")
        closing = asyncio.create_task(closed(reader))
        with contextlib.suppress(ConnectionError):
            while not closing.done():
                writer.write(trailer * 500)
                await writer.drain()
                await asyncio.sleep(0)
        assert b"200 OK" not in await closing
        await until(lambda: rig.front.life.num_running == 0)
        await serves(rig)


async def test_requests_that_wait_for_an_earlier_one_are_bounded() -> None:
    seen = Seen()
    async with hostile_rig(seen) as rig, peer(rig) as (reader, writer):
        writer.write(
            b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n" + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 1000
        )
        await closed(reader)
        await until(lambda: seen.ended == ["flood"])
        await serves(rig)


async def test_a_few_requests_may_be_sent_at_once() -> None:
    async with hostile_rig() as rig, peer(rig) as (reader, writer):
        writer.write(b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n" * 5)
        async with asyncio.timeout(WAIT_S):
            for _ in range(5):
                assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 404")


async def test_other_protocols_are_not_spoken() -> None:
    """Neither WebSocket nor HTTP/2: the request is answered as if it had not asked for them."""
    wanted = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\r\n"
    async with hostile_rig(header_timeout_s=0.3) as rig, peer(rig) as (reader, writer):
        writer.write(b"GET /nothing HTTP/1.1\r\nhost: x\r\n" + wanted)
        async with asyncio.timeout(WAIT_S):
            assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 404")
        writer.write(b"\x81\x05hello")
        await closed(reader)
        await serves(rig)


@pytest.mark.parametrize("cut", [0, 40, -3], ids=["whole", "in the headers", "in the body"])
async def test_a_request_that_offers_http_2_keeps_its_body(cut: int) -> None:
    """Java's HttpClient offers it with the first request of each connection."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAA\r\n"
    offering = HEAD + offer + b'content-length: 12\r\n\r\n{"text":"a"}'
    plain = HEAD + b'content-length: 12\r\n\r\n{"text":"b"}'
    async with hostile_rig() as rig, peer(rig) as (reader, writer):
        writer.write(offering[:cut])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(offering[cut:] + plain)
        async with asyncio.timeout(WAIT_S):
            for _ in range(2):
                assert (await reader.readuntil(b'{"size":1}')).startswith(b"HTTP/1.1 200")


async def test_a_tunnel_is_refused() -> None:
    async with hostile_rig() as rig, peer(rig) as (reader, writer):
        writer.write(b"CONNECT /health HTTP/1.1\r\nhost: x\r\n\r\n\x16\x03\x01")
        assert await told(reader) == (405, "method_not_allowed")


async def test_what_is_not_http_is_refused() -> None:
    async with hostile_rig() as rig, peer(rig) as (reader, writer):
        writer.write(b"\x16\x03\x01 hello\r\n\r\n")
        assert await told(reader) == (400, "invalid_http")


ASKED = b"GET /health HTTP/1.1\r\n"
POSTED = b"POST /size HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = b'c\r\n{"text":"a"}\r\n0\r\n\r\n'


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        # RFC 9112, 3.2: one Host, also where it is empty, and a valid one
        (ASKED + b"\r\n", 400),
        (ASKED + b"host: x\r\nHost: x\r\n\r\n", 400),
        (ASKED + b"host: a b\r\n\r\n", 400),
        (ASKED + b"host: user@x\r\n\r\n", 400),
        (ASKED + b"host: x/y\r\n\r\n", 400),
        (ASKED + b"host: x:y\r\n\r\n", 400),
        (ASKED + b"host: %4\r\n\r\n", 400),
        (ASKED + b"host: \xc3\xa9\r\n\r\n", 400),
        (ASKED + b"host: ::1\r\n\r\n", 400),
        (b"GET /health HTTP/1.0\r\nhost: x\r\nhost: y\r\n\r\n", 400),
        (b"GET /health HTTP/1.0\r\n\r\n", 200),
        (ASKED + b"host:\r\n\r\n", 200),
        (ASKED + b"host: \t my_host.example:8000 \r\n\r\n", 200),
        (ASKED + b"host: 127.0.0.1:\r\n\r\n", 200),
        (ASKED + b"host: [::1]:80\r\n\r\n", 200),
        (ASKED + b"host: %c3%A9\r\n\r\n", 200),
        # RFC 9112, 6.1: chunked is the last transfer coding, and all are understood
        (POSTED + b"transfer-encoding: gzip\r\n\r\n" + CHUNKED, 400),
        (POSTED + b"transfer-encoding: identity\r\n\r\n" + CHUNKED, 400),
        (POSTED + b"transfer-encoding: xchunked\r\n\r\n" + CHUNKED, 400),
        (POSTED + b"transfer-encoding: chunked;a=b\r\n\r\n" + CHUNKED, 400),
        (POSTED + b"transfer-encoding: chunked, gzip\r\n\r\n" + CHUNKED, 400),
        (POSTED + b"transfer-encoding: chunked\r\ntransfer-encoding: gzip\r\n\r\n" + CHUNKED, 400),
        (POSTED + b"transfer-encoding: chunked\r\ncontent-length: 12\r\n\r\n" + CHUNKED, 400),
        (ASKED + b"host: x\r\ntransfer-encoding: gzip\r\n\r\n", 400),
        (POSTED + b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNKED, 501),
        (POSTED + b"transfer-encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED, 501),
        (POSTED + b"Transfer-Encoding: CHUNKED \r\n\r\n" + CHUNKED, 200),
    ],
    ids=repr,
)
async def test_heads_are_checked_as_http_wants_it(sent: bytes, status: int) -> None:
    async with hostile_rig() as rig, peer(rig) as (reader, writer):
        writer.write(sent)
        async with asyncio.timeout(WAIT_S):
            if status == 200:
                assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
                return
        code = "unsupported_transfer_encoding" if status == 501 else "invalid_http"
        assert await told(reader) == (status, code)
        await until(lambda: rig.front.life.num_running == 0)


async def test_a_reply_is_not_mixed_with_a_refusal_of_the_next_request() -> None:
    seen = Seen()
    async with hostile_rig(seen) as rig, peer(rig) as (reader, writer):
        writer.write(b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            await reader.readuntil(b"data: ")
            writer.write(b"this is not HTTP\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                while data := await reader.read(1 << 20):
                    assert b"invalid_http" not in data
        await until(lambda: seen.ended == ["flood"])


async def test_a_body_that_is_announced_too_large_is_refused_at_once() -> None:
    async with hostile_rig(max_body_bytes=4096) as rig, peer(rig) as (reader, writer):
        writer.write(HEAD + b"content-length: 4097\r\nconnection: close\r\n\r\n")
        assert await told(reader) == (413, "body_too_large")


async def test_a_body_that_grows_too_large_is_refused() -> None:
    async with hostile_rig(max_body_bytes=4096) as rig, peer(rig) as (reader, writer):
        writer.write(HEAD + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n")
        writer.write(b"1000\r\n" + b" " * 4096 + b"\r\n1\r\n \r\n")
        assert await told(reader) == (413, "body_too_large")


async def test_a_body_that_does_not_arrive_is_given_up() -> None:
    async with hostile_rig(receive_limit_s=0.3) as rig, peer(rig) as (reader, writer):
        writer.write(HEAD + b"content-length: 100\r\nconnection: close\r\n\r\n{")
        assert await told(reader) == (408, "body_timeout")
        await serves(rig)


async def test_a_body_that_nobody_reads_may_not_go_on_for_ever() -> None:
    async with hostile_rig(header_timeout_s=0.3) as rig, peer(rig) as (reader, writer):
        writer.write(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 404")
            with contextlib.suppress(ConnectionError):
                while not reader.at_eof():
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.05)
        await serves(rig)


async def test_bodies_on_their_way_are_bounded_together() -> None:
    async with hostile_rig(max_body_bytes=4096, max_waiting_body_bytes=5000) as rig, peer(rig) as (_, first):
        first.write(HEAD + b"content-length: 4096\r\n\r\n" + b" " * 4000)
        await until(lambda: rig.front.incoming.held == 4000)
        refused = await rig.http.post("/size", json={"text": "a" * 2000})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "busy")
        assert refused.headers["retry-after"] == "1"
        first.close()
        await until(lambda: rig.front.incoming.held == 0)
        assert (await rig.http.post("/size", json={"text": "a" * 2000})).json() == {"size": 2000}


async def test_a_large_body_is_read_in_a_thread() -> None:
    async with hostile_rig() as rig:
        assert (await rig.http.post("/size", json={"text": "a" * 1_000_000})).json() == {"size": 1_000_000}


def deaf(rig: FrontRig, path: str) -> socket.socket:
    """Make a peer that asks and takes no more of the reply than its small buffer holds."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect(rig.address)
    made.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    return made


async def test_a_stream_that_is_not_read_is_ended() -> None:
    seen = Seen()
    async with hostile_rig(seen, stall_limit_s=0.3) as rig:
        with deaf(rig, "/flood"):
            await until(lambda: seen.ended == ["flood"])
            await until(lambda: rig.front.life.num_running == 0)
            await serves(rig)
        page = (await rig.http.get("/metrics")).text
        assert 'penstock_openai_closed_connections_total{reason="stalled_reader"} 1.0' in page


async def test_a_large_reply_that_is_not_read_does_not_stay_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "DRAIN_BYTES_PER_S", 1 << 40)
    async with hostile_rig(stall_limit_s=0.3) as rig:
        with deaf(rig, "/large"):
            reason = 'penstock_openai_closed_connections_total{reason="stalled_reader"} 1.0'
            async with asyncio.timeout(WAIT_S):
                while reason not in (await rig.http.get("/metrics")).text:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)


async def test_connections_are_bounded() -> None:
    async with hostile_rig(max_connections=2, max_connections_per_address=2) as rig:
        async with peer(rig) as (_, one), peer(rig) as (_, two):
            for writer in (one, two):
                writer.write(b"GET ")
            async with peer(rig) as (reader, _):
                assert await told(reader) == (503, "too_many_connections")
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(Exception):
                    if (await rig.http.get("/health")).status_code == 200:
                        break
                await asyncio.sleep(0.05)


async def test_an_address_cannot_take_all_connections() -> None:
    async with hostile_rig(max_connections_per_address=1) as rig, peer(rig), peer(rig) as (reader, _):
        assert await told(reader) == (503, "too_many_connections")


async def test_a_caller_who_finds_no_connection_is_told_when_to_come_back() -> None:
    async with hostile_rig(max_connections_per_address=1) as rig, peer(rig), peer(rig) as (reader, _):
        async with asyncio.timeout(WAIT_S):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        headers = dict(line.split(b": ") for line in head.lower().split(b"\r\n")[1:])
        assert (headers[b"retry-after"], headers[b"connection"]) == (b"1", b"close")
        assert headers[b"content-length"] == str(len(body)).encode()
