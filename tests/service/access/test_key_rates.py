"""Rates and usage of keys, on a real server whose clock for rates only the test moves."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]  # ships no hints

from penstock.service.usage.meter import Outcome, Usage
from penstock.v1 import control_pb2, inference_pb2
from tests.service.key_rig import CONTROL, as_, key, serving_keys, write
from tests.service.rig import collect, failure_of, fake, generate, stream, taken_apart, until
from tests.support.clock import Clock

GENERATE = "penstock.v1.InferenceService/Generate"
STREAM = "penstock.v1.InferenceService/Stream"


class Books:
    """A sink that keeps what it was told; answers wait until `safe` is set."""

    def __init__(self) -> None:
        self.told: list[Usage] = []
        self.hold = False
        self.notes: list[asyncio.Future[None]] = []

    def record(self, usage: Usage) -> asyncio.Future[None] | None:
        self.told.append(usage)
        if not self.hold:
            return None
        self.notes.append(asyncio.get_running_loop().create_future())
        return self.notes[-1]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys.json"


@pytest.fixture
def clock() -> Clock:
    """Return the clock that rates are measured by."""
    return Clock()


def retry_s(failure) -> float:
    (retry,) = [d for d in failure.details if isinstance(d, error_details_pb2.RetryInfo)]
    return float(retry.retry_delay.ToNanoseconds()) / 1e9


async def ask(rig, name: str, text: str = "a", **fields: Any) -> Any:
    return await asyncio.wait_for(rig.inference.Generate(generate(text, **fields), **as_(name)), 20)


async def refused(rig, name: str) -> Any:
    failure = await failure_of(rig.inference.Generate(generate("a"), **as_(name)))
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    return failure


async def test_requests_per_minute(file, clock):
    """Each RPC that makes the server work counts, for its key only; refused calls do not count."""
    async with serving_keys(file, key("alice", requests_per_minute=3), key("bob"), rates_clock=clock) as rig:
        await ask(rig, "alice")
        await collect(rig.inference.Stream(stream("a"), **as_("alice")))
        await rig.control.Tokenize(control_pb2.TokenizeRequest(text="a"), **as_("alice"))
        for _ in range(5):
            failure = await refused(rig, "alice")
            assert failure.reason == "RATE_LIMITED"
            assert dict(failure.info.metadata) == {"limit": "requests_per_minute", "per_minute": "3"}
            assert retry_s(failure) == pytest.approx(20.0, abs=0.01)
        await ask(rig, "bob")
        await rig.control.GetLoad(control_pb2.GetLoadRequest(), **as_("alice"))
        abort = inference_pb2.AbortRequest(all=inference_pb2.AllRequests())
        await rig.inference.Abort(abort, **as_("alice"))
        clock.now += retry_s(failure) + 0.001
        await ask(rig, "alice")
        assert (await refused(rig, "alice")).reason == "RATE_LIMITED"


async def test_tokens_per_minute(file, clock):
    """Tokens of prompt and output: 3 and 23 for "abc" (d to z, and the end token)."""
    async with serving_keys(file, key("alice", tokens_per_minute=50), rates_clock=clock) as rig:
        used = (await ask(rig, "alice", "abc")).usage
        assert used.prompt_tokens + used.completion_tokens == 27
        await ask(rig, "alice", "abc")  # 23 were left, so it begins, and owes 4
        failure = await refused(rig, "alice")
        assert dict(failure.info.metadata) == {"limit": "tokens_per_minute", "per_minute": "50"}
        assert retry_s(failure) == pytest.approx(5 * 60 / 50, abs=0.01)
        clock.now += retry_s(failure) + 0.001
        await ask(rig, "alice", stopping={"max_tokens": 1})


async def test_tokens_count_as_they_are_made(file, clock):
    """And not only when the request ends: the key's other requests wait for what a running one has used so
    far.
    """
    engine = fake(hold=True)
    async with serving_keys(file, key("alice", tokens_per_minute=5), engine=engine, rates_clock=clock) as rig:
        running = asyncio.ensure_future(ask(rig, "alice"))
        await until(lambda: len(engine.seen) == 1)
        engine.step(4)
        await until(lambda: engine.num_steps == 4)

        async def limited() -> None:
            while True:
                probe = rig.control.Tokenize(control_pb2.TokenizeRequest(text="a"), **as_("alice"))
                try:
                    await probe
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # noqa: PT017
                    return

        await asyncio.wait_for(limited(), 20)
        assert not running.done()
        engine.release()
        assert (await running).outputs[0].text.endswith("z"), "what runs is not cut"


async def test_parallel_requests(file):
    engine = fake(hold=True)
    async with serving_keys(file, key("alice", max_parallel_requests=2), key("bob"), engine=engine) as rig:
        calls = [asyncio.ensure_future(ask(rig, "alice")) for _ in range(2)]
        await until(lambda: len(engine.seen) == 2)
        failure = await refused(rig, "alice")
        assert failure.reason == "BUSY"
        assert dict(failure.info.metadata) == {"limit": "max_parallel_requests", "max": "2"}
        assert retry_s(failure) > 0
        other = asyncio.ensure_future(ask(rig, "bob"))
        await until(lambda: len(engine.seen) == 3)
        calls[0].cancel()

        async def admitted() -> None:
            while True:
                try:
                    await rig.control.Tokenize(control_pb2.TokenizeRequest(text="a"), **as_("alice"))
                    return
                except grpc.aio.AioRpcError:
                    pass

        await asyncio.wait_for(admitted(), 20)
        engine.release()
        await calls[1]
        await other


async def test_a_burst_leaves_no_place_taken(file):
    """However each call ended: answered, refused, or cancelled at any moment."""
    engine = fake()
    async with serving_keys(file, key("alice", max_parallel_requests=1), engine=engine) as rig:

        async def burst() -> list[object]:
            calls = [asyncio.ensure_future(ask(rig, "alice")) for _ in range(60)]
            for number, call in enumerate(calls):
                if number % 3 == 0:
                    await asyncio.sleep(0)
                    call.cancel()
            found: list[object] = await asyncio.gather(*calls, return_exceptions=True)
            return found

        results: list[object] = []
        async with asyncio.timeout(20):
            # A cancelled call may have the place for as long as all others of its burst need to be refused.
            while not any(isinstance(result, inference_pb2.GenerateResponse) for result in results):
                results += await burst()
        for result in results:
            if isinstance(result, grpc.aio.AioRpcError):
                assert taken_apart(result).reason == "BUSY"
            else:
                assert isinstance(result, (inference_pb2.GenerateResponse, asyncio.CancelledError))

        async def admitted() -> None:
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await ask(rig, "alice")
                    return

        await asyncio.wait_for(admitted(), 20)


async def test_a_reload_changes_rates_and_forgets_nothing(file, clock):
    async with serving_keys(file, key("alice", requests_per_minute=2), rates_clock=clock) as rig:
        await ask(rig, "alice")
        await ask(rig, "alice")
        write(file, [key("alice", requests_per_minute=3)])
        await rig.server.reload_keys()
        await ask(rig, "alice")
        await refused(rig, "alice")


async def test_usage_is_told_once_for_each_request(file):
    books = Books()
    engine = fake(page_size=1, cached=["ab"])
    async with serving_keys(file, key("alice"), key("boss", CONTROL), engine=engine, usage=books) as rig:
        await ask(rig, "alice", "abc", request_id="r", stopping={"max_tokens": 4}, sampling={"n": 2})
        await collect(rig.inference.Stream(stream("ab", request_id="s"), **as_("boss")))
        await failure_of(rig.inference.Generate(generate("a", request_id="t", model="x"), **as_("alice")))
        await failure_of(rig.inference.Generate(generate("a")))
        await rig.control.GetLoad(control_pb2.GetLoadRequest(), **as_("alice"))
        await until(lambda: len(books.told) >= 3)
    assert books.told == [
        Usage("alice", GENERATE, "r", Outcome.ANSWERED, "", 3, 2, 8),
        Usage("boss", STREAM, "s", Outcome.ANSWERED, "", 2, 1, 25),
        Usage("alice", GENERATE, "t", Outcome.REFUSED, "UNKNOWN_MODEL"),
    ]


async def test_usage_of_a_refusal_by_rate(file):
    books = Books()
    async with serving_keys(file, key("alice", requests_per_minute=1), usage=books) as rig:
        await ask(rig, "alice", stopping={"max_tokens": 1})
        await refused(rig, "alice")
        await until(lambda: len(books.told) == 2)
    assert books.told[1] == Usage("alice", GENERATE, "", Outcome.REFUSED, "RATE_LIMITED")


@pytest.mark.parametrize("streamed", [False, True])
async def test_usage_where_the_client_vanished(file, streamed):
    books = Books()
    engine = fake(hold=True)
    async with serving_keys(file, key("alice"), engine=engine, usage=books) as rig:
        request = (stream if streamed else generate)("abc", request_id="r")
        call = (rig.inference.Stream if streamed else rig.inference.Generate)(request, **as_("alice"))
        reading = asyncio.ensure_future(collect(call) if streamed else call)
        await until(lambda: len(engine.seen) == 1)
        engine.step(4)
        await until(lambda: engine.num_steps == 4)
        call.cancel()
        await until(lambda: len(books.told) == 1)
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await reading
    (told,) = books.told
    assert (told.caller, told.request_id, told.outcome) == ("alice", "r", Outcome.VANISHED)
    assert told.prompt_tokens == 3
    assert told.completion_tokens <= 4


async def test_usage_where_it_failed_midway(file):
    books = Books()
    engine = fake(hold=True)
    async with serving_keys(file, key("alice"), engine=engine, usage=books) as rig:
        call = asyncio.ensure_future(failure_of(rig.inference.Generate(generate("abc"), **as_("alice"))))
        await until(lambda: len(engine.seen) == 1)
        engine.die()
        await call
        await until(lambda: len(books.told) == 1)
    assert (books.told[0].outcome, books.told[0].reason) == (Outcome.FAILED, "ENGINE_FAILURE")


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_leaves_after_its_usage_is_safe(file, streamed):
    """With a ledger on a slow disk: a caller that has read the end of an answer can rely on its entry."""
    books = Books()
    books.hold = True
    async with serving_keys(file, key("alice"), usage=books) as rig:
        if streamed:
            call = rig.inference.Stream(stream("x"), **as_("alice"))
            seen = []

            async def read() -> None:
                async for message in call:
                    seen.append(message.WhichOneof("event"))  # noqa: PERF401 -- looked at meanwhile

            reading = asyncio.ensure_future(read())
            await until(lambda: "finished" in seen)
        else:
            reading = asyncio.ensure_future(ask(rig, "alice", "x"))
        await until(lambda: len(books.notes) == 1)
        for _ in range(3):  # what had been sent would have come with these
            await rig.control.GetLoad(control_pb2.GetLoadRequest(), **as_("alice"))
        assert not reading.done()
        if streamed:
            assert "summary" not in seen
        books.notes[0].set_result(None)
        await asyncio.wait_for(reading, 20)
