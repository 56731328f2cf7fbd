"""How a server stops: what it tells its clients, in which order, and that it cuts off no request."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from penstock.service import server
from penstock.v1 import inference_pb2_grpc
from tests.service.h2peer import GOAWAY, Peer
from tests.service.rig import WAIT_S, collect, fake, generate, joined, serving, stream, until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
STREAM = "/penstock.v1.InferenceService/Stream"
GENERATE = "/penstock.v1.InferenceService/Generate"


async def test_peers_are_told_to_go_while_what_runs_goes_on():
    async with (
        serving(fake(hold=True), grace_s=WAIT_S) as rig,
        Peer(rig.server.address, initial_window=1 << 20) as peer,
    ):
        running = await peer.call(STREAM, stream("a").SerializeToString())
        await until(lambda: len(rig.engine.seen) == 1)
        stopping = asyncio.create_task(rig.server.stop())
        await peer.until(lambda: peer.of(0, GOAWAY))
        assert not stopping.done()
        assert not peer.ended(running)
        rig.engine.release()
        assert await peer.status(running) == 0
        assert await asyncio.wait_for(stopping, WAIT_S), "all of it came to its end"


async def test_a_client_of_two_servers_goes_on_at_the_other_one():
    async with serving(fake(hold=True), grace_s=2 * WAIT_S) as first, serving() as second:
        target = f"ipv4:{first.server.address},{second.server.address}"
        async with grpc.aio.insecure_channel(target) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            running = asyncio.create_task(collect(stub.Stream(stream("a"))))
            await until(lambda: len(first.engine.seen) == 1)
            stopping = asyncio.create_task(first.server.stop())
            async with asyncio.timeout(WAIT_S):
                while not second.engine.seen:
                    try:
                        reply = await stub.Generate(generate("y"))
                    except grpc.aio.AioRpcError as error:
                        # CANCELLED is what gRPC makes of a call that crosses its GOAWAY on the way.
                        assert error.code().name in ("UNAVAILABLE", "CANCELLED")  # noqa: PT017 -- not always
                        await asyncio.sleep(0.01)
            assert reply.outputs[0].text == "z"
            assert not stopping.done()
            first.engine.release()
            assert joined(await running).outputs[0].text.endswith("z")
        await asyncio.wait_for(stopping, WAIT_S)


async def test_requests_are_taken_for_the_delay_while_health_says_otherwise():
    async with serving(drain_delay_s=600.0, grace_s=WAIT_S) as rig:
        watch = rig.health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        stopping = asyncio.create_task(rig.server.stop())
        assert (await asyncio.wait_for(watch.read(), WAIT_S)).status == NOT_SERVING
        assert await rig.health_of() == NOT_SERVING
        assert await rig.health_of("liveness") == SERVING
        assert (await rig.inference.Generate(generate("y"))).outputs[0].text == "z"
        assert not stopping.done()
        rig.engine.die()  # otherwise there is nothing to wait for
        await asyncio.wait_for(stopping, WAIT_S)


async def test_a_burst_at_the_stop_gets_answers_or_typed_refusals():
    """gRPC hands RPCs over one by one, and ends those that it still has with a bare CANCELLED; without a
    pause that would be nearly all. On a busy machine a few may come so late that this happens to them.
    """
    async with (
        serving(grace_s=WAIT_S) as rig,
        Peer(rig.server.address, initial_window=1 << 20) as peer,
    ):
        burst = [await peer.call(GENERATE, generate("y").SerializeToString()) for _ in range(100)]
        await until(lambda: rig.engine.seen)
        await asyncio.wait_for(rig.server.stop(), WAIT_S)
        await peer.until_closed()
        statuses = [peer.headers(call).get("grpc-status") for call in burst]
        told = [status for status in statuses if status in (b"0", b"14")]  # OK, UNAVAILABLE
        assert len(told) >= 90, statuses


async def test_a_reader_that_reads_nothing_does_not_outlive_the_last_replies(monkeypatch):
    monkeypatch.setattr(server, "_LAST_REPLIES_S", 0.3)
    async with serving(grace_s=0.1) as rig, Peer(rig.server.address) as peer:
        running = await peer.call(STREAM, stream("a", stopping={"ignore_eos": True}).SerializeToString())
        await until(lambda: len(rig.engine.seen) == 1)
        await asyncio.wait_for(rig.server.stop(), WAIT_S)
        await peer.until_closed()
        assert not peer.body(running)


@pytest.mark.parametrize("is_late", [False, True])
async def test_an_engine_that_comes_up_after_the_stop_began_is_ended(monkeypatch, is_late):
    """It takes no request, and its thread ends."""
    begun, gate, ended = threading.Event(), threading.Event(), threading.Event()

    def start() -> None:
        begun.set()
        assert gate.wait(WAIT_S)

    engine = fake(start=start)
    shutdown = engine.shutdown

    def shut_down() -> None:
        shutdown()
        ended.set()

    monkeypatch.setattr(engine, "shutdown", shut_down)
    async with serving(engine, start=False) as rig:
        starting = asyncio.create_task(rig.server.start_engine())
        await until(begun.is_set)
        stopping = asyncio.create_task(rig.server.stop())
        await until(lambda: engine.is_draining)
        if is_late:
            await asyncio.wait_for(stopping, WAIT_S)
            assert not ended.is_set()
        gate.set()
        await asyncio.wait_for(starting, WAIT_S)
        await asyncio.wait_for(stopping, WAIT_S)
        assert not engine.ready
        await until(ended.is_set)


async def test_an_engine_that_fails_to_start_is_ended(monkeypatch):
    def start() -> None:
        raise RuntimeError("no memory")

    engine = fake(start=start)
    ended = threading.Event()
    monkeypatch.setattr(engine, "shutdown", ended.set)
    async with serving(engine, start=False) as rig:
        with pytest.raises(RuntimeError, match="no memory"):
            await rig.server.start_engine()
    assert ended.is_set()
