"""Turns of messages that are on their way in."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

from penstock.service.bounds import Bounds
from penstock.service.receiving import Turns
from penstock.v1 import control_pb2
from tests.service.h2peer import DATA, WINDOW_UPDATE, Peer, frame
from tests.service.rig import generate, serving, until

GENERATE = "/penstock.v1.InferenceService/Generate"


class Senders:
    """Messages that come when the test says so."""

    def __init__(self, receiving: Turns) -> None:
        self._receiving = receiving
        self.came: dict[str, asyncio.Event] = {}
        self.fetched: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, *peers: str) -> None:
        for peer in peers:
            self.came[peer] = asyncio.Event()
            self.tasks[peer] = asyncio.create_task(self._send(peer))
        await self.settle()

    async def end(self, *peers: str) -> None:
        for peer in peers:
            self.came[peer].set()
        await self.settle()

    async def settle(self) -> None:
        """Everybody who can go on has gone on."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def _send(self, peer: str) -> None:
        async with self._receiving.turn(peer):
            self.fetched.append(peer)
            await self.came[peer].wait()


def peers(host: int, count: int) -> list[str]:
    return [f"ipv4:10.0.0.{host}:{port}" for port in range(count)]


async def test_one_address_has_half_of_the_turns() -> None:
    receiving = Turns(4)
    senders = Senders(receiving)
    first, second, third = peers(1, 5), peers(2, 2), peers(3, 1)
    await senders.begin(*first)
    assert senders.fetched == first[:2]
    await senders.begin(*second)
    assert senders.fetched == first[:2] + second, "others wait for none of them"
    await senders.begin(*third)
    assert senders.fetched == first[:2] + second, "now all turns are taken"
    await senders.end(second[0])
    assert senders.fetched == first[:2] + second + third
    await senders.end(*first, second[1], *third)
    assert senders.fetched == first[:2] + second + third + first[2:], "in the order in which they came"
    assert receiving.num_addresses == 0


async def test_who_is_gone_gives_the_turn_back() -> None:
    receiving = Turns(2)
    senders = Senders(receiving)
    has_it, waits, next_one = peers(1, 3)
    await senders.begin(has_it, waits, next_one)
    senders.tasks[waits].cancel()
    senders.tasks[has_it].cancel()
    await senders.settle()
    assert senders.fetched == [has_it, next_one]
    await senders.end(next_one)
    assert receiving.num_addresses == 0


async def test_zero_is_any_number() -> None:
    senders = Senders(Turns(0))
    many = peers(1, 100)
    await senders.begin(*many)
    assert senders.fetched == many
    await senders.end(*many)


async def test_connections_of_a_unix_socket_are_one_address() -> None:
    senders = Senders(Turns(2))
    await senders.begin("unix:", "unix:b")
    assert senders.fetched == ["unix:", "unix:b"]
    await senders.end("unix:", "unix:b")


async def test_a_call_without_a_message_has_a_turn_until_it_ends() -> None:
    """Of two turns one address has one: the honest call waits for the silent one. Control does not."""
    async with serving(bounds=Bounds(max_receiving_rpcs=2, receive_limit_s=60)) as rig:
        silent: Any = rig.channel.stream_stream(GENERATE)()
        await until(lambda: rig.server.admission.active_work == 1)
        honest = asyncio.ensure_future(rig.inference.Generate(generate("y")))
        await until(lambda: rig.server.admission.active_work == 2)
        await rig.control.GetLoad(control_pb2.GetLoadRequest())
        await rig.health_of()
        assert not rig.engine.seen
        silent.cancel()
        assert (await honest).outputs[0].text == "z"


async def test_only_a_message_whose_turn_it_is_is_fetched() -> None:
    """Of a message of 1 MiB the server has room for 64 KiB, and for all of it once it is its turn."""
    head = struct.pack(">BI", 0, 2**20)
    async with serving(bounds=Bounds(max_receiving_rpcs=4)) as rig, Peer(rig.server.address) as peer:
        streams = [await peer.call(GENERATE, None, end=False) for _ in range(6)]
        for stream in streams:
            await peer.send(frame(DATA, 0, stream, head))
        await until(lambda: rig.server.admission.active_work == 6)
        await peer.until(lambda: all(granted(peer, stream) >= 2**20 - 2**16 for stream in streams[:2]))
        status = await peer.call("/penstock.v1.ControlService/GetLoad", b"")
        await peer.open_window(status, 1000)
        assert await peer.status(status) == 0, "all that the server had to say before is said"
        assert [granted(peer, stream) < 2**16 for stream in streams] == [False] * 2 + [True] * 4
        await peer.reset(streams[0])
        await peer.until(lambda: granted(peer, streams[2]) >= 2**20 - 2**16)


def granted(peer: Peer, stream: int) -> int:
    """Bytes that the peer may send on the stream, beyond the 64 KiB at first."""
    updates = peer.of(stream, WINDOW_UPDATE)
    return sum(int.from_bytes(update.payload, "big") for update in updates)
