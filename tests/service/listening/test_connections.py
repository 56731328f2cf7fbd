"""How long connections live: pings to silent peers, the greatest age, and the longest time without an RPC."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from penstock.service.listening.connections import ConnectionOptions
from penstock.service.listening.listen_options import ListenOptions
from tests.service.h2peer import ACK, GOAWAY, PING, Peer
from tests.service.rig import WAIT_S, fake, serving, stream, until
from tests.service.tls_rig import listening

STREAM = "/penstock.v1.InferenceService/Stream"
WATCH = "/grpc.health.v1.Health/Watch"
IN_TIME_S = 1.5
"""A connection lives at least so long, because its call must come before, also where the machine is busy."""


def pings(peer: Peer) -> int:
    return len([f for f in peer.of(0, PING) if not f.flags & ACK])


async def test_a_peer_that_answers_no_ping_is_gone():
    """What its request holds is freed, too, although the request generates nothing."""
    connections = ConnectionOptions(keepalive_s=IN_TIME_S, keepalive_timeout_s=0.3)
    async with (
        serving(fake(hold=True), connections=connections) as rig,
        Peer(rig.server.address, initial_window=1 << 20, answer_pings=False) as peer,
    ):
        await peer.call(STREAM, stream("a").SerializeToString())
        await until(lambda: len(rig.engine.seen) == 1)
        await peer.until_closed()
        assert pings(peer)
        await until(lambda: rig.engine.cancelled)


async def test_a_peer_that_answers_pings_stays_and_is_asked_again_and_again():
    """Without an RPC, and with an RPC that sends nothing. By default gRPC stops at the second ping."""
    connections = ConnectionOptions(keepalive_s=0.2, keepalive_timeout_s=WAIT_S)
    async with (
        serving(fake(hold=True), connections=connections) as rig,
        Peer(rig.server.address, initial_window=1 << 20) as silent,
        Peer(rig.server.address, initial_window=1 << 20) as waiting,
    ):
        running = await waiting.call(STREAM, stream("a").SerializeToString())
        await silent.until(lambda: pings(silent) >= 5)
        await waiting.until(lambda: pings(waiting) >= 5)
        rig.engine.release()
        assert await waiting.status(running) == 0


async def test_an_old_connection_is_closed_once_its_streams_have_ended():
    connections = ConnectionOptions(max_connection_age_s=IN_TIME_S)
    async with (
        serving(fake(hold=True), connections=connections) as rig,
        Peer(rig.server.address, initial_window=1 << 20) as peer,
    ):
        running = await peer.call(STREAM, stream("a").SerializeToString())
        await peer.until(lambda: peer.of(0, GOAWAY))
        assert not peer.ended(running)
        rig.engine.release()
        assert await peer.status(running) == 0
        await peer.until_closed()


async def test_the_streams_of_an_old_connection_may_be_cut_off():
    connections = ConnectionOptions(max_connection_age_s=IN_TIME_S, max_connection_age_grace_s=0.2)
    async with (
        serving(fake(hold=True), connections=connections) as rig,
        Peer(rig.server.address, initial_window=1 << 20) as peer,
    ):
        await peer.call(STREAM, stream("a").SerializeToString())
        await until(lambda: len(rig.engine.seen) == 1)
        await peer.until_closed()
        await until(lambda: rig.engine.cancelled)


async def test_an_idle_connection_is_closed_and_one_with_an_rpc_is_not():
    connections = ConnectionOptions(max_connection_idle_s=IN_TIME_S)
    async with (
        serving(connections=connections) as rig,
        Peer(rig.server.address, initial_window=1 << 20) as watching,
        Peer(rig.server.address, initial_window=1 << 20) as idle,
    ):
        watch = await watching.call(WATCH, b"")
        await watching.message(watch)
        await idle.until_closed()
        rig.engine.die()
        await watching.until(lambda: len(watching.of(watch, 0)) > 1)


def test_zero_switches_each_off():
    off = ConnectionOptions(keepalive_s=0, max_connection_idle_s=0)
    assert not off.problems()
    arguments = dict(off.arguments())
    never = 2**31 - 1
    for name in ("keepalive_time_ms", "max_connection_age_ms", "max_connection_idle_ms"):
        assert arguments[f"grpc.{name}"] == never


@pytest.mark.parametrize("tls", [False, True])
async def test_a_connection_that_says_nothing_is_closed(tls: bool):
    """With TLS and without."""
    connections = ConnectionOptions(handshake_timeout_s=0.5)
    listen = listening() if tls else ListenOptions()
    async with serving(connections=connections, listen=listen) as rig:
        async with asyncio.timeout(WAIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
            with contextlib.closing(writer):
                while await reader.read(1000):  # without TLS the server speaks first
                    pass
