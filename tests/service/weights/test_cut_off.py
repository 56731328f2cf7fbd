"""Pushers that end before they have committed: cancelled, reset, vanished or killed, after any message or in
the middle of one. The old weights serve on bit for bit, and the next update finds the place free.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest

from penstock.runtime.engine import Engine
from penstock.v1 import control_pb2, inference_pb2_grpc, weights_pb2
from tests.service.rig import WAIT_S, Kept, Rig, serving
from tests.service.weights.answers import answers, asks
from tests.service.weights.brake import Brake
from tests.service.weights.fleet import Version, loaded
from tests.service.weights.h2push import Pusher
from tests.service.weights.progress import Progress
from tests.service.weights.pushing import (
    ALREADY_COMMITTED,
    COMMITTED,
    KEEP,
    WAIT,
    Message,
    chunk,
    push,
    send,
    whole,
)
from tests.support.models.table import VOCAB, random_tables, table_engine
from tests.support.models.tiny import VOCAB as TINY_VOCAB

pytestmark = pytest.mark.ci

OLD, NEW = random_tables(1), random_tables(2)
REPOSITORY = Path(__file__).parents[3]
QUESTIONS = asks(4, vocab=VOCAB, num_tokens=20)
MESSAGES = whole(NEW.tensors(), size=4000)
"""Begin, eight chunks and commit: less than HTTP/2's first window, so that a peer need not wait for more."""
assert sum(message.ByteSize() for message in MESSAGES) < 60_000
LAST = len(MESSAGES) - 1
"""So many messages come before the commit."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One for all tests that must not change its weights."""
    made = table_engine(OLD)
    yield made
    assert made.compiles_after_warmup == 0
    made.shutdown()


@pytest.fixture
def progress(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Progress:
    return Progress(engine, monkeypatch)


@pytest.fixture
async def rig(engine: Engine, progress: Progress) -> AsyncIterator[Rig]:
    """Yield a server that must be after the test what it was before."""
    async with serving(Kept(engine)) as served:
        before = await answers(served, QUESTIONS)
        generation = engine.weights.generation
        yield served
        await progress.closed()
        assert engine.weights.generation == generation
        assert await answers(served, QUESTIONS) == before
        load = engine.load()
        assert (load.num_running, load.num_waiting, load.pages_used) == (0, 0, 0)
        reply = await push(served, NEW.tensors(), stage_only=True, update_id="probe")
        assert reply.outcome == weights_pb2.UPDATE_OUTCOME_STAGED, "the place is free"
        request = control_pb2.DiscardWeightsRequest(update_id="probe")
        assert (await served.control.DiscardWeights(request)).discarded


def sent_bytes(messages: Sequence[Message]) -> int:
    return sum(len(m.chunk.data) for m in messages if m.WhichOneof("step") == "chunk")


def is_whole(messages: Sequence[Message]) -> bool:
    """Say whether they end with a commit."""
    return bool(messages) and messages[-1].WhichOneof("step") == "commit"


async def cancelled(address: str, messages: Sequence[Message], taken: Awaitable[None]) -> None:
    """Send the messages as a gRPC client that cancels its call."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.UpdateWeights()
        for message in messages:
            await call.write(message)
        if is_whole(messages):
            await call.done_writing()
        await taken
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # a whole update may have been answered
            await call


async def by_hand(
    address: str,
    messages: Sequence[Message],
    taken: Awaitable[None],
    end: Callable[[Pusher], Awaitable[None]],
    cut: int = 0,
) -> None:
    pusher = Pusher(address)
    await pusher.begin()
    if messages:
        await pusher.send(messages, cut)
    if is_whole(messages) and not cut:
        await pusher.half_close()
    await taken
    await end(pusher)
    await pusher.close()


async def half_close(pusher: Pusher) -> None:
    """Say that it is done, and be told that the commit is missing."""
    await pusher.half_close()
    assert await pusher.peer.status(pusher.stream) == grpc.StatusCode.INVALID_ARGUMENT.value[0]


End: TypeAlias = Callable[[str, Sequence[Message], Awaitable[None]], Awaitable[None]]


def by(end: Callable[[Pusher], Awaitable[None]]) -> End:
    """End what was sent by hand."""
    return lambda address, messages, taken: by_hand(address, messages, taken, end)


ENDS: Mapping[str, End] = {
    "cancel": cancelled,
    "reset": by(Pusher.reset),
    "vanish": by(Pusher.vanish),
    "close": by(Pusher.close),
    "half_close": by(half_close),
}


@pytest.mark.parametrize("how", ENDS)
async def test_a_pusher_that_ends_after_any_message(rig: Rig, progress: Progress, how: str) -> None:
    for count in range(LAST + 1):
        messages = MESSAGES[:count]
        begun = progress.begun + (count > 0)
        taken = progress.taken(begun, sent_bytes(messages)) if count else asyncio.sleep(0)
        await ENDS[how](rig.server.address, messages, taken)
        await progress.closed()
        assert rig.engine.weights.generation == 1


@pytest.mark.parametrize("how", ["reset", "vanish", "close"])
async def test_a_pusher_that_ends_in_the_middle_of_a_message(rig: Rig, progress: Progress, how: str) -> None:
    """One byte of it, half of it, and all but one byte are there."""
    ends = {"reset": Pusher.reset, "vanish": Pusher.vanish, "close": Pusher.close}
    for count in range(1, len(MESSAGES) + 1):
        size = MESSAGES[count - 1].ByteSize() + 5
        for cut in {1, size // 2, size - 1}:
            before = MESSAGES[: count - 1]
            begun = progress.begun + (count > 1)
            taken = progress.taken(begun, sent_bytes(before)) if before else asyncio.sleep(0)
            await by_hand(rig.server.address, MESSAGES[:count], taken, ends[how], cut)
            await progress.closed()
    assert rig.engine.weights.generation == 1


async def test_a_pusher_whose_process_is_killed(rig: Rig, progress: Progress, tmp_path: Path) -> None:
    for count in range(1, LAST + 1):
        sent = [message.SerializeToString() for message in MESSAGES[:count]]
        file = tmp_path / "messages"
        file.write_bytes(b"".join(len(one).to_bytes(8, "little") + one for one in sent))
        command = [sys.executable, "-m", "tests.service.weights.cut_pusher", rig.server.address, str(file)]
        begun = progress.begun + 1
        process = await asyncio.create_subprocess_exec(*command, cwd=REPOSITORY)
        try:
            async with asyncio.timeout(6 * WAIT_S):
                while (progress.begun, progress.bytes) != (begun, sent_bytes(MESSAGES[:count])):
                    assert process.returncode is None
                    await asyncio.sleep(0.01)
        finally:
            process.kill()
            await process.wait()
        await progress.closed()
        assert rig.engine.weights.generation == 1


async def test_an_update_that_is_cut_off_while_another_waits_outside(rig: Rig, progress: Progress) -> None:
    """The second is refused while the first has the place, and taken once the first one's pusher is gone."""
    pusher = Pusher(rig.server.address)
    await pusher.begin()
    await pusher.send(MESSAGES[:4])
    await progress.taken(1, sent_bytes(MESSAGES[:4]))
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await push(rig, NEW.tensors(), stage_only=True, update_id="second")
    assert told.value.code() is grpc.StatusCode.ABORTED
    await pusher.vanish()
    await progress.closed()
    reply = await push(rig, NEW.tensors(), stage_only=True, update_id="second")
    assert reply.outcome == weights_pb2.UPDATE_OUTCOME_STAGED
    request = control_pb2.DiscardWeightsRequest(update_id="second")
    assert (await rig.control.DiscardWeights(request)).discarded


# -- after the commit was sent: the update goes live or it does not, and the sender finds out which --


@pytest.mark.parametrize("how", ["cancel", "reset", "vanish"])
async def test_a_reply_that_is_lost_can_be_asked_for_again(how: str) -> None:
    """Whenever its sender is gone, an update that is sent again under its id goes live exactly once."""
    made = table_engine(OLD)
    try:
        async with serving(Kept(made)) as rig:
            for attempt in range(12):
                tables = (OLD, NEW)[attempt % 2 == 0]
                generation = made.weights.generation
                messages = whole(tables.tensors(), size=4000, update_id=f"try-{attempt}")
                await ENDS[how](rig.server.address, messages, asyncio.sleep(0.002 * attempt))
                reply = await again(rig, messages)
                assert reply.outcome in (COMMITTED, ALREADY_COMMITTED)
                assert reply.current.generation == made.weights.generation == generation + 1
                reply = await send(rig, messages)
                assert reply.outcome == ALREADY_COMMITTED
                assert made.weights.generation == generation + 1
    finally:
        made.shutdown()


async def again(rig: Rig, messages: Sequence[Message]) -> weights_pb2.UpdateWeightsResponse:
    """Send an update until it does not find itself under way."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await send(rig, messages)
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.ABORTED  # noqa: PT017 -- it may succeed at once
                await asyncio.sleep(0.01)


async def test_a_pusher_that_is_gone_while_its_update_waits_for_running_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """WAIT: the request ends on the old weights, whatever becomes of the update; asked again, it is live
    once.
    """
    made = table_engine(OLD)
    brake = Brake(made, monkeypatch)
    try:
        async with serving(Kept(made)) as rig:
            (question,) = asks(1, vocab=VOCAB, num_tokens=60)
            ((before,),) = await answers(rig, [question])
            messages = whole(NEW.tensors(), size=4000, update_id="one", in_flight=WAIT)
            brake.hold(tokens_of=1)  # not after the last step of the answer before
            running = asyncio.create_task(answers(rig, [question]))
            await brake.holding()
            assert made.load().num_running == 1
            await ENDS["reset"](rig.server.address, messages, brake.queued("update"))
            brake.release()
            ((after,),) = await running
            assert after == before
            reply = await again(rig, messages)
            assert reply.current.generation == made.weights.generation == 2
            ((new,),) = await answers(rig, [question])
            assert new[1:] != before[1:]
    finally:
        brake.release()
        made.shutdown()


# -- a real decoder, whose leaves hold parts of several tensors --


@pytest.mark.parametrize(
    "staging",
    [weights_pb2.STAGING_MODE_HOST, pytest.param(weights_pb2.STAGING_MODE_DEVICE, marks=pytest.mark.sweep)],
)
async def test_a_decoder_serves_on_whichever_tensors_have_come(
    versions: Mapping[str, Version], monkeypatch: pytest.MonkeyPatch, staging: int
) -> None:
    """Cut off after each tensor, while requests run: each of them ends as it would without the pushers."""
    made = loaded(versions["initial"].directory)
    progress = Progress(made, monkeypatch)
    questions = asks(4, vocab=TINY_VOCAB, num_tokens=20)
    messages = whole(versions["b"].tensors, staging=staging)
    over = asyncio.Event()
    try:
        async with serving(Kept(made)) as rig:
            before = await answers(rig, questions)

            async def caller(number: int) -> None:
                while not over.is_set():
                    assert await answers(rig, questions[number : number + 1]) == before[number : number + 1]

            async with asyncio.TaskGroup() as callers:
                for number in range(4):
                    callers.create_task(caller(number))
                for count in range(1, len(messages)):
                    taken = progress.taken(count, sent_bytes(messages[:count]))
                    await cancelled(rig.server.address, messages[:count], taken)
                    await progress.closed()
                over.set()
            assert await answers(rig, questions) == before
            assert made.weights.generation == 1
    finally:
        made.shutdown()


async def test_in_place_serves_on_until_the_first_leaf_is_replaced(
    versions: Mapping[str, Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pusher that goes after begin has harmed nothing; one that goes later leaves a server that says so."""
    made = loaded(versions["initial"].directory)
    progress = Progress(made, monkeypatch)
    questions = asks(2, vocab=TINY_VOCAB, num_tokens=10)
    messages = whole(versions["b"].tensors, staging=weights_pb2.STAGING_MODE_IN_PLACE, in_flight=KEEP)
    try:
        async with serving(Kept(made)) as rig:
            before = await answers(rig, questions)
            for few in ([messages[0]], [messages[0], chunk(0, 0, messages[1].chunk.data[:10])]):
                await cancelled(rig.server.address, few, progress.taken(progress.begun + 1, sent_bytes(few)))
                await progress.closed()
                assert await answers(rig, questions) == before
            half = messages[: len(messages) // 2]
            await cancelled(rig.server.address, half, progress.taken(progress.begun + 1, sent_bytes(half)))
            await progress.closed()
            async with asyncio.timeout(WAIT_S):
                while await rig.health_of() != 2:  # noqa: ASYNC110 -- what is watched has no event
                    await asyncio.sleep(0.01)
            with pytest.raises(grpc.aio.AioRpcError) as told:
                await answers(rig, questions)
            assert told.value.code() is grpc.StatusCode.UNAVAILABLE
            assert (await push(rig, versions["initial"].tensors)).outcome == COMMITTED
            assert await rig.health_of() == 1
            mended = await answers(rig, questions)
            assert [[cut[2:] for cut in one] for one in mended] == [
                [cut[2:] for cut in one] for one in before
            ]
    finally:
        made.shutdown()
