"""The life of a server: port, health, reflection, readiness, draining, the engine's death."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from penstock.client.connection.channel import channel_options
from penstock.runtime.errors import ConfigError
from penstock.service.listening.connections import ConnectionOptions
from penstock.service.listening.listen_options import ListenOptions
from penstock.service.options import ServerOptions
from penstock.service.server import PenstockServer
from penstock.service.services import SERVICES
from penstock.service.threads.lanes import in_thread
from penstock.v1 import types_pb2
from tests.service.rig import collect, failure_of, fake, generate, joined, serving, stream, until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_health_says_serving_only_after_warm_up():
    gate = threading.Event()
    async with serving(fake(start=lambda: gate.wait(20)), start=False) as rig:
        assert [await rig.health_of(s) for s in ("", *SERVICES)] == [NOT_SERVING] * 3
        starting = asyncio.create_task(rig.server.start_engine())
        failure = await failure_of(rig.inference.Generate(generate("a")))
        assert (failure.code.name, failure.reason) == ("UNAVAILABLE", "NOT_READY")
        assert await rig.health_of() == NOT_SERVING
        gate.set()
        await asyncio.wait_for(starting, 20)
        assert [await rig.health_of(s) for s in ("", *SERVICES)] == [SERVING] * 3
        await rig.inference.Generate(generate("y"))


async def test_health_of_an_unknown_service():
    async with serving() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await rig.health_of("penstock.v1.Nope")
        assert failure.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_watch_sees_the_engine_die():
    async with serving() as rig:
        watch = rig.health.Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]))
        assert (await watch.read()).status == SERVING
        rig.engine.die()
        assert (await asyncio.wait_for(watch.read(), 20)).status == NOT_SERVING
        assert await rig.health_of("") == NOT_SERVING
        await asyncio.wait_for(rig.server.wait_for_failure(), 20)
        watch.cancel()


async def test_start_engine_raises_what_the_engine_raises():
    def fail():
        raise ConfigError("no room")

    async with serving(fake(start=fail), start=False) as rig:
        with pytest.raises(ConfigError, match="no room"):
            await rig.server.start_engine()
        assert await rig.health_of() == NOT_SERVING


async def test_reflection_lists_services_and_files():
    async with serving() as rig:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(cast("Any", rig.channel))

        async def ask(**fields):
            request = reflection_pb2.ServerReflectionRequest(**fields)
            return await stub.ServerReflectionInfo(iter([request])).read()

        listed = (await ask(list_services="")).list_services_response.service
        assert {s.name for s in listed} >= {*SERVICES, "grpc.health.v1.Health"}
        reply = await ask(file_containing_symbol="penstock.v1.InferenceService")
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(f)
            for f in reply.file_descriptor_response.file_descriptor_proto
        ]
        assert "penstock/v1/inference.proto" in {f.name for f in files}


async def test_port_in_use():
    """The second server fails at once and says why, and the first one goes on."""
    async with serving() as rig:
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use"):
            PenstockServer(ServerOptions(port=rig.server.port))
        assert (await rig.inference.Generate(generate("y"))).outputs[0].text == "z"


async def test_the_port_is_taken_by_grpc_itself(monkeypatch):
    """Without our probe gRPC fails, too, because of so_reuseport=0."""
    async with serving() as rig:
        monkeypatch.setattr("penstock.service.listening.listeners._probe", lambda *_: None)
        with pytest.raises(ConfigError, match="cannot listen on"):
            PenstockServer(ServerOptions(port=rig.server.port))


def test_unknown_host():
    async def build():
        PenstockServer(
            ServerOptions(host="no.such.host.invalid", port=1234, listen=ListenOptions(insecure=True))
        )

    with pytest.raises(ConfigError, match="cannot be resolved"):
        asyncio.run(build())


async def test_ipv6():
    engine = fake()
    server = PenstockServer(ServerOptions(host="::1", port=0))
    assert server.address == f"[::1]:{server.port}"
    await server.start()
    server.attach(engine)
    await server.start_engine()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            call: Any = channel.unary_unary("/penstock.v1.InferenceService/Generate")
            assert b"z" in await call(generate("y").SerializeToString())
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"host": ""}, "host"),
        ({"port": -1}, "port"),
        ({"port": 65536}, "port"),
        ({"stall_limit_s": 0}, "stall_limit_s"),
        ({"stall_limit_s": float("nan")}, "stall_limit_s"),
        ({"grace_s": -1}, "grace_s"),
        ({"grace_s": float("inf")}, "grace_s"),
        ({"drain_delay_s": -1}, "drain_delay_s"),
        ({"watchdog_s": -0.1}, "watchdog_s"),
        ({"watchdog_s": float("inf")}, "watchdog_s"),
        ({"drain_delay_s": float("nan")}, "drain_delay_s"),
        ({"connections": ConnectionOptions(keepalive_s=-1)}, "keepalive_s"),
        ({"connections": ConnectionOptions(max_connection_age_s=float("inf"))}, "max_connection_age_s"),
        ({"connections": ConnectionOptions(max_connection_idle_s=1e7)}, "max_connection_idle_s"),
        ({"connections": ConnectionOptions(keepalive_timeout_s=0)}, "keepalive_timeout_s"),
        ({"max_receive_bytes": 0}, "max_receive_bytes"),
        ({"max_receive_bytes": 2**31}, "max_receive_bytes"),
    ],
)
def test_options_out_of_range(fields, named):
    with pytest.raises(ConfigError, match=f"^{named}: "):
        ServerOptions(**fields)


def test_every_bad_option_is_named():
    with pytest.raises(ConfigError, match=r"host: .*; port: "):
        ServerOptions(host="", port=-1)


async def test_seven_mib_prompt_is_received():
    """It is above gRPC's own limit of 4 MiB; the engine then finds it too long."""
    async with serving() as rig:
        failure = await failure_of(rig.inference.Generate(generate("a" * 7 * 2**20)))
        assert failure.info.metadata["prompt_tokens"] == str(2**20), "of 7 characters at most"


# -- stopping --


async def test_stop_refuses_new_and_finishes_running_requests():
    async with serving(fake(hold=True), grace_s=20) as rig:
        whole = asyncio.ensure_future(rig.inference.Generate(generate("a")))
        parts = asyncio.create_task(collect(rig.inference.Stream(stream("a"))))
        await until(lambda: len(rig.engine.seen) == 2)
        watch = rig.health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        stopping = asyncio.create_task(rig.server.stop())
        assert (await asyncio.wait_for(watch.read(), 20)).status == NOT_SERVING
        await until(lambda: not rig.engine.ready)
        failure = await failure_of(rig.inference.Generate(generate("a")))
        assert failure.code.name == "UNAVAILABLE"
        assert not stopping.done()
        rig.engine.release()
        assert (await asyncio.wait_for(whole, 20)).outputs[0].text.endswith("z")
        assert joined(await parts).outputs[0].text.endswith("z")
        assert await asyncio.wait_for(stopping, 20), "all of it came to its end"


async def test_stop_ends_what_is_left_after_the_grace():
    async with serving(fake(hold=True), grace_s=0.2) as rig:
        whole = asyncio.ensure_future(rig.inference.Generate(generate("a")))
        parts = asyncio.create_task(collect(rig.inference.Stream(stream("a"))))
        await until(lambda: len(rig.engine.seen) == 2)
        rig.engine.step(3)
        assert not await asyncio.wait_for(rig.server.stop(), 20)
        for reply in (await whole, joined(await parts)):
            (output,) = reply.outputs
            assert output.finish.reason == types_pb2.FINISH_REASON_ABORTED
            assert output.finish.message == "the server is shutting down"
            assert output.text == "bcd"


async def test_stop_twice():
    async with serving() as rig:
        first = asyncio.create_task(rig.server.stop())
        assert await rig.server.stop()
        assert await first
        assert await rig.server.stop()


async def test_in_thread_hands_over_results_and_errors():
    assert await in_thread(lambda: 3) == 3

    def fail():
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        await in_thread(fail)


async def test_in_thread_survives_a_cancelled_wait():
    gate = threading.Event()
    waiting = asyncio.ensure_future(in_thread(lambda: gate.wait(20)))
    await asyncio.sleep(0)
    waiting.cancel()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.sweep
async def test_clients_may_ping_while_nothing_is_sent():
    """Every 5 s, as during a long prefill; by default gRPC ends such a connection at the third ping."""
    engine = fake(hold=True)
    # our client's interval, but six times as often
    pinging = channel_options([("grpc.keepalive_time_ms", 5100)])
    async with serving(engine, channel_options=pinging) as rig:
        call = rig.inference.Generate(generate("y"))
        await asyncio.sleep(26)
        engine.release()
        assert (await asyncio.wait_for(call, 20)).outputs[0].text == "z"
