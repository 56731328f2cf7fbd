"""Messages that take long to arrive: few at once, and none of them in the way of a whole message."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest

from penstock.service.errors import Busy, StalledSender
from penstock.service.limits import admission as admission_module
from penstock.service.limits.admission import Kind, Receiving
from penstock.service.limits.bounds import UNASKED_BYTES, Bounds
from penstock.v1 import control_pb2
from tests.service.h2peer import DATA, SETTINGS, Peer, frame
from tests.service.rig import Failure, failure_of, generate, serving, until

GENERATE = "/penstock.v1.InferenceService/Generate"
LOAD = "/penstock.v1.ControlService/GetLoad"
HERE, THERE = "ipv4:10.0.0.1:1", "ipv4:10.0.0.2:1"


@pytest.fixture
def no_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every message that is not complete at once needs a place."""
    monkeypatch.setattr(admission_module, "MOMENT_S", 0)


async def never() -> bytes:
    await asyncio.Event().wait()
    raise AssertionError


async def at_once() -> bytes:
    return b"whole"


async def waiting(places: Receiving, peer: str, kind: Kind = Kind.WORK) -> asyncio.Task[bytes]:
    """Wait for a message that does not come; it has a place, or was refused one."""
    task = asyncio.create_task(places.message(kind, peer, never))
    for _ in range(10):
        await asyncio.sleep(0)
    return task


async def test_one_address_has_half_of_the_places(no_moment: None) -> None:
    places = Receiving(4, 0)
    here = [await waiting(places, HERE) for _ in range(3)]
    there = [await waiting(places, THERE) for _ in range(2)]
    with pytest.raises(Busy, match="max_receiving_rpcs_per_address is 2"):
        await here.pop()
    with pytest.raises(Busy, match="max_receiving_rpcs is 4"):
        await (await waiting(places, "ipv4:10.0.0.3:1"))
    assert places.active(Kind.WORK) == 4
    control = await waiting(places, HERE, Kind.CONTROL)
    assert not control.done(), "other kinds have places of their own"
    for peer in (HERE, THERE):
        assert await places.message(Kind.WORK, peer, at_once) == b"whole", "which needs no place"
    for task in [*here, *there, control]:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert places.active(Kind.WORK) == places.active(Kind.CONTROL) == 0


async def test_who_has_a_place_has_it_for_a_time(no_moment: None) -> None:
    places = Receiving(4, 0.1)
    with pytest.raises(StalledSender):
        await places.message(Kind.WORK, HERE, never)
    assert places.active(Kind.WORK) == 0


async def test_zero_is_no_bound(no_moment: None) -> None:
    places = Receiving(0, 0)
    tasks = [await waiting(places, HERE) for _ in range(100)]
    assert places.active(Kind.WORK) == 100
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert places.active(Kind.WORK) == 0


async def test_a_moment_needs_no_place() -> None:
    places = Receiving(2, 0)
    tasks = [await waiting(places, HERE) for _ in range(50)]
    assert places.active(Kind.WORK) == 0
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@pytest.mark.parametrize("method", [GENERATE, LOAD])
async def test_half_messages_are_in_nobodys_way(method: str) -> None:
    """Of six on one connection one has a place; the others are refused, and whole messages are answered."""
    bounds = Bounds(max_receiving_rpcs=2)
    async with serving(bounds=bounds) as rig, Peer(rig.server.address) as peer:
        half = struct.pack(">BI", 0, 2**20) + bytes(8000)
        streams = [await peer.call(method, None, end=False) for _ in range(6)]
        for stream in streams:
            await peer.send(frame(DATA, 0, stream, half))
        assert (await rig.inference.Generate(generate("y"))).outputs[0].text == "z"
        await rig.control.GetLoad(control_pb2.GetLoadRequest())
        await peer.until(lambda: sum(peer.ended(stream) for stream in streams) == 5)
        codes = [int(peer.headers(stream)["grpc-status"]) for stream in streams if peer.ended(stream)]
        assert codes == [8] * 5, "RESOURCE_EXHAUSTED"
        assert (await rig.inference.Generate(generate("y"))).outputs[0].text == "z"
        await rig.control.GetLoad(control_pb2.GetLoadRequest())


async def test_the_refusal_is_a_typed_one() -> None:
    async with serving(bounds=Bounds(max_receiving_rpcs=2)) as rig:
        silent: list[Any] = [rig.channel.stream_stream(GENERATE)() for _ in range(3)]
        ends = [asyncio.ensure_future(failure_of(call.read())) for call in silent]
        await until(lambda: sum(end.done() for end in ends) == 2)
        for end in ends:
            if end.done():
                failure: Failure = end.result()
                assert failure.reason == "BUSY"
                assert dict(failure.info.metadata) == {"limit": "max_receiving_rpcs_per_address", "max": "1"}
                assert failure.retry_after_s is not None
        for call in silent:
            call.cancel()
        await asyncio.wait(ends)
        await until(lambda: rig.server.admission.active_work == 0)


async def test_little_comes_unasked() -> None:
    """What gRPC receives of messages before the server looks at their calls; by default it raises that to 4
    MiB.
    """
    async with serving() as rig, Peer(rig.server.address) as peer:
        await rig.inference.Generate(generate("y"))
        await peer.call(LOAD, b"")
        await peer.until(lambda: peer.of(0, SETTINGS))
        said: dict[int, int] = {}
        for settings in peer.of(0, SETTINGS):
            said.update(dict(struct.iter_unpack(">HI", settings.payload)))
        assert said.get(4, 65_535) <= UNASKED_BYTES, "SETTINGS_INITIAL_WINDOW_SIZE"
