"""grpc.health.v1: its statuses from the first moment to the last, and that no watcher can block others."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.service.lifecycle.health import Health
from penstock.service.limits.admission import Kind
from penstock.service.options import ServerOptions
from penstock.service.rpcs import ending
from penstock.service.rpcs.interceptors import PenstockInterceptor
from penstock.service.server import LIVENESS, READINESS, PenstockServer
from penstock.service.telemetry.tracing.service_spans import Telemetry
from penstock.v1 import control_pb2, inference_pb2, weights_pb2
from tests.service.h2peer import Peer
from tests.service.rig import WAIT_S, Rig, failure_of, fake, generate, read_all, serving, stream, until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
WATCH = "/grpc.health.v1.Health/Watch"


def asked(service: str = "") -> bytes:
    return health_pb2.HealthCheckRequest(service=service).SerializeToString()


async def watch_without_reading(peer: Peer, service: str = "") -> int:
    """Start a Watch with a window of 0. Its status has been sent once the headers have arrived."""
    watch = await peer.call(WATCH, asked(service))
    await peer.until(lambda: peer.headers(watch))
    assert not peer.body(watch)
    return watch


# -- before the engine is there --


@contextlib.asynccontextmanager
async def empty_server() -> AsyncIterator[Rig]:
    """Run a server that has no engine yet."""
    server = PenstockServer(ServerOptions(port=0, grace_s=0.0))
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        try:
            yield Rig(fake(), server, channel)
        finally:
            await server.stop()


async def test_health_answers_before_the_engine_is_there():
    async with empty_server() as rig:
        assert [await rig.health_of(name) for name in READINESS] == [NOT_SERVING] * 3
        assert await rig.health_of(LIVENESS) == SERVING


async def test_all_else_is_refused_before_the_engine_is_there():
    async with empty_server() as rig:
        for call in (
            rig.inference.Generate(generate("a")),
            _rest(rig.inference.Stream(stream("a"))),
            rig.inference.Abort(inference_pb2.AbortRequest(request_id_prefix="r")),
            rig.inference.UpdateWeights(iter([weights_pb2.UpdateWeightsRequest()])),
            rig.control.GetServerInfo(control_pb2.GetServerInfoRequest()),
            rig.control.GetLoad(control_pb2.GetLoadRequest()),
        ):
            failure = await failure_of(call)
            assert (failure.code.name, failure.reason) == ("UNAVAILABLE", "NOT_READY")


async def test_the_same_connection_is_served_once_the_engine_is_there():
    async with empty_server() as rig:
        watch = rig.health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == NOT_SERVING
        rig.server.attach(rig.engine)
        assert (await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())).model == "fake"
        assert await rig.health_of() == NOT_SERVING
        await rig.server.start_engine()
        assert (await asyncio.wait_for(watch.read(), WAIT_S)).status == SERVING
        assert (await rig.inference.Generate(generate("y"))).outputs[0].text == "z"


# -- peers that read nothing --


async def test_a_watcher_that_reads_nothing_does_not_keep_the_server_from_ready():
    gate = threading.Event()
    async with serving(fake(start=lambda: gate.wait(WAIT_S)), start=False) as rig:
        starting = asyncio.create_task(rig.server.start_engine())
        async with Peer(rig.server.address) as peer:
            for name in READINESS:
                await watch_without_reading(peer, name)
            gate.set()
            await asyncio.wait_for(starting, WAIT_S)
            assert [await rig.health_of(name) for name in READINESS] == [SERVING] * 3


async def test_a_watcher_that_reads_nothing_does_not_keep_the_server_from_stopping():
    async with serving() as rig, Peer(rig.server.address) as peer:
        await watch_without_reading(peer)
        assert await asyncio.wait_for(rig.server.stop(), WAIT_S)
        await peer.until_closed()


async def test_a_watcher_that_reads_nothing_does_not_keep_others_from_the_news():
    async with serving() as rig, Peer(rig.server.address) as peer:
        await watch_without_reading(peer)
        watch = rig.health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        rig.engine.die()
        assert (await asyncio.wait_for(watch.read(), WAIT_S)).status == NOT_SERVING
        watch.cancel()


async def test_a_watcher_that_reads_nothing_gives_all_it_held_back(monkeypatch):
    """Also its place among the calls for health, which probes need, too."""
    monkeypatch.setattr(ending, "LAST_WORDS_S", 0.2)
    async with serving(stall_limit_s=0.2) as rig, Peer(rig.server.address) as peer:
        watch = await watch_without_reading(peer)
        await until(lambda: rig.server.admission.active(Kind.HEALTH) == 0)
        assert await rig.health_of() == SERVING  # gRPC holds the latest call until the next one comes
        await peer.until(lambda: peer.ended(watch))


async def test_one_that_reads_late_is_told_what_holds_then():
    async with serving() as rig, Peer(rig.server.address) as peer:
        watch = await watch_without_reading(peer)
        await peer.open_window(watch, 1 << 16)
        reply = health_pb2.HealthCheckResponse.FromString(await peer.message(watch))
        assert reply.status == SERVING


# -- those that read --


async def test_a_watch_ends_with_the_server_and_does_not_delay_it():
    async with serving() as rig:
        watch = rig.health.Watch(health_pb2.HealthCheckRequest())
        alive = rig.health.Watch(health_pb2.HealthCheckRequest(service=LIVENESS))
        assert (await watch.read()).status == SERVING
        assert (await alive.read()).status == SERVING
        stopping = asyncio.create_task(rig.server.stop())
        assert [reply.status for reply in await _rest(watch)] == [NOT_SERVING]
        assert await watch.code() is grpc.StatusCode.OK
        assert await _rest(alive) == []
        await asyncio.wait_for(stopping, WAIT_S)


async def test_list_has_every_service():
    async with serving() as rig:
        call: Any = rig.channel.unary_unary(
            "/grpc.health.v1.Health/List",
            request_serializer=lambda data: data,
            response_deserializer=vars(health_pb2)["HealthListResponse"].FromString,
        )
        listed = (await call(b"")).statuses
        assert {name: one.status for name, one in listed.items()} == dict.fromkeys(
            (*READINESS, LIVENESS), SERVING
        )


@contextlib.asynccontextmanager
async def only_health(health: Health) -> AsyncIterator[tuple[str, Any]]:
    """Run a server that has only health, and yield its address and a stub."""
    server = grpc.aio.server(interceptors=[PenstockInterceptor(Telemetry())])
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield address, health_pb2_grpc.HealthStub(channel)
    await server.stop(None)


async def test_a_watched_service_may_come_later():
    health = Health()
    async with only_health(health) as (_, stub):
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="later"))
        assert (await watch.read()).status == UNKNOWN
        health.set("later", serving=True)
        assert (await asyncio.wait_for(watch.read(), WAIT_S)).status == SERVING
        watch.cancel()
        await until(lambda: health.num_watchers == 0)


async def test_watchers_are_bounded():
    health = Health(max_watchers=3)
    health.set("", serving=True)
    async with only_health(health) as (_, stub):
        first, second = (stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2))
        assert (await first.read()).status == (await second.read()).status == SERVING
        refused = await failure_of(stub.Watch(health_pb2.HealthCheckRequest()).read())
        assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "BUSY")
        # Whatever one address does, others can watch, because health needs no key.
        assert dict(refused.info.metadata) == {"limit": "max_watchers_per_address", "max": "2"}
        first.cancel()
        await until(lambda: health.num_watchers == 1)
        third = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await third.read()).status == SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING


async def test_no_address_has_the_places_of_all_watchers():
    health = Health(max_watchers=3)
    health.set("", serving=True)

    class Context:
        def __init__(self, host: str) -> None:
            self.host = host

        def peer(self) -> str:
            return f"ipv4:{self.host}:1"

        async def send_initial_metadata(self, metadata: Any) -> None: ...

        async def write(self, reply: Any) -> None: ...

    def watch(host: str) -> asyncio.Task[None]:
        return asyncio.create_task(health.Watch(health_pb2.HealthCheckRequest(), Context(host)))

    tasks = [watch(host) for host in ("10.0.0.1", "10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.3")]
    await until(lambda: tasks[2].done() and tasks[4].done())
    assert [task.done() for task in tasks] == [False, False, True, False, True]
    assert "max_watchers_per_address is 2" in str(tasks[2].exception())
    assert "max_watchers is 3" in str(tasks[4].exception())
    health.close()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert health.num_watchers == 0


async def test_a_watcher_that_reads_nothing_gives_its_place_back():
    health = Health(max_watchers=1, write_limit_s=0.2)
    health.set("", serving=True)
    async with only_health(health) as (address, stub), Peer(address) as peer:
        watch = await watch_without_reading(peer)
        await until(lambda: health.num_watchers == 0)
        other = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await other.read()).status == SERVING
        await peer.open_window(watch, 1 << 16)  # it reads after all, and gets the reason
        assert await peer.status(watch) == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


async def _rest(call: Any) -> list[Any]:
    return [message async for message in read_all(call)]


async def test_errors_of_health_are_like_all_others() -> None:
    async with serving() as rig:
        unknown = await failure_of(
            rig.health.Check(health_pb2.HealthCheckRequest(service="penstock.v1.Nope"))
        )
        assert (unknown.code, unknown.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_SERVICE")
        assert dict(unknown.info.metadata) == {"service": "penstock.v1.Nope"}
        assert unknown.request_id
