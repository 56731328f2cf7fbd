"""The load of `penstock bench`: random prompts, sent at a fixed concurrency or at random times."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from penstock.cli.measuring.stats import RequestTrace
from penstock.client import AsyncClient, Delta, PenstockClientError


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What to send. One seed always sends the same prompts at the same times."""

    cache_salt: str
    """A salt of this run alone: a second run with one seed must not find its prompts in the prefix cache."""

    requests: int
    prompt_tokens: int
    max_tokens: int
    seed: int
    concurrency: int | None
    """The most requests in flight; None means no limit."""
    request_rate: float | None
    """Mean arrivals per second, as a Poisson process; None sends as soon as `concurrency` allows."""
    temperature: float | None
    vocab_size: int
    excluded_token_ids: tuple[int, ...]
    """End tokens, which prompts must not contain."""


def prompts(load: Workload, count: int, seed: int) -> list[list[int]]:
    """Draw prompts of random token ids. They differ, so that no prompt finds another's prefix in
    the cache.
    """
    draw = random.Random(seed)
    allowed = sorted(set(range(load.vocab_size)) - set(load.excluded_token_ids))
    return [draw.choices(allowed, k=load.prompt_tokens) for _ in range(count)]


async def send(client: AsyncClient, load: Workload, token_ids: list[int], seed: int) -> RequestTrace:
    """Run one request and record when its tokens came. An error of the server is recorded, not raised."""
    arrivals: list[tuple[float, int]] = []
    error: str | None = None
    sent = time.perf_counter()
    try:
        stream = client.stream(
            token_ids=token_ids,
            max_tokens=load.max_tokens,
            ignore_eos=True,
            seed=seed,
            temperature=load.temperature,
            cache_salt=load.cache_salt,
        )
        async with stream:
            async for event in stream:
                if isinstance(event, Delta) and event.token_ids:
                    now = time.perf_counter()
                    arrivals.append((now, len(event.token_ids)))
    except PenstockClientError as failure:
        error = f"{failure.reason or failure.code.name}: {failure}"
    return RequestTrace(sent, tuple(arrivals), time.perf_counter(), len(token_ids), error)


async def _arrivals(load: Workload) -> AsyncIterator[int]:
    """Yield the index of each request when it is due."""
    draw = random.Random(load.seed)
    due = time.perf_counter()
    for index in range(load.requests):
        yield index
        if load.request_rate is not None:
            due += draw.expovariate(load.request_rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))


async def drive(client: AsyncClient, load: Workload, on_done: Callable[[RequestTrace], object]) -> None:
    """Send the whole workload. `on_done` is called with each request once it has ended."""
    slots = asyncio.Semaphore(load.concurrency if load.concurrency is not None else load.requests)
    token_ids = prompts(load, load.requests, load.seed)

    async def one(index: int) -> None:
        try:
            on_done(await send(client, load, token_ids[index], seed=load.seed + index))
        finally:
            slots.release()

    async with asyncio.TaskGroup() as group:
        async for index in _arrivals(load):
            await slots.acquire()
            group.create_task(one(index))
