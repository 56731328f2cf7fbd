"""Requests that are on their way to the engine when the stop begins are refused as DRAINING; those in the
engine go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from penstock.service import server
from penstock.service.limits.admission import Kind
from penstock.v1 import control_pb2
from tests.service.cli.test_serve import fake_process
from tests.service.h2peer import DATA, END_STREAM, Peer, frame, grpc_message
from tests.service.listening.test_grpc_server import reasons
from tests.service.rig import CODEC, WAIT_S, Rig, fake, generate, serving, stream, until

GENERATE = "/penstock.v1.InferenceService/Generate"
STREAM = "/penstock.v1.InferenceService/Stream"
TOKENIZE = "/penstock.v1.ControlService/Tokenize"
LOAD = "/penstock.v1.ControlService/GetLoad"
MESSAGES = {
    GENERATE: generate("y"),
    STREAM: stream("y"),
    TOKENIZE: control_pb2.TokenizeRequest(text="y"),
    LOAD: control_pb2.GetLoadRequest(),
}
UNAVAILABLE = 14


async def check_refused(peer: Peer, call: int) -> None:
    """Check that the error says that this server is stopping, and which request it was."""
    assert await peer.status(call) == UNAVAILABLE
    found = reasons(peer, call)
    assert found["reason"] == "DRAINING"
    assert found["request_id"]


async def half_of(peer: Peer, method: str) -> tuple[int, bytes]:
    """Begin a call with its headers and half of its message. Returns the stream, and the other half."""
    message = grpc_message(MESSAGES[method].SerializeToString())
    call = await peer.call(method, None, end=False)
    half = len(message) // 2
    await peer.send(frame(DATA, 0, call, message[:half]))
    return call, frame(DATA, END_STREAM, call, message[half:])


def under_way(rig: Rig) -> int:
    return sum(rig.server.admission.active(kind) for kind in Kind)


@contextlib.asynccontextmanager
async def accepted(peer: Peer, rig: Rig) -> AsyncIterator[None]:
    """Hold a call whose request is in the engine, and which comes to its end although the server stops
    meanwhile.
    """
    running = await peer.call(STREAM, stream("a").SerializeToString())
    await until(lambda: len(rig.engine.seen) == 1)
    yield
    assert not peer.ended(running)
    rig.engine.release()
    assert await peer.status(running) == 0
    assert await asyncio.wait_for(rig.server.stop(), WAIT_S), "all that was accepted came to its end"
    assert len(rig.engine.seen) == 1


@pytest.mark.parametrize("rest", ["comes", "does not come"])
@pytest.mark.parametrize("method", MESSAGES)
async def test_half_a_message_is_refused(method: str, rest: str) -> None:
    async with (
        serving(fake(hold=True), grace_s=WAIT_S) as rig,
        Peer(rig.server.address, initial_window=1 << 20) as peer,
        accepted(peer, rig),
    ):
        call, missing = await half_of(peer, method)
        await until(lambda: rig.serving.calls.num_running == 2)
        stopping = asyncio.create_task(rig.server.stop())
        await until(lambda: rig.serving.calls.is_draining)
        if rest == "comes":
            await peer.send(missing)
        await check_refused(peer, call)
        assert not stopping.done()


@pytest.mark.parametrize("method", MESSAGES)
async def test_what_arrives_later_is_refused_at_its_headers(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = asyncio.Event()
    async with (
        serving(fake(hold=True), grace_s=WAIT_S) as rig,
        Peer(rig.server.address, initial_window=1 << 20) as peer,
        accepted(peer, rig),
    ):
        monkeypatch.setattr(rig.serving.calls, "wait_settled", settled.wait)
        stopping = asyncio.create_task(rig.server.stop())
        await until(lambda: rig.serving.calls.is_draining)
        await check_refused(peer, await peer.call(method, None, end=False))
        settled.set()
        assert not stopping.done()


LONG = "a" * 5_000
"""A text long enough to be tokenized in a lane."""
IN_LANES = {
    GENERATE: generate(LONG),
    STREAM: stream(LONG),
    TOKENIZE: control_pb2.TokenizeRequest(text=LONG),
}


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Yield an event that is set once the tokenizer has a long text, which it keeps until the test has
    ended.
    """
    entered, gate = threading.Event(), threading.Event()
    encode = CODEC.encode

    def encode_held(text: str, **options: Any) -> Any:
        if len(text) >= len(LONG):
            entered.set()
            assert gate.wait(3 * WAIT_S)
        return encode(text, **options)

    monkeypatch.setattr(CODEC, "encode", encode_held)
    yield entered
    gate.set()


@pytest.mark.parametrize("method", IN_LANES)
async def test_what_waits_in_a_lane_is_refused(method: str, held: threading.Event) -> None:
    """The work in the lane does not end before the server does."""
    async with (
        serving(fake(hold=True, max_model_len=9_000), grace_s=WAIT_S) as rig,
        Peer(rig.server.address, initial_window=1 << 20) as peer,
        accepted(peer, rig),
    ):
        call = await peer.call(method, IN_LANES[method].SerializeToString())
        await until(held.is_set)
        stopping = asyncio.create_task(rig.server.stop())
        await check_refused(peer, call)
        assert not stopping.done()


async def test_nobody_waits_for_health_and_reflection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop waits neither for their calls without a message nor for Watches, whose last replies could take
    minutes.
    """
    monkeypatch.setattr(server, "_LAST_REPLIES_S", 600.0)
    async with serving() as rig, Peer(rig.server.address, initial_window=1 << 20) as peer:
        watch = health_pb2.HealthCheckRequest().SerializeToString()
        for message in (watch, None):
            await peer.call("/grpc.health.v1.Health/Watch", message, end=False)
            await peer.call("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", message, end=False)
        await peer.call("/grpc.health.v1.Health/Check", None, end=False)
        await until(lambda: under_way(rig) == 5)
        await asyncio.wait_for(rig.server.stop(), WAIT_S)


@pytest.mark.sweep
async def test_sigterm_refuses_half_a_message_and_finishes_what_runs() -> None:
    with fake_process("--port", "0", "--grace", "60") as process:
        address = process.wait_for(r"ready on (127\.0\.0\.1:\d+)")[1]
        async with Peer(address, initial_window=1 << 20) as peer:
            asked = {"max_tokens": 30, "ignore_eos": True}
            running = await peer.call(STREAM, stream("a", stopping=asked).SerializeToString())
            await peer.message(running)
            halves = [(await half_of(peer, method))[0] for method in (GENERATE, STREAM)]
            process.popen.send_signal(signal.SIGTERM)
            for call in halves:
                await check_refused(peer, call)
            assert await peer.status(running) == 0
        assert await asyncio.to_thread(process.wait) == 0
