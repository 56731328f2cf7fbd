"""Clients that vanish, run out of time or stop reading: slot and pages are freed, and other
requests go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any, cast

import grpc
import pytest

from penstock.service.requests import generate as generate_module
from penstock.v1 import inference_pb2
from tests.service.rig import (
    CODEC,
    WAIT_S,
    collect,
    failure_of,
    fake,
    generate,
    joined,
    read_all,
    serving,
    stream,
    until,
)

STATES = ("tokenizing", "waiting", "prefill", "decode")


class SlowCodec:
    """The byte tokenizer, except that encoding blocks until it is released."""

    def __init__(self, gate):
        self._gate = gate
        self.has_chat_template = True
        self.max_token_chars = None
        self.decoder = CODEC.decoder

    def encode(self, text, *, add_special_tokens=True):
        self._gate.wait(20)
        return CODEC.encode(text)


@contextlib.asynccontextmanager
async def in_state(state, start_call, monkeypatch):
    """Hold a server and a call whose request is in `state`, beside a second request that runs all the
    time.
    """
    gate = threading.Event()
    engine = fake(hold=True, max_num_seqs=1 if state == "waiting" else 4, max_model_len=10_000)
    if state == "tokenizing":
        monkeypatch.setattr(generate_module, "INLINE_CHARS", 0)
    async with serving(engine) as rig:
        bystander = asyncio.ensure_future(
            rig.inference.Generate(generate(prompt_token_ids={"ids": [97]}, request_id="bystander"))
        )
        await until(lambda: len(engine.seen) == 1)
        if state == "tokenizing":
            engine.text = cast("Any", SlowCodec(gate))
        call = start_call(rig)

        def arrived() -> bool:
            """On a busy machine a deadline may pass before; then there is another call, with more time."""
            nonlocal call
            if call.done() and len(engine.seen) < 2:
                call = start_call(rig)
            return len(engine.seen) == 2

        if state == "tokenizing":
            await asyncio.sleep(0.1)  # it is in the encoder now, or will notice the cancellation before
            assert len(engine.seen) == 1
        else:
            await until(arrived)
        if state == "decode":
            engine.step(3)
            await until(lambda: engine.num_steps == 3)
        try:
            yield rig, call, gate
        finally:
            gate.set()
        await until(lambda: engine.load().pages_used == 1 and engine.load().num_waiting == 0)
        if state == "tokenizing":
            assert len(engine.seen) == 1, "the request never came to the engine"
        else:
            assert engine.cancelled == ["victim"]
        engine.release()
        reply = await asyncio.wait_for(bystander, 20)
        assert reply.outputs[0].text == "bcdefghijklmnopqrstuvwxyz", "the bystander was not disturbed"
        assert engine.load().pages_used == 0


def unary(rig, **options):
    return rig.inference.Generate(generate("a", request_id="victim"), **options)


def streaming(rig, **options):
    return rig.inference.Stream(stream("a", request_id="victim"), **options)


@pytest.mark.parametrize("start", [unary, streaming])
@pytest.mark.parametrize("state", STATES)
async def test_cancel(state, start, monkeypatch):
    async with in_state(state, start, monkeypatch) as (_, call, _):
        if start is streaming and state in ("prefill", "decode"):
            assert (await call.read()).WhichOneof("event") == "started"
        call.cancel()
        assert await call.code() is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("start", [unary, streaming])
@pytest.mark.parametrize("state", STATES)
async def test_deadline(state, start, monkeypatch):
    timeouts_s = iter((1.0, 5.0, 19.0))
    async with in_state(state, lambda rig: start(rig, timeout=next(timeouts_s)), monkeypatch) as (_, call, _):
        async with asyncio.timeout(20):
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


TEXTS = [inference_pb2.EmbedInput(text=text) for text in "abc"]
CONTINUATIONS = [inference_pb2.Continuation(text=text) for text in "bcd"]
READ = {
    "Embed": inference_pb2.EmbedRequest(inputs=TEXTS),
    "Score": inference_pb2.ScoreRequest(prompt="a", continuations=CONTINUATIONS),
    "Rerank": inference_pb2.RerankRequest(query="a", documents=["b", "c"]),
}
"""Each has the engine read three prompts."""


@pytest.mark.parametrize("name", READ)
async def test_all_prompts_that_are_read_are_freed(name):
    async with serving(fake(hold=True)) as rig:
        call = getattr(rig.inference, name)(READ[name])
        await until(lambda: len(rig.engine.seen) == 3)
        call.cancel()
        await until(lambda: not rig.engine.load().num_waiting)
        assert len(rig.engine.cancelled) == 3


def open_stream(channel) -> Any:
    return channel.unary_stream("/penstock.v1.InferenceService/Stream")


async def test_a_closed_channel_frees_everything():
    async with serving(fake(hold=True)) as rig:
        async with grpc.aio.insecure_channel(rig.server.address) as channel:
            calls: list[Any] = [open_stream(channel)(stream("a").SerializeToString()) for _ in range(5)]
            await asyncio.gather(*(call.read() for call in calls))
            assert rig.engine.load().pages_used == 5
        await until(lambda: rig.engine.load().pages_used == 0)


async def test_an_id_is_free_again_after_a_cancel():
    """The new request of that id gets only its own tokens."""
    async with serving(fake(hold=True)) as rig:
        for _ in range(3):
            call = rig.inference.Stream(stream("a", request_id="same"))
            await call.read()
            rig.engine.step(2)
            call.cancel()
            await until(lambda: rig.engine.load().pages_used == 0)
        rig.engine.release()
        assert (
            joined(await collect(rig.inference.Stream(stream("w", request_id="same")))).outputs[0].text
            == "xyz"
        )


async def test_duplicate_active_id():
    async with serving(fake(hold=True)) as rig:
        first = asyncio.ensure_future(rig.inference.Generate(generate("a", request_id="same")))
        await until(lambda: len(rig.engine.seen) == 1)
        failure = await failure_of(rig.inference.Generate(generate("b", request_id="same")))
        assert (failure.code.name, failure.reason) == ("ALREADY_EXISTS", "DUPLICATE_REQUEST_ID")
        assert rig.engine.cancelled == [], "the refused one took nothing from the first"
        rig.engine.release()
        assert (await asyncio.wait_for(first, 20)).outputs[0].text.startswith("bcd")


async def test_queue_full():
    async with serving(fake(hold=True, max_num_seqs=1, max_queued_requests=1)) as rig:
        calls = [asyncio.ensure_future(rig.inference.Generate(generate("y"))) for _ in range(2)]
        await until(lambda: len(rig.engine.seen) == 2)
        failure = await failure_of(rig.inference.Generate(generate("y")))
        assert (failure.code.name, failure.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert failure.details[1].retry_delay.ToNanoseconds() > 0
        rig.engine.release()
        await asyncio.wait_for(asyncio.gather(*calls), 20)


async def test_a_full_queue_is_told_before_anything_is_tokenized(monkeypatch):
    async with serving(fake(hold=True, max_num_seqs=1, max_queued_requests=1)) as rig:
        calls = [asyncio.ensure_future(rig.inference.Generate(generate("y"))) for _ in range(2)]
        await until(lambda: len(rig.engine.seen) == 2)
        with monkeypatch.context() as patch:
            patch.setattr(type(rig.engine.text), "encode", None)
            for refused in (
                rig.inference.Generate(generate("y")),
                rig.inference.Stream(stream("y")).read(),
            ):
                failure = await failure_of(refused)
                assert (failure.code.name, failure.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
                assert failure.info.metadata["limit"] == "1"
                assert failure.details[1].retry_delay.ToNanoseconds() > 0
        assert not rig.engine.drain(0)
        failure = await failure_of(rig.inference.Generate(generate("y")))
        assert failure.reason == "DRAINING", "what is full and ends is not worth another try"
        rig.engine.release()
        await asyncio.wait_for(asyncio.gather(*calls), 20)


async def test_engine_failure_midway_is_a_failed_stream():
    async with serving(fake(hold=True)) as rig:
        call = rig.inference.Stream(stream("a"))
        whole = asyncio.ensure_future(rig.inference.Generate(generate("a")))
        assert (await call.read()).WhichOneof("event") == "started"
        await until(lambda: len(rig.engine.seen) == 2)
        rig.engine.step(2)
        assert (await call.read()).delta.text
        rig.engine.die()

        async def rest():
            async for _ in read_all(call):
                pass

        for failing in (rest(), whole):
            failure = await failure_of(failing)
            assert (failure.code.name, failure.reason) == ("INTERNAL", "ENGINE_FAILURE")
        assert (await failure_of(rig.inference.Generate(generate("a")))).reason == "ENGINE_DEAD"


async def test_a_bug_in_one_request_ends_only_that_one(monkeypatch):
    """The text layer raises for one request: its client gets INTERNAL, and the other client
    notices nothing.
    """
    async with serving(fake(hold=True)) as rig:
        good = asyncio.ensure_future(rig.inference.Generate(generate("a", request_id="good")))
        await until(lambda: len(rig.engine.seen) == 1)

        class Broken:
            has_chat_template = False
            max_token_chars = None
            encode = CODEC.encode

            def decoder(self, **_):
                class Decoder:
                    def push(self, ids):
                        raise RuntimeError("secret")

                return Decoder()

        rig.engine.text = Broken()
        bad = asyncio.ensure_future(rig.inference.Generate(generate("a", request_id="bad")))
        await until(lambda: len(rig.engine.seen) == 2)
        rig.engine.release()
        failure = await failure_of(bad)
        assert (failure.code.name, failure.reason) == ("INTERNAL", "INTERNAL")
        assert "secret" not in failure.message
        assert rig.engine.cancelled == ["bad"]
        assert (await asyncio.wait_for(good, 20)).outputs[0].text.endswith("z")


# -- stalled readers --

SMALL_WINDOWS = [
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.max_frame_size", 16384),
]


def much(**fields):
    """Make a request of about 1.5 KB a token: 20 candidates each."""
    return stream("a", stopping={"ignore_eos": True}, output={"logprobs": 20}, **fields)


async def test_a_stalled_reader_is_given_up_and_others_go_on():
    """It reads one message and then nothing. Windows fill, the server's write blocks, and the time limit
    passes.
    """
    engine = fake(max_model_len=200_000)
    async with serving(engine, stall_limit_s=0.5, channel_options=SMALL_WINDOWS) as rig:
        stalled = rig.inference.Stream(much(request_id="stalled"))
        assert (await stalled.read()).WhichOneof("event") == "started"
        async with asyncio.timeout(WAIT_S):
            while "stalled" not in engine.cancelled:
                done = joined(await collect(rig.inference.Stream(stream("a"))))
                assert done.outputs[0].text.endswith("z"), "others are served meanwhile"
        assert engine.load().pages_used == 0
        rest = read_all(stalled)

        async def drained():
            async for message in rest:
                assert message.WhichOneof("event") == "delta"

        failure = await failure_of(drained())
        assert (failure.code.name, failure.reason) == ("RESOURCE_EXHAUSTED", "STALLED_READER")
        assert rig.server.sends.num_stalled == 1


async def test_a_slow_reader_gets_everything_merged():
    """It pauses for less than the limit: nothing is lost, and the messages that it then reads are merged."""
    engine = fake(max_model_len=3000)
    async with serving(engine, stall_limit_s=20, channel_options=SMALL_WINDOWS) as rig:
        call = rig.inference.Stream(much())
        sizes: list[int] = []
        ids: list[int] = []
        assert (await call.read()).WhichOneof("event") == "started"
        await until(lambda: engine.num_steps == 2999)  # made while nothing is read
        async for message in read_all(call):
            sizes.append(len(message.delta.token_ids))
            ids.extend(message.delta.token_ids)
        assert await call.code() is grpc.StatusCode.OK
        whole = await rig.inference.Generate(
            inference_pb2.GenerateRequest.FromString(much().SerializeToString())
        )
    assert ids == list(whole.outputs[0].token_ids)
    assert len(ids) == 2999
    assert max(sizes) > 100, "what waited was merged"


@pytest.mark.ci
async def test_a_merged_message_fits_every_client():
    """Clients refuse messages above 4 MiB by default, and more than that waits here."""
    engine = fake(max_model_len=40_000, tokens_per_step=100)
    async with serving(engine, stall_limit_s=20, channel_options=SMALL_WINDOWS) as rig:
        call = rig.inference.Stream(much())
        messages = [await call.read()]
        await until(lambda: engine.load().num_running == 0)  # all was made while nothing was read
        async for message in read_all(call):
            messages.append(message)  # noqa: PERF401 -- kept when the stream fails
        assert await call.code() is grpc.StatusCode.OK
    sizes = [message.ByteSize() for message in messages]
    assert sum(sizes) > 6 * 2**20, "more than a client takes at once"
    assert 2**16 < max(sizes) < 1.1 * 2**20, "several of 20 kB became one"
    assert len(joined(messages).outputs[0].logprobs.top) == 39_999


async def test_a_stalled_reader_that_cancels_is_forgotten():
    engine = fake(max_model_len=200_000)
    async with serving(engine, stall_limit_s=30, channel_options=SMALL_WINDOWS) as rig:
        call = rig.inference.Stream(much(request_id="stalled"))
        await call.read()
        await asyncio.sleep(0.3)
        call.cancel()
        await until(lambda: engine.load().pages_used == 0)
        assert engine.cancelled == ["stalled"]
