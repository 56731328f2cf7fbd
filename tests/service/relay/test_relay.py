"""What a front process carries, with both ends of its link in this process."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from penstock.service.listening.grpc_server import refusing_server
from penstock.service.relay.link import MOST_WAITING_BYTES, Kind, Link
from penstock.service.relay.relay import Relay
from tests.service.h2peer import Peer
from tests.service.rig import WAIT_S, until

HEADER_BYTES = 7000
AT_ONCE = 50


async def test_calls_that_begin_and_end_faster_than_they_are_heard_of_fill_no_memory() -> None:
    """Here the engine's process takes nothing for a while, and the peer cancels all calls."""
    heard: list[tuple[int, int]] = []
    lost = asyncio.Event()
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    engine_s_end = Link(lambda kind, call, payload: heard.append((kind, call)), lambda: None)
    engine_s_transport, _ = await loop.create_connection(lambda: engine_s_end, sock=ours)
    link = Link(lambda kind, call, payload: relay.receive(kind, call, payload), lost.set)
    transport, _ = await loop.create_connection(lambda: link, sock=theirs)
    relay = Relay(link, max_calls=1000, tells_identity=False)
    server = refusing_server(relay.refuse, interceptors=[], options=[])
    server.add_registered_method_handlers("s", {"M": relay.handler("/s/M", streaming=True)})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    calls: Any = vars(relay)["_calls"]
    engine_s_transport.pause_reading()
    try:
        async with Peer(f"127.0.0.1:{port}") as peer:
            for _ in range(2 * MOST_WAITING_BYTES // HEADER_BYTES // AT_ONCE):
                metadata = [("large", b"a" * HEADER_BYTES)]
                streams = [await peer.call("/s/M", None, metadata=metadata) for _ in range(AT_ONCE)]
                await until(lambda: len(calls) == AT_ONCE)
                for stream in streams:
                    await peer.reset(stream)
                await until(lambda: not calls)
            assert transport.get_write_buffer_size() < MOST_WAITING_BYTES + 2 * AT_ONCE * HEADER_BYTES
            engine_s_transport.resume_reading()
            last = await peer.call("/s/M", None)
            await until(lambda: len(calls) == 1)
            (number,) = calls
            await until(lambda: (Kind.OPEN, number) in heard)
            await peer.reset(last)
            await until(lambda: (Kind.ENDED, number) in heard)
        opened = [call for kind, call in heard if kind == Kind.OPEN]
        ended = [call for kind, call in heard if kind == Kind.ENDED]
        assert sorted(ended) == opened  # those that the peer resets together end in any order
    finally:
        await server.stop(0)
        engine_s_transport.abort()
        await asyncio.wait_for(lost.wait(), WAIT_S)
