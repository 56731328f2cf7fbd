"""`AsyncEngine` does for coroutines what `Engine` does, on a model whose tokens can be computed by hand."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.runtime import AsyncEngine, Engine, SamplingParams
from penstock.runtime.errors import DuplicateRequestId, EngineFailure, PromptTooLong
from tests.support.collector import GREEDY_PARAMS, at_gate, long
from tests.support.models.toy import VOCAB, toy_engine, toy_tokens


@pytest.fixture(scope="module")
def sync() -> Iterator[Engine]:
    engine = toy_engine()
    yield engine
    assert engine.load().pages_used == 0
    engine.shutdown()


@pytest.fixture(scope="module")
def engine(sync: Engine) -> AsyncEngine:
    """One AsyncEngine for all tests, although each test has an event loop of its own."""
    return AsyncEngine(sync)


async def test_many_at_once(engine: AsyncEngine) -> None:
    made = await asyncio.gather(
        *(engine.generate([i], sampling=GREEDY_PARAMS, stopping=long(20)) for i in range(24))
    )
    assert [list(g.token_ids) for g in made] == [toy_tokens([i], 20) for i in range(24)]


async def test_a_list(engine: AsyncEngine) -> None:
    prompts = [[i % VOCAB, 1] for i in range(30)]
    made = await engine.generate(prompts, sampling=GREEDY_PARAMS, stopping=long(8))
    assert [list(g.token_ids) for g in made] == [toy_tokens(prompt, 8) for prompt in prompts]
    with pytest.raises(PromptTooLong):
        await engine.generate([[1], [1] * 500], sampling=GREEDY_PARAMS, stopping=long(100))


async def test_a_stream_is_the_threads_stream(sync: Engine, engine: AsyncEngine) -> None:
    hot = SamplingParams(temperature=2.5, seed=4)
    asked: dict[str, Any] = {"n": 3, "sampling": hot, "stopping": long(30)}
    whole = sync.generate([7], **asked)
    stream = engine.stream([7], **asked)
    with pytest.raises(RuntimeError, match="has not begun"):
        _ = stream.request_id
    async with stream:
        deltas = [delta async for delta in stream]
    for output in whole.outputs:
        own = [delta for delta in deltas if delta.index == output.index]
        assert tuple(t for delta in own for t in delta.token_ids) == output.token_ids
        assert own[-1].finish == output.finish
    assert [o.token_ids for o in (await stream.result()).outputs] == [o.token_ids for o in whole.outputs]


async def test_cancelling_a_task_frees_its_request(sync: Engine, engine: AsyncEngine) -> None:
    task = asyncio.create_task(engine.generate([1], n=2, sampling=SamplingParams(seed=1), stopping=long(110)))
    async with asyncio.timeout(60):
        while not sync.load().num_running:  # noqa: ASYNC110 -- the engine has no event
            await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sync.load().pages_used == 0


async def test_closing_and_dropping_streams(sync: Engine, engine: AsyncEngine) -> None:
    gate = at_gate(sync)
    stream = engine.stream([1], sampling=GREEDY_PARAMS, stopping=long(50), request_id="closed")
    async with stream:
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(reader, 60)
    dropped = engine.stream([1], sampling=GREEDY_PARAMS, stopping=long(50), request_id="dropped")
    await dropped.__aenter__()
    assert sync.load().num_waiting == 1
    del dropped
    gc.collect()
    assert sync.load().num_waiting == 0
    never = engine.stream([1], request_id="never")
    await never.aclose()
    assert [delta async for delta in never] == []
    gate.open()
    gate.sink.last("held")


async def test_refusals_come_with_the_first_wait(engine: AsyncEngine) -> None:
    with pytest.raises(TypeError, match="unknown option"):
        engine.stream([1], temperature=0)  # type: ignore[call-arg]
    async with engine.stream([1], sampling=GREEDY_PARAMS, stopping=long(50), request_id="same"):
        other = engine.stream([1], stopping=long(5), request_id="same")
        with pytest.raises(DuplicateRequestId):
            await anext(other)
        with pytest.raises(PromptTooLong):
            await engine.generate([1] * 500)


async def test_a_dead_engine_ends_its_streams() -> None:
    with toy_engine(start=False) as sync:
        gate = at_gate(sync)
        async with AsyncEngine(sync).stream([1], sampling=GREEDY_PARAMS, stopping=long(50)) as stream:
            sync.runner.wait = None  # type: ignore[assignment]  # waiting for the next step will fail
            gate.open()
            with pytest.raises(EngineFailure):
                async for _ in stream:
                    pass
