"""Refusals that a peer does not take: they are bounded, and end some time after the stall limit."""

from __future__ import annotations

import asyncio
import gc
import socket
from pathlib import Path

import pytest

from penstock.service.rpcs import ending
from tests.service.h2peer import END_HEADERS, HEADERS, PREFACE, SETTINGS, Peer, frame, literal
from tests.service.key_rig import key, serving_keys
from tests.service.listening.test_grpc_server import reasons
from tests.service.rig import WAIT_S, Rig, generate, until

GENERATE = "/penstock.v1.InferenceService/Generate"
CANCELLED, UNAUTHENTICATED = 1, 16
HERE, THERE = "ipv4:127.0.0.1:1", "ipv4:10.0.0.1:1"


def num_handlers() -> int:
    """How many calls the server has not finished."""
    gc.collect()
    names = [getattr(task.get_coro(), "__qualname__", None) for task in asyncio.all_tasks()]
    return sum("_schedule_rpc_coro" in (name or "") for name in names)


async def check_refused_in_words(peer: Peer) -> None:
    stream = await peer.call(GENERATE, None, end=False)
    assert await peer.status(stream) == UNAUTHENTICATED
    assert reasons(peer, stream)["reason"] == "UNAUTHENTICATED"


async def check_cancelled(rig: Rig, peer: Peer) -> None:
    stream = await peer.call(GENERATE, None, end=False)
    async with asyncio.timeout(WAIT_S):
        while not peer.ended(stream):
            await rig.health_of()  # grpc.aio's main task holds each call until the next one comes
            await asyncio.sleep(0.01)
    assert "grpc-status-details-bin" not in peer.headers(stream)
    assert int(peer.headers(stream).get("grpc-status", CANCELLED)) == CANCELLED


@pytest.mark.parametrize(("peers", "most"), [((HERE, HERE), 4), ((THERE, "ipv4:10.0.0.2:1"), 2)])
async def test_refusals_beside_too_many_others_are_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peers: tuple[str, ...], most: int
) -> None:
    """Those of one address, and all together. Calls that have a place are answered nevertheless."""
    monkeypatch.setattr(ending, "MAX_REFUSALS", most)
    secret = [("authorization", b"Bearer psk_a")]
    async with (
        serving_keys(tmp_path / "keys.json", key("a")) as rig,
        Peer(rig.server.address, initial_window=65_535) as peer,
    ):
        await check_refused_in_words(peer)
        await until(lambda: rig.server.sends.refusals.active == 0)
        leave = [rig.server.sends.refusals.enter(other) for other in peers]
        for _ in range(3):
            await check_cancelled(rig, peer)
        stream = await peer.call(GENERATE, generate("y").SerializeToString(), metadata=secret)
        assert await peer.status(stream) == 0
        leave.pop()()
        await check_refused_in_words(peer)
        for one in leave:
            one()
        await until(lambda: num_handlers() == 0 and rig.server.sends.refusals.active == 0)


def deaf(rig: Rig) -> socket.socket:
    """Make a connection whose other end never reads, and has little room for what it is sent."""
    host, _, port = rig.server.address.rpartition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    connection.setblocking(False)
    return connection


def headers(stream: int) -> bytes:
    fields = [
        (":method", b"POST"),
        (":scheme", b"http"),
        (":path", GENERATE.encode()),
        (":authority", b"peer"),
        ("te", b"trailers"),
        ("content-type", b"application/grpc"),
    ]
    return frame(HEADERS, END_HEADERS, stream, b"".join(literal(*one) for one in fields))


@pytest.mark.sweep
async def test_what_a_deaf_peer_does_not_take_is_gone_after_the_stall_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It calls until as many refusals are stuck as one address may have. Further calls are ended at once, and
    the stuck ones some time after the stall limit.
    """
    monkeypatch.setattr(ending, "MAX_REFUSALS", 200)
    monkeypatch.setattr(ending, "LAST_WORDS_S", 0.5)
    loop = asyncio.get_running_loop()
    async with serving_keys(tmp_path / "keys.json", key("a"), stall_limit_s=1.5) as rig:
        connection = deaf(rig)
        try:
            await loop.sock_sendall(connection, PREFACE + frame(SETTINGS, 0, 0))
            most, stream = 0, 1
            async with asyncio.timeout(3 * WAIT_S):
                while most < 100:
                    await loop.sock_sendall(connection, b"".join(headers(stream + 2 * i) for i in range(50)))
                    stream += 100
                    await asyncio.sleep(0.01)
                    most = max(most, rig.server.sends.refusals.active)
            assert most == 100
            async with asyncio.timeout(3 * WAIT_S):
                while rig.server.sends.refusals.active or num_handlers():  # noqa: ASYNC110 -- has no event
                    await asyncio.sleep(0.1)
            async with Peer(rig.server.address) as peer:
                await check_refused_in_words(peer)
        finally:
            connection.close()
