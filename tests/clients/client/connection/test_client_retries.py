"""Which calls are tried again, when, and how long a call may take."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import threading

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from penstock import client as api
from penstock.client import AsyncClient, Client, Retry
from penstock.client.connection.channel import Attempts
from penstock.client.error_table import BY_REASON
from penstock.client.errors import PenstockClientError
from penstock.client.status import StatusDetails
from penstock.runtime.errors import DuplicateRequestId
from tests.service.h2peer import ACK, GOAWAY, HEADERS, PREFACE, RST_STREAM, SETTINGS, frame
from tests.service.rig import fake as fake_engine
from tests.service.rig import serving, until
from tests.support.freezing_proxy import freezing_proxy

Code = grpc.StatusCode
AGAIN = [
    (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    (Code.RESOURCE_EXHAUSTED, "BUSY"),
    (Code.RESOURCE_EXHAUSTED, "RATE_LIMITED"),
    (Code.UNAVAILABLE, "NOT_READY"),
    (Code.UNAVAILABLE, "DRAINING"),
    (Code.UNAVAILABLE, "ENGINE_DEAD"),
    (Code.UNAVAILABLE, ""),
    (Code.CANCELLED, ""),
]
FINAL = [
    (Code.INVALID_ARGUMENT, "INVALID_FIELD"),
    (Code.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID"),
    (Code.UNAUTHENTICATED, "UNAUTHENTICATED"),
    (Code.RESOURCE_EXHAUSTED, "STALLED_READER"),
    (Code.DEADLINE_EXCEEDED, ""),
    (Code.INTERNAL, ""),
    (Code.INTERNAL, "ENGINE_FAILURE"),
    (Code.CANCELLED, "OF_A_PROXY"),
]
CANCEL = 0x8
"""HTTP/2's error code."""
QUICK = Retry(attempts=4, initial_delay=0.001)


async def generate(addr, retries, kind, limit_s=None):
    """Return the answer, asked for in each of the four ways."""
    match kind:
        case "unary":
            with Client(addr, retries=retries) as client:
                return await asyncio.to_thread(client.generate, "p", timeout=limit_s)
        case "stream":
            with Client(addr, retries=retries) as client:
                stream = client.stream("p", timeout=limit_s)
                return await asyncio.to_thread(stream.result)
        case "unary async":
            async with AsyncClient(addr, retries=retries) as aio:
                return await aio.generate("p", timeout=limit_s)
        case _:
            async with AsyncClient(addr, retries=retries) as aio:
                return await aio.stream("p", timeout=limit_s).result()


KINDS = pytest.mark.parametrize("kind", ["unary", "stream", "unary async", "stream async"])


@KINDS
@pytest.mark.parametrize("status", AGAIN, ids=str)
async def test_what_the_server_could_not_take_is_tried_again(server, failure, expected, kind, status):
    server.failures = [failure(*status)] * 3
    assert await generate(server.addr, QUICK, kind) == expected
    assert len(server.calls) == 4
    assert all(call == server.calls[0] for call in server.calls)


@KINDS
async def test_after_the_last_attempt_its_error_is_raised(server, failure, kind):
    server.failures = [failure(Code.UNAVAILABLE, "NOT_READY", f"attempt {i}") for i in (1, 2, 3, 4, 5)]
    with pytest.raises(api.NotReady, match="attempt 4"):
        await generate(server.addr, QUICK, kind)
    assert len(server.calls) == 4


@KINDS
@pytest.mark.parametrize("status", FINAL, ids=str)
async def test_other_failures_are_final(server, failure, kind, status):
    server.failure = failure(*status)
    with pytest.raises(PenstockClientError):
        await generate(server.addr, QUICK, kind)
    assert len(server.calls) == 1


@KINDS
async def test_by_default_nothing_is_tried_again(server, failure, kind):
    server.failure = failure(Code.UNAVAILABLE, "NOT_READY")
    with pytest.raises(api.NotReady):
        await generate(server.addr, None, kind)
    assert len(server.calls) == 1


@pytest.mark.parametrize("kind", ["stream", "stream async"])
@pytest.mark.parametrize(
    ("code", "error"), [(Code.UNAVAILABLE, api.Unreachable), (Code.CANCELLED, api.Cancelled)]
)
async def test_an_answer_that_began_is_not_begun_again(server, failure, kind, code, error):
    server.replies = server.replies[:1]
    server.stream_failure = failure(code, "", "it broke")
    with pytest.raises(error, match="it broke"):
        await generate(server.addr, QUICK, kind)
    assert len(server.calls) == 1


@KINDS
async def test_all_attempts_have_one_deadline(server, failure, kind):
    server.failure = failure(Code.UNAVAILABLE, "NOT_READY")
    forever = Retry(attempts=10**6, initial_delay=0.05, max_delay=0.05)
    with pytest.raises((api.NotReady, api.DeadlineExceeded)):
        await generate(server.addr, forever, kind, limit_s=2.0)
    assert len(server.calls) > 1
    assert all(left is not None and left <= 2.2 for left in server.remaining)


@KINDS
async def test_a_wait_that_the_deadline_would_cut_is_not_begun(server, failure, kind):
    server.failure = failure(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after=Duration(seconds=500))
    patient = Retry(initial_delay=0.001, max_delay=1000)
    with pytest.raises(api.QueueFull):  # tried again at once: a wait would exceed the test's time limit
        await generate(server.addr, patient, kind, limit_s=400)
    assert len(server.calls) == 1


async def test_closing_ends_the_wait(server, failure):
    """The wait before a retry that is due in many minutes."""
    server.failure = failure(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after=Duration(seconds=600))
    patient = Retry(initial_delay=0.001, max_delay=1000)
    with Client(server.addr, retries=patient) as client:
        stream = client.stream("p")
        reading = asyncio.create_task(asyncio.to_thread(list, stream))
        await until(lambda: len(server.calls) == 1)
        await asyncio.sleep(0.2)  # it waits by now, most likely; it ends either way
        stream.close()
        assert await asyncio.wait_for(reading, 60) == []
    async with AsyncClient(server.addr, retries=patient) as aio:
        aio_stream = aio.stream("p")

        async def read():
            return [event async for event in aio_stream]

        reading = asyncio.create_task(read())
        await until(lambda: len(server.calls) == 2)
        await asyncio.sleep(0.2)
        await aio_stream.aclose()
        assert await asyncio.wait_for(reading, 60) == []
    assert len(server.calls) == 2


def refused(reason="NOT_READY", code=Code.UNAVAILABLE, retry_after=None):
    kind = BY_REASON.get(reason, api.Unreachable)
    return kind(StatusDetails(code, "no", reason, retry_after=retry_after))


@pytest.fixture
def longest(monkeypatch):
    """Make the random parts as long as they can be."""
    monkeypatch.setattr("penstock.client.connection.channel.random.uniform", lambda low, high: high)


def test_waits_grow_up_to_a_limit(longest):
    attempts = Attempts(Retry(attempts=7, initial_delay=0.5, max_delay=5), None)
    assert [attempts.delay_after(refused()) for _ in range(7)] == [0.5, 1, 2, 4, 5, 5, None]


def test_waits_are_random(monkeypatch):
    asked = []

    def drawn(*bounds):
        asked.append(bounds)
        return 0.25

    monkeypatch.setattr("penstock.client.connection.channel.random.uniform", drawn)
    attempts = Attempts(Retry(attempts=3), None)
    assert [attempts.delay_after(refused()) for _ in range(2)] == [0.25, 0.25]
    assert asked == [(0, 0.5), (0, 1.0)]


def test_nobody_comes_back_sooner_than_the_server_asks(longest):
    attempts = Attempts(Retry(attempts=9, initial_delay=0.5, max_delay=5), None)
    assert attempts.delay_after(refused(retry_after=3.0)) == 3.5
    assert attempts.delay_after(refused(retry_after=5.0)) == 6.0
    assert attempts.delay_after(refused(retry_after=5.1)) is None


def test_very_many_attempts(longest):
    attempts = Attempts(Retry(attempts=10**9, initial_delay=1e-3, max_delay=1e6), None)
    for _ in range(3000):
        delay = attempts.delay_after(refused())
    assert delay == 1e6


def test_a_duplicate_may_be_ones_own_after_a_broken_connection():
    duplicate = refused("DUPLICATE_REQUEST_ID", Code.ALREADY_EXISTS)
    attempts = Attempts(QUICK, None)
    assert attempts.delay_after(refused("QUEUE_FULL")) is not None
    assert attempts.delay_after(duplicate) is None
    attempts = Attempts(QUICK, None)
    assert attempts.delay_after(refused("", Code.UNAVAILABLE)) is not None
    assert attempts.delay_after(duplicate) is not None
    assert attempts.delay_after(duplicate) is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"initial_delay": 0},
        {"initial_delay": math.nan},
        {"max_delay": 0.1},
        {"max_delay": math.inf},
    ],
    ids=str,
)
def test_senseless_retries(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Retry(**wrong)


async def test_a_lost_attempt_that_still_runs_is_waited_for():
    """The network freezes: the client notices and asks again, while the server still runs the
    first attempt.
    """
    engine = fake_engine(hold=True)
    submit, refusals = engine.submit, []

    def counting(*arguments, **named):
        try:
            return submit(*arguments, **named)
        except DuplicateRequestId:
            refusals.append(arguments)
            raise

    engine.submit = counting  # type: ignore[method-assign]
    quick = (("grpc.keepalive_time_ms", 1000), ("grpc.keepalive_timeout_ms", 1000))
    retries = Retry(attempts=1000, initial_delay=0.05, max_delay=0.2)
    async with serving(engine) as rig:
        with freezing_proxy(rig.server.address) as proxy:
            async with AsyncClient(proxy.addr, options=quick, retries=retries, timeout=120) as client:
                asking = asyncio.create_task(client.generate("y", request_id="mine", max_tokens=1))
                await until(lambda: bool(engine.seen))
                proxy.freeze()
                await until(lambda: bool(refusals))
                assert not asking.done()
                engine.release()
                assert (await asking).request_id == "mine"


TIMEOUTS = [
    ("generate", lambda client, **more: client.generate("p", **more), None),
    ("stream", lambda client, **more: client.stream("p", **more).result(), None),
    ("load", lambda client, **more: client.load(**more), (0, 10)),
    ("model_info", lambda client, **more: client.model_info(**more), (0, 10)),
    ("server_info", lambda client, **more: client.server_info(**more), (0, 10)),
    ("set_tracing", lambda client, **more: client.set_tracing(**more), (0, 10)),
    ("profile", lambda client, **more: client.profile(**more), None),
    ("flush_cache", lambda client, **more: client.flush_cache(**more), (0, 10)),
    ("abort", lambda client, **more: client.abort("a", **more), (0, 10)),
    ("tokenize", lambda client, **more: client.tokenize("a", **more), (10, 60)),
    ("detokenize", lambda client, **more: client.detokenize([1], **more), (10, 60)),
    ("vocabulary", lambda client, **more: client.vocabulary(**more), (0, 10)),
]


@pytest.mark.parametrize(("name", "call", "bounds"), TIMEOUTS, ids=[name for name, *_ in TIMEOUTS])
async def test_how_long_a_call_may_take(server, name, call, bounds):
    """The default, the client's timeout, the call's timeout, and no limit."""
    with Client(server.addr) as client:
        call(client)
        call(client, timeout=200)
        call(client, timeout=math.inf)
    with Client(server.addr, timeout=400) as client:
        call(client)
        call(client, timeout=200)
        call(client, timeout=math.inf)
    async with AsyncClient(server.addr) as aio:
        await call(aio)
    async with AsyncClient(server.addr, timeout=math.inf) as aio:
        await call(aio)

    def within(left, low, high):
        return left is not None and low < left <= high * 1.1  # rounded up on the wire

    default, given, endless, own, given_too, endless_too, default_async, none_async = map(
        limit, server.remaining
    )
    for found in (default, default_async):
        assert found is None if bounds is None else within(found, *bounds)
    assert within(given, 100, 200)
    assert within(given_too, 100, 200)
    assert within(own, 200, 400)
    assert endless is endless_too is none_async is None


def limit(left):
    """Return the deadline in seconds, or None: for no deadline gRPC reports some hundred years."""
    return None if left is None or left > 1e8 else left


@pytest.mark.parametrize("wrong", [-1.0, math.nan])
def test_senseless_timeouts(server, wrong):
    with pytest.raises(ValueError, match="timeout: must be at least 0 seconds"):
        Client(timeout=wrong)
    with (
        Client(server.addr) as client,
        pytest.raises(ValueError, match="timeout: must be at least 0 seconds"),
    ):
        client.load(timeout=wrong)


@contextlib.asynccontextmanager
async def goes_away(num_calls):
    """Run a server that ends this many calls by a bare RST_STREAM and its connections by GOAWAY, and then
    accepts no connection any more. Yields the number of calls.
    """
    ended: list[int] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while len(ended) < num_calls:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as received:
                received.read(len(PREFACE))
                connection.sendall(frame(SETTINGS, 0, 0))
                while header := received.read(9):
                    received.read(int.from_bytes(header[:3], "big"))
                    kind, flags, stream = header[3], header[4], int.from_bytes(header[5:], "big")
                    if kind == SETTINGS and not flags & ACK:
                        connection.sendall(frame(SETTINGS, ACK, 0))
                    if kind == HEADERS:
                        ended.append(stream)
                        reset = frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL))
                        connection.sendall(reset + frame(GOAWAY, 0, 0, struct.pack(">II", stream, 0)))
                        connection.shutdown(socket.SHUT_WR)
                        received.read()  # until the client has closed it
        listener.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}", ended
    await asyncio.to_thread(thread.join, 20)
    assert not thread.is_alive()


@KINDS
async def test_a_call_that_crosses_the_end_of_its_connection_is_tried_again(kind):
    async with goes_away(2) as (addr, ended):
        with pytest.raises(api.Unreachable) as caught:
            await generate(addr, Retry(attempts=2, initial_delay=0.001), kind, 60)
    assert len(ended) == 2
    assert caught.value.code is Code.CANCELLED
