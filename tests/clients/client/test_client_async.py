"""The asyncio client against the handwritten server."""

from __future__ import annotations

import asyncio
import inspect

import grpc
import grpc.aio
import pytest

from penstock import client as api
from penstock.client import AbortOutcome, AsyncClient, Client, FlushedCache, NotReady, Tokens, TracingStatus
from penstock.v1 import control_pb2, inference_pb2


@pytest.fixture
async def client(server):
    async with AsyncClient(server.addr) as made:
        yield made


async def until_set(event):
    assert await asyncio.to_thread(event.wait, 30)


def test_it_has_the_methods_of_the_sync_client():
    def methods(kind):
        return {
            name: list(inspect.signature(value).parameters)
            for name, value in vars(kind).items()
            if not name.startswith("_")
        }

    assert methods(AsyncClient) == methods(Client)


async def test_generate_and_stream_agree(server, client, expected):
    assert await client.generate("p", max_tokens=4) == expected
    async with client.stream("p", max_tokens=4) as stream:
        assert "".join([event.delta async for event in stream]) == "Hello"
        assert await stream.result() == expected
    assert server.calls == [
        inference_pb2.GenerateRequest(prompt="p", stopping={"max_tokens": 4}),  # type: ignore[arg-type]
        inference_pb2.StreamRequest(prompt="p", stopping={"max_tokens": 4}),  # type: ignore[arg-type]
    ]


async def test_leaving_the_block_cancels_on_the_server(server, client):
    server.hold_after = 2
    async with client.stream("p") as stream:
        await anext(stream)
        await anext(stream)
        assert not server.cancelled.is_set()
    await until_set(server.cancelled)
    assert [event async for event in stream] == []
    with pytest.raises(api.ProtocolError, match="closed before its end"):
        await stream.result()


async def test_dropping_the_iterator_cancels_on_the_server(server, client):
    server.hold_after = 2
    async for _ in client.stream("p"):
        break
    await until_set(server.cancelled)


async def test_close_from_another_task_ends_the_iteration(server, client):
    server.hold_after = 2
    stream = client.stream("p")
    first = [await anext(stream), await anext(stream)]
    reading = asyncio.create_task(stream.result())
    await asyncio.sleep(0.1)
    await stream.aclose()
    with pytest.raises(api.ProtocolError, match="closed before its end"):
        await reading
    assert len(first) == 2
    await until_set(server.cancelled)


async def test_cancelling_the_task_is_no_error_of_the_client(server, client):
    server.hold_after = 1
    reading = asyncio.create_task(client.stream("p").result())
    await until_set(server.asked)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await until_set(server.cancelled)


async def test_breaking_the_order_cancels(server, client):
    server.replies = server.replies[1:]
    server.hold_after = 3
    with pytest.raises(api.ProtocolError, match="delta before started"):
        await client.stream("p").result()
    await until_set(server.cancelled)


async def test_failure_midway_keeps_what_came(server, client, failure):
    server.replies = server.replies[:2]
    server.stream_failure = failure(grpc.StatusCode.INTERNAL, "", "the engine died")
    stream = client.stream("p")
    with pytest.raises(api.ServerError, match="the engine died"):
        await stream.result()
    assert stream.text() == "Hel"


async def test_the_other_calls(server, client):
    assert [r.outcome for r in await client.abort(prefix="job-")][:2] == [
        AbortOutcome.ABORTED,
        AbortOutcome.ALREADY_FINISHED,
    ]
    assert server.calls == [inference_pb2.AbortRequest(request_id_prefix="job-")]
    assert (await client.model_info()).model == "toy"
    assert (await client.server_info()).server_version == "9.8.7"
    assert (await client.load()).kv_pages_used == 7
    assert await client.tokenize("hi") == Tokens((4, 5), 64)
    assert await client.detokenize([4]) == "Hello"
    assert (await client.vocabulary()).tokens == (b"<s>", b"\xe2\x82", b"\xac")
    assert await client.flush_cache() == FlushedCache(12, 3)
    assert await client.set_tracing("off") == TracingStatus("steps", "off", 12, 3, 4)
    assert (await client.control.GetLoad(control_pb2.GetLoadRequest())).queued_requests == 2


async def test_metadata(server, client):
    await client.load(metadata={"traceparent": "00-x-y-01"})
    await client.stream("p", metadata={"traceparent": "00-x-y-01"}).result()
    assert [m["traceparent"] for m in server.metadata] == ["00-x-y-01"] * 2


async def test_an_existing_channel_stays_open(server):
    async with grpc.aio.insecure_channel(server.addr) as channel:
        async with AsyncClient(channel=channel) as client:
            await client.load()
        async with AsyncClient(channel=channel) as client:
            await client.load()
        with pytest.raises(TypeError, match="existing channel"):
            AsyncClient(credentials=grpc.ssl_channel_credentials(), channel=channel)


async def test_wait_ready(server, client):
    await client.wait_ready(timeout=30)
    assert await client.is_ready()
    server.set_health(False)
    assert not await client.is_ready()
    with pytest.raises(NotReady, match=r"not ready within 0\.3 s"):
        await client.wait_ready(timeout=0.3)
    asyncio.get_running_loop().call_later(0.2, server.set_health, True)
    await client.wait_ready(timeout=30)


@pytest.mark.parametrize("kind", ["generate", "stream"])
async def test_closing_the_client_is_no_cancellation_of_the_task(server, kind):
    server.hold_after = 1
    client = AsyncClient(server.addr)
    calls = {"generate": lambda: client.generate("p"), "stream": lambda: client.stream("p").result()}
    waiting = asyncio.create_task(calls[kind]())
    await until_set(server.asked)
    await client.close()
    with pytest.raises(api.Cancelled):
        await waiting
    assert not waiting.cancelled()
