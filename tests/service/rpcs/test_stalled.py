"""Peers that take nothing, and peers that vanish: nothing of their RPCs is left, whichever kind they are.

The peer here speaks HTTP/2 by hand, with windows of 0: headers and trailers reach it, but no byte of a
message. Python's garbage collector is off in most tests, so that an RPC must end because nothing refers to
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from penstock.service.limits.admission import Kind
from penstock.service.replies.outputs import StallLog
from penstock.service.rpcs import ending
from penstock.service.servicers.inference import ServedRequest
from penstock.service.servicers.serving import Serving
from penstock.v1 import control_pb2
from tests.service.h2peer import (
    DATA,
    END_STREAM,
    INITIAL_WINDOW_SIZE,
    SETTINGS,
    WINDOW_UPDATE,
    Peer,
    frame,
    grpc_message,
)
from tests.service.rig import Rig, collect, fake, generate, serving, stream, until

GENERATE, STREAM = "/penstock.v1.InferenceService/Generate", "/penstock.v1.InferenceService/Stream"
MODEL_INFO, TOKENIZE = "/penstock.v1.ControlService/GetModelInfo", "/penstock.v1.ControlService/Tokenize"
MIB = 2**20
MAX_FRAME = 16_384


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the stall limit, which each test sets, there is little more to wait for."""
    monkeypatch.setattr(ending, "LAST_WORDS_S", 0.2)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def tasks() -> int:
    """gRPC's tasks: two for each RPC that has not ended."""
    return sum("rpc" in task.get_coro().__qualname__ for task in asyncio.all_tasks())  # type: ignore[union-attr]


def served_requests(serving: Serving) -> int:
    """How many requests of one server there are; errors that other tests keep hold some of others."""
    return sum(isinstance(one, ServedRequest) and one.serving is serving for one in gc.get_objects())


@contextlib.asynccontextmanager
async def peer_of(rig: Rig, **options: Any) -> AsyncIterator[Peer]:
    async with Peer(rig.server.address, **options) as peer:
        yield peer


async def nothing_left(rig: Rig) -> None:
    """Say whether nothing of any RPC is left in the engine, in the service, and in gRPC."""
    await until(lambda: tasks() == 0)
    await until(lambda: rig.engine.load().pages_used == 0)
    await until(lambda: not rig.serving.switchboard.holders)
    budget = rig.serving.budget
    await until(lambda: budget.num_shares == 0 and budget.used == 0)
    await until(lambda: all(rig.server.admission.active(kind) == 0 for kind in Kind))
    assert served_requests(rig.serving) == 0


@pytest.mark.ci
async def test_replies_that_nobody_takes_end(no_collector: None) -> None:
    """50 streams, 50 unary RPCs, and one RPC of each other kind. The peer learns of their end, which needs no
    window, and other clients are served.
    """
    async with serving(fake(max_model_len=100_000), stall_limit_s=0.5) as rig, peer_of(rig) as peer:
        calls = []
        for i in range(50):
            streaming = stream("a", request_id=f"s{i}", stopping={"ignore_eos": True})
            calls.append(await peer.call(STREAM, streaming.SerializeToString()))
            calls.append(await peer.call(GENERATE, generate("a", request_id=f"u{i}").SerializeToString()))
        tokenize = control_pb2.TokenizeRequest(text="a" * 60)
        calls.append(await peer.call(TOKENIZE, tokenize.SerializeToString()))
        info = control_pb2.GetModelInfoRequest(include_tensors=True)
        calls.append(await peer.call(MODEL_INFO, info.SerializeToString()))
        watch = health_pb2.HealthCheckRequest().SerializeToString()
        calls += [await peer.call(f"/grpc.health.v1.Health/{name}", watch) for name in ("Check", "Watch")]
        asked = reflection_pb2.ServerReflectionRequest(list_services="*").SerializeToString()
        # The handler of this call ends, too, but gRPC keeps the call until the connection ends.
        reflected = await peer.call("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", asked)
        await peer.until(lambda: all(peer.headers(call) for call in [*calls, reflected]))
        assert (await collect(rig.inference.Stream(stream("a"))))[-1].HasField("summary")
        await peer.until(lambda: all(peer.ended(call) for call in calls))
        assert all(peer.body(call) == b"" for call in calls)
        cancelled = str(grpc.StatusCode.CANCELLED.value[0]).encode()
        assert {peer.headers(call)["grpc-status"] for call in calls} == {cancelled}
        await until(lambda: rig.server.sends.num_stalled >= len([*calls, reflected]))
        await nothing_left(rig)
        assert rig.server.sends.num_stalled == len([*calls, reflected]), "each is counted once"
        assert (await rig.inference.Generate(generate("a"))).outputs[0].text.endswith("z")


async def test_a_call_is_counted_once_as_stalled() -> None:
    """Its reader may be given up first, and then the reply that says so."""
    sends = ending.Sends(1.0, StallLog())
    send = sends.start("Stream")
    send.stalled()
    send.stalled()
    assert sends.num_stalled == 1
    send.close()


async def test_a_reader_that_comes_back_in_time_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "LAST_WORDS_S", 600.0)
    async with serving(stall_limit_s=0.2) as rig, peer_of(rig) as peer:
        call = await peer.call(GENERATE, generate("a").SerializeToString())
        await peer.until(lambda: peer.headers(call))
        await asyncio.sleep(0.5)
        await peer.open_window(call, 2**16)
        assert await peer.status(call) == 0


async def test_a_stream_that_is_read_slowly_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message has a limit of its own: the stream as a whole takes many times that."""
    monkeypatch.setattr(ending, "LAST_WORDS_S", 1.0)
    async with serving(fake(hold=True), stall_limit_s=1.0) as rig:
        call = rig.inference.Stream(stream("a"))
        assert (await call.read()).HasField("started")
        for _ in range(8):
            await asyncio.sleep(0.4)
            rig.engine.step()
            assert (await call.read()).HasField("delta")
        rig.engine.release()
        while (message := await call.read()) is not grpc.aio.EOF:
            last = message
        assert last.HasField("summary")


@pytest.mark.ci
async def test_a_large_message_that_is_read_steadily_goes_on() -> None:
    """Meanwhile the reader takes nothing of what else is generated, and yet it is there."""
    request = stream(
        prompt_token_ids={"ids": [97] * 8000},
        output={"prompt_logprobs": 20},
        stopping={"max_tokens": 1000, "ignore_eos": True},
    )
    engine = fake(max_model_len=10_000)
    # It is read for twice the limit, and often enough also where the machine is very busy.
    async with serving(engine, stall_limit_s=2.0) as rig, peer_of(rig) as peer:
        call = await peer.call(STREAM, request.SerializeToString())
        await peer.until(lambda: peer.headers(call))
        for _ in range(10):
            await asyncio.sleep(0.4)
            for number in (0, call):
                await peer.open_window(number, 100_000)
        assert rig.engine.cancelled == []
        for number in (0, call):
            await peer.open_window(number, 100 * MIB)
        assert await peer.status(call) == 0
        assert len(peer.body(call)) > MIB


async def test_a_call_that_has_nothing_to_tell_goes_on() -> None:
    """As a watch of health, whose handler writes by itself: nothing is late once a message has been taken."""

    class Taken:
        """A context whose client takes each message at once."""

        async def write(self, message: bytes) -> None:
            pass

    sends = ending.Sends(0.0, StallLog())
    send = sends.start("grpc.health.v1.Health/Watch")
    await send.followed(Taken()).write(b"")
    await asyncio.sleep(ending.LAST_WORDS_S + 2 * ending.SECOND_LOOK_S)
    assert (send.gave_up, sends.num_stalled) == (False, 0)


def test_large_messages_have_more_time() -> None:
    """As much as a slow network needs."""
    sends = ending.Sends(30.0, Any)  # type: ignore[arg-type]
    assert sends.limit_s(0) == pytest.approx(30.2)
    assert sends.limit_s(64 * MIB) > 500


class Upload:
    """Sends messages of any size over a peer's connection, as fast as the server's windows allow."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._sent = 0

    async def call(self, method: str, message: bytes) -> int:
        """As the peer's method."""
        number = await self._peer.call(method, None, end=False)
        data, sent = grpc_message(message), 0
        while sent < len(data):
            part = data[sent : sent + MAX_FRAME]

            def has_room(part: bytes = part, sent: int = sent) -> bool:
                room = min(self._window(number) - sent, self._window(0) - self._sent)
                return room >= len(part)

            await self._peer.until(has_room)
            sent, self._sent = sent + len(part), self._sent + len(part)
            await self._peer.send(frame(DATA, END_STREAM if sent == len(data) else 0, number, part))
        return number

    def _window(self, stream: int) -> int:
        """Bytes that may be sent on the stream from its beginning; 0 stands for all streams together."""
        size = 65535
        for settings in self._peer.of(0, SETTINGS) if stream else ():
            pairs = struct.iter_unpack(">HI", settings.payload)
            size = next((value for key, value in pairs if key == INITIAL_WINDOW_SIZE), size)
        updates = self._peer.of(stream, WINDOW_UPDATE)
        return size + sum(int.from_bytes(update.payload, "big") for update in updates)


@pytest.mark.ci
async def test_memory_of_stalled_readers_is_given_back(no_collector: None) -> None:
    """Of 8 unread streams with prompts of 500 KB: their bytes, messages, ids and jobs."""
    request = stream(
        "a" * 500_000,
        stopping={"ignore_eos": True},
        context={"truncation": "TRUNCATION_LEFT"},
        output={"logprobs": 20},
    ).SerializeToString()
    engine = fake(max_model_len=2_000, max_num_seqs=8, hold=True)
    async with serving(engine, stall_limit_s=3.0) as rig, peer_of(rig) as peer:
        engine.step(1)
        await rig.inference.Generate(generate("a", stopping={"max_tokens": 1}))  # what is made once
        upload = Upload(peer)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            calls = [await upload.call(STREAM, request) for _ in range(8)]
            await peer.until(lambda: all(peer.headers(call) for call in calls))
            for _ in range(400):  # what reads the prompts needs a moment
                held = tracemalloc.get_traced_memory()[0] - before
                if held < 2 * MIB:
                    break
                await asyncio.sleep(0.05)
            engine.release()
            await peer.until(lambda: all(peer.ended(call) for call in calls[:-1]))
            await nothing_left(rig)
            left = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert held < 2 * MIB, "while they run, too, nothing is kept of a prompt but what fits the context"
        assert left < 1.5 * MIB


# -- peers that vanish --


@pytest.mark.parametrize("how", ["closed", "reset"])
async def test_a_peer_that_vanishes_leaves_nothing(how: str, no_collector: None) -> None:
    """At any point: while replies are blocked, and while requests wait and run."""
    async with serving(fake(hold=True, max_num_seqs=8, max_model_len=10_000)) as rig:
        await rig.health_of()
        connected = len(os.listdir("/proc/self/fd"))
        peer = Peer(rig.server.address)
        await peer.__aenter__()
        for i in range(20):
            method, request = (STREAM, stream("a")) if i % 2 else (GENERATE, generate("a"))
            await peer.call(method, request.SerializeToString())
        await peer.call(GENERATE, None, end=False)  # the message of this call never comes
        await until(lambda: len(rig.engine.seen) == 20)
        rig.engine.step(30)
        await until(lambda: rig.engine.num_steps == 30)
        if how == "reset":
            for number in range(1, 42, 2):
                await peer.reset(number)
            await nothing_left(rig)
        await peer.close()
        await nothing_left(rig)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= connected)


CLIENT = """
import sys, threading
import grpc
channel = grpc.insecure_channel(sys.argv[1])
call = channel.unary_stream("/penstock.v1.InferenceService/Stream")
streams = [call(bytes.fromhex(sys.argv[2])) for _ in range(10)]
for one in streams:
    next(one)
print("reading", flush=True)
threading.Event().wait()
"""


async def test_a_client_that_is_killed_leaves_nothing(no_collector: None) -> None:
    async with serving(fake(max_model_len=10_000_000)) as rig:
        request = stream("a", stopping={"ignore_eos": True}).SerializeToString()
        client = subprocess.Popen(  # noqa: ASYNC220 -- begun at once
            [sys.executable, "-c", CLIENT, rig.server.address, request.hex()], stdout=subprocess.PIPE
        )
        try:
            assert client.stdout is not None
            assert await asyncio.to_thread(client.stdout.readline) == b"reading\n"
            await until(lambda: rig.engine.load().num_running == 10)  # the first message comes before its row
            os.kill(client.pid, signal.SIGKILL)
            await nothing_left(rig)
        finally:
            client.kill()
            client.wait()
            assert client.stdout is not None
            client.stdout.close()


# -- the log --


async def test_cancels_of_blocked_replies_leave_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC takes them for errors of its own."""
    async with serving(fake(max_model_len=10_000)) as rig, peer_of(rig) as peer:
        for _ in range(5):
            calls = [
                await peer.call(method, request.SerializeToString())
                for method, request in ((STREAM, stream("a")), (GENERATE, generate("a")))
            ]
            await peer.until(lambda calls=calls: all(peer.headers(call) for call in calls))  # type: ignore[misc]
            for call in calls:
                await peer.reset(call)
        await nothing_left(rig)
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_other_errors_of_grpc_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Only that one is filtered."""
    logger = logging.getLogger("grpc._cython.cygrpc")

    def fail(kind: str, text: str) -> None:
        try:
            raise type(kind, (Exception,), {})
        except Exception:
            logger.exception(text)

    async with serving():
        fail("ExecuteBatchError", "ExecuteBatchError raised in core by servicer method [/x]")
        fail("ExecuteBatchError", "something else")
        fail("ValueError", "ExecuteBatchError raised in core by servicer method [/x]")
        logger.error("ExecuteBatchError raised in core by servicer method [/x]")
    assert len(caplog.records) == 3
