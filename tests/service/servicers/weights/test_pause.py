"""Pause and Resume on the fake engine, which says itself what it was asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from penstock.v1 import control_pb2, weights_pb2
from tests.service.rig import Rig, failure_of, fake, generate, serving, stream, until
from tests.support.scheduler.fake_runner import WEIGHT_BYTES

WAIT, ABORT, KEEP, RECOMPUTE = 1, 2, 3, 4
POLICIES = {ABORT: "aborted", KEEP: "kept", RECOMPUTE: "recomputed"}


async def pause(rig: Rig, in_flight: Any = 0, **fields: Any) -> control_pb2.PauseResponse:
    request = control_pb2.PauseRequest(in_flight=in_flight, **fields)
    reply: control_pb2.PauseResponse = await rig.control.Pause(request, timeout=20)
    return reply


async def is_paused(rig: Rig) -> bool:
    return bool((await rig.control.GetLoad(control_pb2.GetLoadRequest(), timeout=20)).paused)


async def running(rig: Rig, prompt: str = "a") -> Any:
    """Start a Generate that runs, and makes no token before the engine is told to step."""
    before = len(rig.engine.seen)
    call = asyncio.ensure_future(rig.inference.Generate(generate(prompt)))
    await until(lambda: len(rig.engine.seen) > before)
    return call


async def test_a_paused_server_makes_no_tokens_and_says_so() -> None:
    async with serving(fake()) as rig:
        assert not await is_paused(rig)
        assert await pause(rig) == control_pb2.PauseResponse(in_flight=weights_pb2.InFlightReport())
        assert await is_paused(rig)
        call = rig.inference.Stream(stream("y"))
        started = (await asyncio.wait_for(call.read(), 20)).started
        assert started.paused, "nobody need wait for a token to know that"
        assert rig.engine.load().num_waiting == 1
        await rig.control.Resume(control_pb2.ResumeRequest(), timeout=20)
        assert not await is_paused(rig)
        assert (await asyncio.wait_for(call.read(), 20)).delta.text == "z"
        call.cancel()
        again = rig.inference.Stream(stream("y"))
        assert not (await asyncio.wait_for(again.read(), 20)).started.paused
        again.cancel()


async def test_resume_of_a_server_that_is_not_paused_is_ok() -> None:
    async with serving(fake()) as rig:
        await rig.control.Resume(control_pb2.ResumeRequest(), timeout=20)


@pytest.mark.parametrize("policy", POLICIES)
async def test_what_became_of_the_running_requests(policy: int) -> None:
    async with serving(fake(hold=True)) as rig:
        call = await running(rig)
        report = (await pause(rig, policy)).in_flight
        assert report == weights_pb2.InFlightReport(**{POLICIES[policy]: 1})
        await rig.control.Resume(control_pb2.ResumeRequest(), timeout=20)
        rig.engine.release()
        await asyncio.wait_for(call, 20)


@pytest.mark.parametrize("in_flight", [0, WAIT])
async def test_a_pause_that_waits_comes_after_the_running_requests(in_flight: int) -> None:
    """An unset policy means WAIT."""
    async with serving(fake(hold=True)) as rig:
        call = await running(rig)
        pausing = asyncio.ensure_future(pause(rig, in_flight))
        await until(lambda: bool(rig.engine.waiting_changes))
        assert not await is_paused(rig)
        rig.engine.release()
        assert (await call).outputs[0].text == "bcdefghijklmnopqrstuvwxyz"
        assert (await pausing).in_flight == weights_pb2.InFlightReport(waited=1)


async def test_a_pause_that_waits_too_long_is_taken_back() -> None:
    async with serving(fake(hold=True)) as rig:
        call = await running(rig)
        timeout = Duration(seconds=0, nanos=50_000_000)
        failure = await failure_of(pause(rig, WAIT, drain_timeout=timeout))
        assert (failure.code.name, failure.reason) == ("DEADLINE_EXCEEDED", "DRAIN_TIMEOUT")
        assert failure.info.metadata["timeout_s"] == "0.05"
        rig.engine.release()
        await asyncio.wait_for(call, 20)
        assert not await is_paused(rig)


@pytest.mark.parametrize("how", ["deadline", "cancel", "gone"])
async def test_a_client_that_gives_up_takes_the_pause_back(how: str) -> None:
    async with serving(fake(hold=True)) as rig:
        call = await running(rig)
        async with grpc.aio.insecure_channel(rig.server.address) as channel:
            other = Rig(rig.engine, rig.server, channel)
            timeout_s = 0.2 if how == "deadline" else 60
            pausing = other.control.Pause(control_pb2.PauseRequest(), timeout=timeout_s)
            await until(lambda: bool(rig.engine.waiting_changes))
            if how == "cancel":
                pausing.cancel()
            elif how == "gone":
                await channel.close(None)
            with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                await pausing
        await until(
            lambda: rig.engine.waiting_changes[0].done.cancelled() if rig.engine.waiting_changes else True
        )
        rig.engine.release()
        await asyncio.wait_for(call, 20)
        assert not await is_paused(rig)


async def test_memory_is_freed() -> None:
    async with serving(fake(page_size=1)) as rig:
        await rig.inference.Generate(generate("abcd", stopping={"max_tokens": 1}))
        assert (await pause(rig, free_kv_cache=True)).freed_bytes == 4, "one for each page"
        assert (await pause(rig, offload_weights=True)).freed_bytes == WEIGHT_BYTES


async def test_requests_that_are_kept_need_the_cache() -> None:
    async with serving(fake()) as rig:
        failure = await failure_of(pause(rig, KEEP, free_kv_cache=True))
        assert failure.violations == {"free_kv_cache": "the requests that are kept need the cache"}
        assert not await is_paused(rig)


async def test_waiting_for_requests_that_a_pause_keeps_is_refused() -> None:
    async with serving(fake(hold=True)) as rig:
        call = await running(rig)
        await pause(rig, KEEP)
        failure = await failure_of(pause(rig, WAIT))
        assert (failure.code.name, failure.reason) == ("FAILED_PRECONDITION", "PAUSED")
        assert (await pause(rig, ABORT)).in_flight.aborted == 1
        await asyncio.wait_for(call, 20)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "policy": ({"in_flight": 9}, "in_flight"),
    "negative time": ({"drain_timeout": Duration(seconds=-1)}, "drain_timeout"),
    "no time": ({"drain_timeout": Duration(seconds=1, nanos=-1)}, "drain_timeout"),
    "a time that has no effect": ({"in_flight": KEEP, "drain_timeout": Duration(seconds=1)}, "drain_timeout"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_fields_are_named(name: str) -> None:
    fields, field = BAD[name]
    async with serving(fake()) as rig:
        failure = await failure_of(pause(rig, **fields))
        assert (failure.reason, list(failure.violations)) == ("INVALID_FIELD", [field])
        assert not await is_paused(rig)


async def test_a_server_that_stops_takes_a_waiting_pause_back() -> None:
    engine = fake(hold=True)
    async with serving(engine, grace_s=20.0) as rig:
        call = await running(rig)
        pausing = asyncio.ensure_future(failure_of(pause(rig)))
        await until(lambda: bool(engine.waiting_changes))
        stopping = asyncio.ensure_future(rig.server.stop())
        assert (await pausing).reason == "DRAINING"
        engine.release()
        assert (await call).outputs[0].text.endswith("z")
        assert await stopping
    assert not engine.is_paused
