"""Control at an address of its own: which address serves which RPC, and who may do what at the
main address.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from penstock.service.gateways import vllm_service
from penstock.service.listening.listen_options import ListenOptions
from penstock.service.rpcs.surface import CONTROLLING, GENERATING
from penstock.v1 import adapters_pb2, control_pb2, inference_pb2, types_pb2
from tests.service.rig import Rig, collect, failure_of, fake, generate, joined, serving, stream, until
from tests.service.tls_rig import install, listening, shown

READING = (
    *("GetModelInfo", "GetServerInfo", "GetLoad", "Tokenize", "Detokenize", "GetVocabulary"),
    "ListAdapters",
)


@asynccontextmanager
async def both(engine: Any = None, **options: Any) -> AsyncIterator[tuple[Rig, Rig]]:
    """Serve the main address, and the address of control."""
    options = {"listen": ListenOptions(control_port=0)} | options
    async with serving(engine, **options) as main:
        address = main.server.addresses.control_address
        assert address is not None
        async with grpc.aio.insecure_channel(address) as channel:
            yield main, Rig(main.engine, main.server, channel)


@pytest.mark.parametrize("name", READING)
async def test_what_only_reads_is_at_both(name: str) -> None:
    async with both() as rigs:
        for rig in rigs:
            fields = {"text": "a"} if name == "Tokenize" else {}
            messages = adapters_pb2 if name.endswith("Adapters") else control_pb2
            await getattr(rig.control, name)(getattr(messages, f"{name}Request")(**fields), timeout=20)


async def test_flush_is_at_the_control_address_only() -> None:
    async with both() as (main, control):
        failure = await failure_of(main.control.FlushCache(control_pb2.FlushCacheRequest()))
        assert (failure.code.name, failure.reason) == ("UNIMPLEMENTED", "SERVED_ELSEWHERE")
        port = main.server.addresses.control_port
        assert failure.message == f"FlushCache is not served at this address, but at the control port, {port}"
        await control.control.FlushCache(control_pb2.FlushCacheRequest(), timeout=20)


async def test_each_rpc_that_controls_is_refused_at_the_main_address() -> None:
    """At the control address the servicer itself answers."""
    async with both() as (main, control):
        for path in sorted(CONTROLLING):
            if path.endswith(("UpdateWeights", "PushAdapter")):
                continue
            method = path.removeprefix("/penstock.v1.")
            assert (await failure_of(main.raw(method, b""))).reason == "SERVED_ELSEWHERE", path
            if path.endswith(("CommitWeights", "DiscardWeights")):
                assert (await failure_of(control.raw(method, b""))).reason == "INVALID_FIELD", path
            elif path.endswith(("Profile", "Adapter")):
                assert (await failure_of(control.raw(method, b""))).reason == "UNSUPPORTED_FEATURE", path
            else:
                await control.raw(method, b"")


async def test_weights_are_updated_at_the_control_address_only() -> None:
    async with both() as (main, control):
        reasons = [
            (await failure_of(rig.inference.UpdateWeights(iter(())))).reason for rig in (main, control)
        ]
        assert reasons == ["SERVED_ELSEWHERE", "INVALID_FIELD"]


async def test_nothing_is_generated_at_the_control_address() -> None:
    async with both() as (main, control):
        failures = [
            await failure_of(control.inference.Generate(generate("y"))),
            await failure_of(collect(control.inference.Stream(stream("y")))),
        ]
        assert [f.reason for f in failures] == ["SERVED_ELSEWHERE"] * 2
        assert (
            failures[0].message == "Generate is not served at this address, but at the server's main address"
        )
        assert not main.engine.seen
        assert (await main.inference.Generate(generate("y"), timeout=20)).outputs[0].text == "z"
        assert joined(await collect(main.inference.Stream(stream("y")))).outputs[0].text == "z"


async def test_every_rpc_is_at_one_address_at_least() -> None:
    vllm_generate = f"/{vllm_service.SERVICE.full_name}/Generate"  # of its RPCs the only one that generates
    methods = {
        f"/{service.full_name}/{method.name}"
        for service in (
            inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
            control_pb2.DESCRIPTOR.services_by_name["ControlService"],
        )
        for method in service.methods
    }
    everywhere = {f"/penstock.v1.ControlService/{name}" for name in READING}
    everywhere |= {"/penstock.v1.InferenceService/Abort", "/penstock.v1.ControlService/WatchLoad"}
    assert everywhere | GENERATING | CONTROLLING == {*methods, vllm_generate}
    assert not GENERATING & CONTROLLING
    assert not everywhere & (GENERATING | CONTROLLING)


@pytest.mark.parametrize("target", [{"all": inference_pb2.AllRequests()}, {"request_id_prefix": "r"}])
async def test_everything_is_aborted_from_the_control_address_only(target: dict[str, Any]) -> None:
    """Whoever names ids knows them, and may abort at either address."""
    async with both(fake(hold=True)) as (main, control):
        running = asyncio.ensure_future(main.inference.Generate(generate("a", request_id="r1")))
        other = asyncio.ensure_future(main.inference.Generate(generate("a", request_id="r2")))
        await until(lambda: len(main.engine.seen) == 2)
        failure = await failure_of(main.inference.Abort(inference_pb2.AbortRequest(**target)))
        assert failure.reason == "SERVED_ELSEWHERE"
        assert "control port" in failure.message
        by_id = inference_pb2.AbortRequest(request_ids=inference_pb2.RequestIds(ids=["r2"]))
        await main.inference.Abort(by_id, timeout=20)
        assert (await other).outputs[0].finish.reason == types_pb2.FINISH_REASON_ABORTED
        assert not running.done()
        await control.inference.Abort(inference_pb2.AbortRequest(**target), timeout=20)
        assert (await running).outputs[0].finish.reason == types_pb2.FINISH_REASON_ABORTED


async def test_both_have_health_and_reflection() -> None:
    async with both() as rigs:
        for rig in rigs:
            assert await rig.health_of() == health_pb2.HealthCheckResponse.SERVING
            call: Any = rig.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
            assert b"penstock.v1.ControlService" in await call(iter([b"\x3a\x00"]), timeout=20).read()


async def test_both_end_when_the_server_stops() -> None:
    async with both() as (main, control):
        watches = [rig.health.Watch(health_pb2.HealthCheckRequest()) for rig in (main, control)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await main.server.stop()
        for rig in (main, control):
            failure = await failure_of(rig.control.GetLoad(control_pb2.GetLoadRequest()))
            assert failure.code is grpc.StatusCode.UNAVAILABLE


async def test_without_a_control_port_all_is_at_one_address() -> None:
    async with serving() as rig:
        assert rig.server.addresses.control_address is None
        await rig.control.FlushCache(control_pb2.FlushCacheRequest(), timeout=20)
        await rig.inference.Abort(inference_pb2.AbortRequest(all=inference_pb2.AllRequests()), timeout=20)


async def test_a_replaced_certificate_is_shown_at_both(tmp_path: Any) -> None:
    install(tmp_path, "server")
    tls = listening(tmp_path)
    listen = ListenOptions(control_port=0, tls_cert=tls.tls_cert, tls_key=tls.tls_key)
    async with serving(listen=listen) as rig:
        ports = (rig.server.port, rig.server.addresses.control_port)
        assert [await shown(port) for port in ports] == ["first"] * 2
        install(tmp_path, "renewed")
        assert [await shown(port) for port in ports] == ["second"] * 2
