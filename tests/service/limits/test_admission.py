"""Bounds on what goes on at once: the places by themselves, then a real server with small bounds."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from penstock.runtime.errors import ConfigError
from penstock.service.errors import Busy
from penstock.service.limits.admission import Admission, Gate, Kind, address_of, kind_of
from penstock.service.limits.bounds import Bounds, grpc_options
from penstock.v1 import control_pb2, inference_pb2
from tests.service.rig import (
    WAIT_S,
    Failure,
    Rig,
    collect,
    failure_of,
    fake,
    generate,
    serving,
    stream,
    until,
)

GENERATE = "/penstock.v1.InferenceService/Generate"
STREAM = "/penstock.v1.InferenceService/Stream"
TOKENIZE = "/penstock.v1.ControlService/Tokenize"
LOAD = "/penstock.v1.ControlService/GetLoad"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
WATCH = "/grpc.health.v1.Health/Watch"

# -- the places --


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("penstock.v1.InferenceService/Generate", Kind.WORK),
        ("penstock.v1.InferenceService/Stream", Kind.WORK),
        ("penstock.v1.InferenceService/Embed", Kind.WORK),
        ("penstock.v1.InferenceService/Score", Kind.WORK),
        ("penstock.v1.InferenceService/Rerank", Kind.WORK),
        ("penstock.v1.InferenceService/Classify", Kind.WORK),
        ("penstock.v1.InferenceService/UpdateWeights", Kind.UPDATE),
        ("penstock.v1.ControlService/WatchLoad", Kind.WATCH),
        ("penstock.v1.InferenceService/Abort", Kind.CONTROL),
        ("penstock.v1.ControlService/GetLoad", Kind.CONTROL),
        ("penstock.v1.ControlService/Tokenize", Kind.TOKENIZE),
        ("penstock.v1.ControlService/Detokenize", Kind.TOKENIZE),
        ("grpc.health.v1.Health/Watch", Kind.HEALTH),
        ("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", Kind.REFLECTION),
        ("grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Kind.REFLECTION),
        ("some.other.Service/Method", Kind.WORK),
    ],
)
def test_kinds(method: str, kind: Kind) -> None:
    assert kind_of(method) is kind


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.1.2.3:4567", "10.1.2.3"),
        ("ipv6:%5B::1%5D:4567", "::/64"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:80", "2001:db8:1:2::/64"),
        ("ipv6:%5B2001:db8:1:2:9::%5D:80", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:80", "fe80::/64"),
        ("ipv6:%5B::ffff:10.1.2.3%5D:80", "10.1.2.3"),
        ("unix:", None),
        ("unix:/run/penstock.sock", None),
        ("", None),
    ],
)
def test_addresses(peer: str, address: str | None) -> None:
    assert address_of(peer) == address


def test_a_gate_counts_all_addresses_and_connections() -> None:
    gate = Gate("max_rpcs", 5, lambda: 0.0, per_address=3, per_connection=2)
    here = [gate.enter("ipv4:10.0.0.1:1"), gate.enter("ipv4:10.0.0.1:1")]
    assert refusal(gate, "ipv4:10.0.0.1:1") == ("max_rpcs_per_connection", 2)
    here.append(gate.enter("ipv4:10.0.0.1:2"))
    assert refusal(gate, "ipv4:10.0.0.1:2") == ("max_rpcs_per_address", 3)
    others = [gate.enter("ipv4:10.0.0.2:1"), gate.enter("unix:")]
    assert refusal(gate, "ipv4:10.0.0.3:1") == ("max_rpcs", 5)
    assert gate.active == 5
    here.pop(0)()
    others.append(gate.enter("ipv4:10.0.0.1:1"))
    for leave in here + others:
        leave()
    assert (gate.active, gate.num_peers) == (0, 0), "nothing is kept of peers that went"


def refusal(gate: Gate, peer: str) -> tuple[str, int]:
    with pytest.raises(Busy) as caught:
        gate.enter(peer)
    return caught.value.limit, caught.value.most


def test_unix_sockets_have_one_name_for_all_so_only_the_sum_counts() -> None:
    gate = Gate("max_rpcs", 4, lambda: 0.0, per_address=1, per_connection=1)
    for _ in range(4):
        gate.enter("unix:")
    assert refusal(gate, "unix:") == ("max_rpcs", 4)


def test_zero_is_no_bound() -> None:
    gate = Gate("max_rpcs", 0, lambda: 0.0, per_address=0, per_connection=0)
    leaving = [gate.enter("ipv4:10.0.0.1:1") for _ in range(10_000)]
    assert gate.active == 10_000
    for leave in leaving:
        leave()
    assert gate.active == 0


def test_a_refusal_takes_no_place() -> None:
    admission = Admission(Bounds(max_rpcs=1, max_tokenize_rpcs=2))
    leave = admission.enter(Kind.WORK, "ipv4:10.0.0.1:1")
    with pytest.raises(Busy, match="max_rpcs is 1"):
        admission.enter(Kind.TOKENIZE, "ipv4:10.0.0.1:1")
    assert admission.active(Kind.TOKENIZE) == 0
    leave()
    leave = admission.enter(Kind.TOKENIZE, "ipv4:10.0.0.1:1")
    assert admission.active(Kind.WORK) == admission.active(Kind.TOKENIZE) == 1
    leave()
    assert admission.num_peers == 0


def test_one_address_gets_half_of_the_small_ones() -> None:
    admission = Admission(Bounds(max_control_rpcs=4))
    for port in (1, 2):
        admission.enter(Kind.CONTROL, f"ipv4:10.0.0.1:{port}")
    with pytest.raises(Busy, match="max_control_rpcs_per_address is 2"):
        admission.enter(Kind.CONTROL, "ipv4:10.0.0.1:3")
    admission.enter(Kind.CONTROL, "ipv4:10.0.0.2:1")


@pytest.mark.parametrize(
    "name", ["max_rpcs", "max_rpcs_per_connection", "max_connections", "receive_limit_s"]
)
def test_bounds_out_of_range(name: str) -> None:
    options: dict[str, Any] = {name: -1}
    with pytest.raises(ConfigError, match=f"^{name}: must be "):
        Bounds(**options)


def test_what_grpc_is_told() -> None:
    options = dict(grpc_options(Bounds(max_rpcs=0, max_connections=0), 1))
    backlog, hard = (f"grpc.server.max_pending_requests{end}" for end in ("", "_hard_limit"))
    assert 10_000 < options[backlog] < options[hard]
    assert options["grpc.max_concurrent_streams"] > 10_000, "what comes at once is answered"
    assert options["grpc.server_max_unrequested_time_in_server"] >= 600, "and on a busy machine"
    assert "grpc.max_allowed_incoming_connections" not in options
    options = dict(grpc_options(Bounds(max_rpcs=50_000, max_connections=7), 1))
    assert options[backlog] >= 100_000, "all of them may come at once"
    assert options["grpc.max_allowed_incoming_connections"] == 7


# -- the server --


def held(rig: Rig, method: str = GENERATE) -> Any:
    """Make a call whose headers are sent and whose message is not."""
    return rig.channel.stream_stream(method)(wait_for_ready=True)


async def refused(rig: Rig, method: str = GENERATE) -> Failure:
    """Return the failure of a call that sends its headers only."""
    return await failure_of(held(rig, method).read())


def check_busy(failure: Failure, limit: str, most: int) -> None:
    assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "BUSY")
    assert dict(failure.info.metadata) == {"limit": limit, "max": str(most)}
    assert failure.retry_after_s is not None
    assert 0.1 <= failure.retry_after_s <= 60
    assert failure.request_id


def active(rig: Rig, kind: Kind = Kind.WORK) -> int:
    return rig.server.admission.active(kind)


@pytest.mark.parametrize(
    ("bounds", "limit", "most"),
    [
        ({"max_rpcs": 2}, "max_rpcs", 2),
        ({"max_rpcs_per_address": 2}, "max_rpcs_per_address", 2),
        ({"max_rpcs_per_connection": 2}, "max_rpcs_per_connection", 2),
    ],
)
async def test_too_many_rpcs_are_refused_before_their_message(bounds, limit, most) -> None:
    """A call that never sends a message is refused, too. A place is free again as soon as an RPC
    has ended.
    """
    async with serving(fake(hold=True), bounds=Bounds(**bounds)) as rig:
        running = asyncio.ensure_future(rig.inference.Generate(generate("y")))
        await until(lambda: bool(rig.engine.seen))
        other = held(rig)
        await until(lambda: active(rig) == 2)
        check_busy(await refused(rig), limit, most)
        check_busy(await failure_of(rig.inference.Generate(generate("y"))), limit, most)
        check_busy(await failure_of(rig.inference.Stream(stream("y")).read()), limit, most)
        assert len(rig.engine.seen) == 1
        rig.engine.release()
        assert (await running).outputs[0].text == "z"
        await until(lambda: active(rig) == 1)
        assert (await rig.inference.Generate(generate("y"))).outputs[0].text == "z"
        other.cancel()


async def test_a_full_server_answers_control_and_health() -> None:
    async with serving(fake(hold=True), bounds=Bounds(max_rpcs=1)) as rig:
        running = asyncio.ensure_future(rig.inference.Generate(generate("a", request_id="one")))
        await until(lambda: bool(rig.engine.seen))
        check_busy(await refused(rig), "max_rpcs", 1)
        assert (await rig.control.GetLoad(control_pb2.GetLoadRequest())).running_requests == 1
        assert await rig.health_of() == health_pb2.HealthCheckResponse.SERVING
        target = inference_pb2.AbortRequest(request_id_prefix="one")
        assert len((await rig.inference.Abort(target)).results) == 1
        await running
        await until(lambda: active(rig) == 0)


@pytest.mark.parametrize(
    ("method", "kind", "bounds", "limit", "most"),
    [
        (TOKENIZE, Kind.TOKENIZE, {"max_tokenize_rpcs": 4}, "max_tokenize_rpcs_per_address", 2),
        (LOAD, Kind.CONTROL, {"max_control_rpcs": 2}, "max_control_rpcs_per_address", 1),
        (WATCH, Kind.HEALTH, {"max_health_rpcs": 4}, "max_health_rpcs_per_address", 2),
        (REFLECTION, Kind.REFLECTION, {"max_reflection_rpcs": 4}, "max_reflection_rpcs_per_address", 2),
    ],
)
async def test_other_kinds_have_bounds_of_their_own(method, kind, bounds, limit, most) -> None:
    async with serving(bounds=Bounds(**bounds)) as rig:
        calls = [held(rig, method) for _ in range(most)]
        await until(lambda: active(rig, kind) == most)
        check_busy(await refused(rig, method), limit, most)
        assert (await rig.inference.Generate(generate("y"))).outputs[0].text == "z"
        for call in calls:
            call.cancel()
        await until(lambda: active(rig, kind) == 0)


async def test_a_watch_and_a_reflection_stream_hold_their_place() -> None:
    async with serving(bounds=Bounds(max_health_rpcs=2, max_reflection_rpcs=2)) as rig:
        watch = rig.health.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        check_busy(await refused(rig, WATCH), "max_health_rpcs_per_address", 1)
        asking = held(rig, REFLECTION)
        await asking.write(reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString())
        assert b"penstock.v1.InferenceService" in await asking.read()
        check_busy(await refused(rig, REFLECTION), "max_reflection_rpcs_per_address", 1)
        watch.cancel()
        asking.cancel()
        await until(lambda: active(rig, Kind.HEALTH) == active(rig, Kind.REFLECTION) == 0)


async def test_places_come_back_however_a_call_ends() -> None:
    """The client is gone before its message or before its answer; or the call is garbled, refused, aborted,
    or answered.
    """
    async with serving(fake(hold=True), bounds=Bounds(max_rpcs=9)) as rig:
        silent = [held(rig), held(rig, STREAM), held(rig, TOKENIZE)]
        running = rig.inference.Stream(stream("a"))
        waiting = asyncio.ensure_future(rig.inference.Generate(generate("a")))
        await until(lambda: len(rig.engine.seen) == 2)
        await until(lambda: active(rig) == 5)
        assert (await failure_of(rig.raw("InferenceService/Generate", b"\xff"))).reason == "INVALID_FIELD"
        assert (await failure_of(rig.inference.Generate(generate("")))).reason == "INVALID_FIELD"
        for call in silent:
            call.cancel()
        await until(lambda: active(rig) == 2)
        running.cancel()
        waiting.cancel()
        await until(lambda: active(rig) == 0)
        rig.engine.release()
        assert (await rig.inference.Generate(generate("y"))).outputs[0].text == "z"
        await collect(rig.inference.Stream(stream("y")))
        await until(lambda: active(rig) == 0)
        assert rig.server.admission.num_peers == 0


async def test_places_come_back_when_the_connection_is_lost() -> None:
    async with serving(fake(hold=True)) as rig:
        async with grpc.aio.insecure_channel(rig.server.address) as channel:
            calls: list[Any] = [channel.stream_stream(GENERATE)() for _ in range(20)]
            whole: Any = channel.unary_unary(GENERATE)
            calls.append(whole(generate("a").SerializeToString()))
            await until(lambda: active(rig) == 21)
        await until(lambda: active(rig) == 0)
        assert rig.server.admission.num_peers == 0


async def test_a_message_that_does_not_come() -> None:
    """Otherwise a few thousand headers would keep all other calls out for ever."""
    async with serving(bounds=Bounds(receive_limit_s=0.2)) as rig:
        for method in (GENERATE, STREAM, LOAD, WATCH):
            failure = await refused(rig, method)
            assert (failure.code.name, failure.reason) == ("RESOURCE_EXHAUSTED", "STALLED_SENDER")
            assert dict(failure.info.metadata) == {"limit_s": "0.2"}
        await until(lambda: active(rig) == 0)
        assert (await rig.inference.Generate(generate("y"))).outputs[0].text == "z"


async def test_a_call_that_ends_without_a_message() -> None:
    """gRPC's own handlers leave such a call without an answer."""
    async with serving() as rig:
        for method in (GENERATE, STREAM):
            call = held(rig, method)
            await call.done_writing()
            failure = await failure_of(call.read())
            assert (failure.code.name, failure.violations) == (
                "INVALID_ARGUMENT", {"": "the call has no message"}
            )  # fmt: skip


async def test_connections() -> None:
    """The connection beyond the bound is closed. The others go on, and make room when they go."""
    async with serving(bounds=Bounds(max_connections=2)) as rig:
        await rig.inference.Generate(generate("y"))
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(rig.server.address, options) as second:
            call: Any = second.unary_unary(GENERATE)
            await call(generate("y").SerializeToString())
            async with grpc.aio.insecure_channel(rig.server.address, options) as third:
                late: Any = third.unary_unary(GENERATE)
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await late(generate("y").SerializeToString())
                assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
            assert (await rig.inference.Generate(generate("y"))).outputs[0].text == "z"
        # The server may see the end of the second one a little later. Each attempt has a channel of its own:
        # one that was refused waits longer and longer before it connects again.
        async with asyncio.timeout(WAIT_S):
            while not await is_answered(rig.server.address):  # noqa: ASYNC110 -- what is asked has no event
                await asyncio.sleep(0.05)


async def is_answered(address: str) -> bool:
    """Say whether a new connection is taken."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options) as channel:
        call: Any = channel.unary_unary(GENERATE)
        try:
            return bool(await call(generate("y").SerializeToString(), timeout=WAIT_S))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False


async def test_an_unknown_method_is_told_so() -> None:
    async with serving() as rig:
        for method in ("/penstock.v1.InferenceService/Nope", "/some.other.Service/Method"):
            failure = await refused(rig, method)
            assert (failure.code.name, failure.reason) == ("UNIMPLEMENTED", "UNSUPPORTED_FEATURE")
            assert failure.request_id
