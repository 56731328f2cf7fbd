"""200 concurrent streams with random cancels, deadlines, aborts and stalled readers: nothing may be left
behind.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import grpc
import pytest

from penstock.v1 import inference_pb2
from tests.service.rig import Rig, generate, serving, stream, until
from tests.support.models.toy import VOCAB, toy_engine, toy_model, toy_tokens

pytestmark = pytest.mark.ci

NUM_STREAMS = 120
CONTEXT = 1024
SMALL_WINDOWS = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
"""Windows so small that little fits between a server and a client that does not read."""
KINDS = ("read", "read", "cancel", "deadline", "abort", "stall")


def ask(i: int, rng: random.Random, max_tokens: int) -> tuple[list[int], inference_pb2.StreamRequest]:
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))]
    request = stream(
        request_id=f"soak-{i}",
        prompt_token_ids={"ids": prompt},
        sampling={"temperature": 0},
        stopping={"max_tokens": max_tokens, "ignore_eos": True},
        output={"text": False, "logprobs": 20 if max_tokens > 200 else 0},
    )
    return prompt, request


async def one(rig: Rig, i: int, seed: int) -> str:
    """Run one client of a random kind and return how it ended. Tokens that arrive are always checked."""
    rng = random.Random(seed * 1000 + i)
    kind = rng.choice(KINDS)
    prompt, request = ask(i, rng, 900 if kind == "stall" else rng.randint(1, 150))
    timeout = rng.uniform(0.001, 3.0) if kind == "deadline" else None
    call = rig.inference.Stream(request, timeout=timeout)
    tokens: list[int] = []
    other: asyncio.Task[Any] | None = None
    try:
        if kind == "cancel":
            asyncio.get_running_loop().call_later(rng.uniform(0, 2.0), call.cancel)
        elif kind == "abort":
            other = asyncio.create_task(abort_later(rig, request.request_id, rng.uniform(0, 2.0)))
        if kind == "stall":
            await call.read()
            # Until the server gives the silent reader up; nothing tells a client that it was given up.
            while request.request_id in rig.engine.active_requests():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        while (message := await call.read()) is not grpc.aio.EOF:
            tokens += message.delta.token_ids
        assert await call.code() is grpc.StatusCode.OK
        ended = "ok"
    except grpc.aio.AioRpcError as error:
        ended = error.code().name
    except asyncio.CancelledError:
        ended = "CANCELLED"
    finally:
        if other is not None:
            await other
    assert tokens == toy_tokens(prompt, len(tokens))
    if kind == "read":
        assert ended == "ok"
        assert len(tokens) == request.stopping.max_tokens
    return f"{kind}: {ended}"


def tasks() -> set[asyncio.Task[Any]]:
    """All tasks but those in which grpc waits for the next call: it makes a new one for each call."""
    return {task for task in asyncio.all_tasks() if "_request_registered_call" not in repr(task)}


async def abort_later(rig: Rig, request_id: str, delay: float) -> None:
    await asyncio.sleep(delay)
    await rig.inference.Abort(
        inference_pb2.AbortRequest(request_ids=inference_pb2.RequestIds(ids=[request_id]))
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.sweep)])
async def test_nothing_is_left_behind(seed: int) -> None:
    """Also under page pressure: the cache holds a quarter of what 16 rows could use, so there are
    preemptions.
    """
    page_bytes = 4 * 2 * 4 * 4
    engine = toy_engine(
        toy_model(max_model_len=CONTEXT),
        max_num_seqs=16,
        max_num_batched_tokens=64,
        kv_cache_bytes=4 * (CONTEXT // 4) * page_bytes,
        start=False,
    )
    async with serving(engine, stall_limit_s=0.5, channel_options=SMALL_WINDOWS) as rig:
        first = generate(prompt_token_ids={"ids": [1]}, stopping={"max_tokens": 1}, output={"text": False})
        await rig.inference.Generate(first)
        before = tasks()
        endings = Counter(await asyncio.gather(*(one(rig, i, seed) for i in range(NUM_STREAMS))))
        await until(lambda: engine.load().num_running + engine.load().num_waiting == 0)
        load = engine.load()
        assert (load.num_running, load.num_waiting, load.pages_used) == (0, 0, 0)
        await until(lambda: tasks() <= before)
        engine.check()
        assert engine.compiles_after_warmup == 0
        assert engine.failure is None
        # Each kind must really have happened at least once, or this test shows nothing.
        for expected in (
            "read: ok",
            "cancel: CANCELLED",
            "deadline: DEADLINE_EXCEEDED",
            "abort: ok",
            "stall: RESOURCE_EXHAUSTED",
        ):
            assert endings[expected] > 0, endings
