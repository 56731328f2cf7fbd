"""Prefix cache and priorities over gRPC, on the real engine with the toy model (tests/support/models/toy.py).

Pages have 4 tokens and there is one row. What a prompt can find in the cache is worked out by hand: full
pages only, and at least its last token is left to compute. The tokens are the toy's hand-computed ones, so a
page that was shared wrongly is a wrong token.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.runtime.loop.interface import StepRecord
from penstock.runtime.requests.request import CacheParams, Finish, FinishReason, StepOutput
from penstock.v1 import control_pb2, inference_pb2, types_pb2
from tests.service.rig import Kept, Rig, collect, failure_of, fake, generate, joined, serving, stream, until
from tests.support.models.toy import VOCAB, toy_engine, toy_tokens

pytestmark = pytest.mark.ci


class Brake:
    """An observer that holds the engine's thread after a step, from `pull` to `release`."""

    def __init__(self) -> None:
        self.held = threading.Event()
        self._free = threading.Event()
        self._free.set()

    def pull(self) -> None:
        self.held.clear()
        self._free.clear()

    def release(self) -> None:
        self._free.set()

    def on_step(self, record: StepRecord) -> None:
        if not self._free.is_set():
            self.held.set()
            assert self._free.wait(60)


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[Any, Brake]]:
    brake = Brake()
    engine = toy_engine(max_num_seqs=1, scheduling_policy="priority", observer=brake)
    yield engine, brake
    brake.release()
    assert engine.compiles_after_warmup == 0
    engine.shutdown()


@pytest.fixture
def engine(started: tuple[Any, Brake]) -> Any:
    """Make an engine with an empty prefix cache."""
    started[0].flush_prefix_cache()
    return Kept(started[0])


@pytest.fixture
def brake(started: tuple[Any, Brake]) -> Iterator[Brake]:
    yield started[1]
    started[1].release()


_numbers = itertools.count()


def new_prompt(length: int) -> list[int]:
    """Make a prompt that begins differently from all others."""
    number = next(_numbers)
    return [number % VOCAB, number // VOCAB, *[7] * (length - 2)]


async def ask(rig: Rig, prompt: list[int], max_tokens: int = 3, **fields: Any) -> Any:
    """Call Generate and check that the tokens are the model's."""
    request = generate(
        prompt_token_ids=types_pb2.TokenIds(ids=prompt),
        sampling={"temperature": 0},
        stopping={"max_tokens": max_tokens, "ignore_eos": True},
        **fields,
    )
    reply = await asyncio.wait_for(rig.inference.Generate(request), 60)
    assert list(reply.outputs[0].token_ids) == toy_tokens(prompt, max_tokens)
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.completion_tokens == max_tokens
    return reply


async def cached(rig: Rig, prompt: list[int], **fields: Any) -> int:
    """How many of its tokens the prompt found in the cache."""
    reply = await ask(rig, prompt, **fields)
    found: int = reply.usage.cached_prompt_tokens
    return found


# -- the prefix cache --


@pytest.mark.parametrize(("length", "found"), [(4, 0), (5, 4), (8, 4), (9, 8), (10, 8)])
async def test_a_repeated_prompt_finds_its_full_pages(engine: Any, length: int, found: int) -> None:
    prompt = new_prompt(length)
    async with serving(engine) as rig:
        assert await cached(rig, prompt) == 0
        assert await cached(rig, prompt) == found


async def test_stream_tells_the_same_usage(engine: Any) -> None:
    prompt = new_prompt(9)
    async with serving(engine) as rig:
        await ask(rig, prompt)
        request = stream(prompt_token_ids=types_pb2.TokenIds(ids=prompt), stopping={"max_tokens": 2})
        usage = joined(await collect(rig.inference.Stream(request))).usage
    assert usage == types_pb2.Usage(prompt_tokens=9, cached_prompt_tokens=8, completion_tokens=2)


@pytest.mark.parametrize(("made", "found"), [(6, 8), (7, 12)])
async def test_a_next_turn_finds_what_was_generated(engine: Any, made: int, found: int) -> None:
    """6 tokens and 6 more: the last token needs no KV, so 11 positions fill 2 pages; with 7 more, 3 pages."""
    prompt = new_prompt(6)
    async with serving(engine) as rig:
        reply = await ask(rig, prompt, made)
        turn = [*prompt, *reply.outputs[0].token_ids, 1, 2, 3]
        assert await cached(rig, turn) == found


async def test_salts_share_nothing(engine: Any) -> None:
    prompt = new_prompt(10)
    async with serving(engine) as rig:
        assert await cached(rig, prompt) == 0
        assert await cached(rig, prompt, cache={"cache_salt": "a"}) == 0
        assert await cached(rig, prompt, cache={"cache_salt": "b"}) == 0
        for salt in ("a", "b", ""):
            assert await cached(rig, prompt, cache={"cache_salt": salt}) == 8
        assert await cached(rig, prompt, cache={"cache_salt": "ab"}) == 0


async def test_bypass_neither_reads_nor_adds(engine: Any) -> None:
    prompt, other = new_prompt(10), new_prompt(10)
    bypass = {"bypass_prefix_cache": True}
    async with serving(engine) as rig:
        assert await cached(rig, prompt) == 0
        assert await cached(rig, prompt, cache=bypass) == 0
        assert await cached(rig, prompt) == 8
        assert await cached(rig, other, cache=bypass) == 0
        assert await cached(rig, other) == 0
        assert await cached(rig, other) == 8


async def test_flush_forgets(engine: Any) -> None:
    """10 tokens and 3 more fill 12 positions, 3 pages."""
    prompt = new_prompt(10)
    async with serving(engine) as rig:
        flush = rig.control.FlushCache
        assert await cached(rig, prompt) == 0
        reply = await flush(control_pb2.FlushCacheRequest())
        assert (reply.pages_freed, reply.pages_in_use) == (3, 0)
        assert await cached(rig, prompt) == 0
        assert await cached(rig, prompt) == 8


async def test_flush_leaves_running_requests_their_pages(engine: Any, brake: Brake) -> None:
    """The prompt's 2 full pages are in use, and new requests do not find them afterwards."""
    prompt = new_prompt(10)
    async with serving(engine) as rig:
        brake.pull()
        running = asyncio.ensure_future(ask(rig, prompt, 30))
        await until(brake.held.is_set)
        reply = await rig.control.FlushCache(control_pb2.FlushCacheRequest())
        assert (reply.pages_freed, reply.pages_in_use) == (0, 2)
        brake.release()
        await running
        assert await cached(rig, prompt) == 0


async def test_without_a_prefix_cache_the_options_are_kept_by_doing_nothing() -> None:
    engine = toy_engine(start=False, prefix_cache_pages=0)
    prompt = new_prompt(10)
    async with serving(engine) as rig:
        for cache in ({}, {}, {"cache_salt": "a"}, {"bypass_prefix_cache": True}):
            assert await cached(rig, prompt, cache=cache) == 0
        reply = await rig.control.FlushCache(control_pb2.FlushCacheRequest())
        assert (reply.pages_freed, reply.pages_in_use) == (0, 0)


async def test_what_was_asked_reaches_the_engine() -> None:
    async with serving(fake(scheduling_policy="priority")) as rig:
        options = {"cache_salt": "s", "bypass_prefix_cache": True}
        await rig.inference.Generate(generate("y", cache=options, priority=2**31 - 1))
        await collect(rig.inference.Stream(stream("y", cache={"cache_salt": "t"}, priority=-(2**31))))
        await rig.inference.Generate(generate("y"))
        seen = [(request.cache, request.priority) for request in rig.engine.seen]
    assert seen == [
        (CacheParams("s", True), 2**31 - 1),
        (CacheParams("t", False), -(2**31)),
        (CacheParams(), 0),
    ]


async def test_usage_of_a_request_that_ended_without_timing() -> None:
    engine = fake()

    def submit(request: Any, sink: Any, prepared: Any = None) -> None:
        sink([StepOutput(request.request_id, (98,), finish=Finish(FinishReason.MAX_TOKENS))])

    engine.submit = submit  # type: ignore[method-assign]
    async with serving(engine) as rig:
        whole = await rig.inference.Generate(generate("ya"))
        parts = joined(await collect(rig.inference.Stream(stream("ya"))))
    for reply in (whole, parts):
        assert reply.usage == types_pb2.Usage(prompt_tokens=2, completion_tokens=1)
        assert reply.timing == types_pb2.Timing()
        assert reply.outputs[0].text == "b"


# -- priority --


async def queued(rig: Rig, prompt: list[int], number: int, **fields: Any) -> asyncio.Future[Any]:
    """Start a call, and return once `num` requests wait."""
    call = asyncio.ensure_future(ask(rig, prompt, **fields))
    await until(lambda: rig.engine.load().num_waiting == number)
    return call


async def test_a_higher_priority_overtakes(engine: Any, brake: Brake) -> None:
    """The only row is taken and another request waits. The request that comes last goes first, and takes the
    row.
    """
    async with serving(engine) as rig:
        brake.pull()
        running = asyncio.ensure_future(ask(rig, new_prompt(6), 60))
        await until(brake.held.is_set)
        waiting = await queued(rig, new_prompt(6), 1)
        urgent = await queued(rig, new_prompt(6), 2, priority=1)
        brake.release()
        first, second, third = await asyncio.gather(running, waiting, urgent)
    # It came later and was scheduled earlier, so it waited for less time; no clock is needed to know that.
    assert third.timing.queue.ToNanoseconds() < second.timing.queue.ToNanoseconds()
    assert [reply.timing.preemptions for reply in (first, second, third)] == [1, 0, 0]


async def test_a_lower_priority_is_overtaken(engine: Any, brake: Brake) -> None:
    """No request is preempted by those that rank behind it."""
    async with serving(engine) as rig:
        brake.pull()
        running = asyncio.ensure_future(ask(rig, new_prompt(6), 20, priority=2))
        await until(brake.held.is_set)
        patient = await queued(rig, new_prompt(6), 1, priority=-1)
        usual = await queued(rig, new_prompt(6), 2)
        brake.release()
        replies = await asyncio.gather(running, patient, usual)
    assert replies[2].timing.queue.ToNanoseconds() < replies[1].timing.queue.ToNanoseconds()
    assert [reply.timing.preemptions for reply in replies] == [0, 0, 0]


@pytest.mark.parametrize("priority", [-1, 1])
async def test_in_order_of_arrival_a_priority_is_refused(priority: int) -> None:
    """It would be ignored. 0 is accepted, because all requests have it."""
    async with serving(fake()) as rig:
        for call in (
            rig.inference.Generate(generate("y", priority=priority)),
            rig.inference.Stream(stream("y", priority=priority)).read(),
        ):
            failure = await failure_of(call)
            assert (failure.code.name, failure.reason) == ("UNIMPLEMENTED", "UNSUPPORTED_FEATURE")
            assert failure.info.metadata["field"] == "priority"
        assert not rig.engine.seen
        # A client of another language may send the 0 explicitly, which still asks for nothing.
        zero = await rig.raw("InferenceService/Generate", b"\x1a\x01y\x60\x00")
        assert inference_pb2.GenerateResponse.FromString(zero).outputs[0].text == "z"
