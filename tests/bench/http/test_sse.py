"""The HTTP client of the bench, on canned answers; and what it says about a turn, counted by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from bench.http.__main__ import Ask, Stream, Turn, over_http
from bench.http.sse import Connection, HttpError, parts_of

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = (
    b'data: {"choices": [{"text": "a "}]}\n\n'
    b': a comment\n\ndata: {"choices": [{"text": "lock"}]}\n\n'
    b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'
    b"data: [DONE]\n\n"
)


@contextlib.asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[Connection]:
    """Open a connection to a server that gives these answers, one for each request, byte by byte."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while left:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                for byte in left.pop(0):
                    writer.write(bytes((byte,)))
                    await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    connection = Connection(host, port)
    try:
        yield connection
    finally:
        await connection.close()
        server.close()


def chunked(body: bytes, size: int) -> bytes:
    """Make a body in chunks of this size, and its end."""
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in [*parts, b""])


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
async def test_a_stream_is_read_however_it_is_cut_and_the_connection_serves_the_next(size: int) -> None:
    answer = HEAD + chunked(EVENTS, size)
    async with answering(answer, answer) as connection:
        for _ in range(2):
            found = await over_http(connection, "m", Ask("x", 2))
            assert (found.text, found.tokens, found.messages) == ("a lock", 2, 3)
            assert found.first_s > 0


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}",
        HEAD + chunked(EVENTS.replace(b"data: [DONE]\n\n", b""), 50),
        HEAD + chunked(b'data: {"error": {"message": "no"}}\n\ndata: [DONE]\n\n', 50),
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    ],
    ids=["status", "no end", "an error midway", "no stream"],
)
async def test_what_is_no_whole_stream_is_an_error(answer: bytes) -> None:
    async with answering(answer) as connection:
        with pytest.raises((HttpError, asyncio.IncompleteReadError)):
            await over_http(connection, "m", Ask("x", 2))


def test_a_chunk_without_a_choice_has_no_text() -> None:
    assert parts_of(b'{"choices": [], "usage": {"completion_tokens": 5}}') == (None, 5)
    assert parts_of(b'{"choices": [{"text": ""}]}') == ("", None)


def test_the_figures_of_a_turn() -> None:
    streams = (Stream("a", 10, 4, 0.010), Stream("b", 20, 6, 0.030), Stream("c", 30, 10, 0.020))
    turn = Turn(2.0, streams, server_s=0.002, front_s=0.001)
    assert turn.tokens_per_s == 30.0
    assert turn.first_ms == pytest.approx(20.0)
    assert turn.micros(turn.server_s) == pytest.approx(100.0)
