"""Thousands of calls at the same moment: each is answered, or told which bound is reached and when to come
back.

By default gRPC's core refuses some of them with a bare CANCELLED as soon as 1,000 wait to be looked at, and
those that have waited for 30 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from penstock.service.limits import bounds
from penstock.service.limits.bounds import Bounds
from penstock.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc
from tests.service.rig import Rig, fake, generate, serving, stream, taken_apart

PATIENCE_S = 500.0
Call = Callable[[Any, Any], Any]


async def outcome(answered: Any) -> str:
    """ "OK", the reason of a typed refusal, or the bare status."""
    try:
        await answered
    except grpc.aio.AioRpcError as error:
        failure = taken_apart(error)
        if failure.info is None:
            return f"bare {failure.code.name}: {failure.message}"
        assert failure.retry_after_s is not None
        assert 0.1 <= failure.retry_after_s <= 60
        assert failure.request_id
        return failure.reason
    return "OK"


@contextlib.asynccontextmanager
async def connections(rig: Rig, count: int) -> AsyncIterator[list[tuple[Any, Any]]]:
    """Stubs of both services on this many connections."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(rig.server.address, options=options))
            for _ in range(count)
        ]
        yield [
            (inference_pb2_grpc.InferenceServiceStub(one), control_pb2_grpc.ControlServiceStub(one))
            for one in channels
        ]


async def burst(count: int, channels: int, call: Call) -> Counter[str]:
    """Make this many calls at once, spread over this many connections. Returns how they ended."""
    async with serving(fake(max_queued_requests=200)) as rig, connections(rig, channels) as stubs:
        async with asyncio.timeout(PATIENCE_S):
            found = Counter(
                await asyncio.gather(*(outcome(call(*stubs[i % channels])) for i in range(count)))
            )
            assert (await rig.inference.Generate(generate("y"))).outputs[0].text == "z", "it goes on"
    assert sum(found.values()) == count
    return found


def generating(inference: Any, control: Any) -> Any:
    return inference.Generate(generate("x"))


def streaming(inference: Any, control: Any) -> Any:
    return whole(inference.Stream(stream("x")))


async def whole(call: Any) -> None:
    async for _ in call:
        pass


def tokenizing(inference: Any, control: Any) -> Any:
    return control.Tokenize(control_pb2.TokenizeRequest(text="a b c"))


@pytest.mark.parametrize(
    "channels", [pytest.param(1, marks=pytest.mark.sweep), pytest.param(4, marks=pytest.mark.ci)]
)
@pytest.mark.parametrize("call", [generating, tokenizing])
async def test_three_thousand_calls_at_once(call: Call, channels: int) -> None:
    found = await burst(3000, channels, call)
    assert set(found) <= {"OK", "QUEUE_FULL", "BUSY"}, found
    # However busy the machine is: so many calls of one address may wait for their message.
    assert found["OK"] >= Bounds().max_receiving_rpcs // 2


@pytest.mark.ci
async def test_more_than_the_server_takes_on_at_once() -> None:
    """While the engine does nothing, exactly as many calls have a place as there are places; all others are
    refused at once.
    """
    engine = fake(hold=True, max_queued_requests=1000)
    bounds = Bounds(max_rpcs=300, max_rpcs_per_address=250, max_rpcs_per_connection=100)
    found: Counter[str] = Counter()

    async def counted(call: Any) -> None:
        found[await outcome(call)] += 1

    async with serving(engine, bounds=bounds) as rig, connections(rig, 4) as stubs:
        calls = [asyncio.ensure_future(counted(generating(*stubs[i % 4]))) for i in range(2000)]
        async with asyncio.timeout(PATIENCE_S):
            while sum(found.values()) < 1750 or len(engine.seen) < 250:  # noqa: ASYNC110 -- has no event
                await asyncio.sleep(0.01)
            assert found == {"BUSY": 1750}
            assert rig.server.admission.active_work == len(engine.seen) == 250
            engine.release()
            await asyncio.gather(*calls)
    assert found == {"BUSY": 1750, "OK": 250}


@pytest.mark.sweep
async def test_calls_may_wait_as_long_as_grpc_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the server stands still. The option, of which an hour is told, is one that gRPC obeys."""
    found: dict[int, Counter[str]] = {}
    for seconds in (1, 60):
        monkeypatch.setattr(bounds, "_UNSEEN_S", seconds)
        async with serving(fake()) as rig, connections(rig, 1) as stubs:
            await rig.health_of()
            calls = [asyncio.ensure_future(outcome(generating(*stubs[0]))) for _ in range(100)]
            await asyncio.sleep(0.01)
            time.sleep(2.5)  # noqa: ASYNC251 -- the loop is the server's, too
            found[seconds] = Counter(await asyncio.gather(*calls))
    assert found[1]["bare CANCELLED: CANCELLED"] > 0
    assert found[60] == {"OK": 100}


@pytest.mark.sweep
@pytest.mark.parametrize(("call", "channels"), [(generating, 8), (streaming, 1), (tokenizing, 8)])
async def test_ten_thousand_calls_at_once(call: Call, channels: int) -> None:
    found = await burst(10_000, channels, call)
    assert set(found) <= {"OK", "QUEUE_FULL", "BUSY"}, found
    # However busy the machine is: so many calls of one address may wait for their message.
    assert found["OK"] >= Bounds().max_receiving_rpcs // 2
