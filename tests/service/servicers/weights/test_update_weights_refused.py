"""Uploads that go wrong, from the peer's side: each is refused with its reason, or ends unseen, and leaves
nothing behind. The weights of the start serve on, and the next update is taken.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2

from penstock.runtime.sent_tensors import SentTensor
from penstock.service.limits.admission import Kind
from penstock.service.limits.bounds import Bounds
from penstock.service.rpcs.interceptors import Undecoded
from penstock.service.servicers.weights import WeightUpdates
from penstock.v1 import control_pb2, weights_pb2
from tests.service.h2peer import DATA, Peer, frame, grpc_message
from tests.service.rig import Failure, Rig, failure_of, generate, serving, until
from tests.service.updatable import updatable
from tests.service.weights_rig import (
    Step,
    begin,
    bytes_of,
    chunk,
    chunks,
    commit,
    fake_tensors,
    push,
    steps,
    written,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

OLD, NEW = fake_tensors(0), fake_tensors(7)
TOTAL = sum(len(data) for _, data in NEW.values())
EMBEDDING, NORM = NEW
UPDATE = "/penstock.v1.InferenceService/UpdateWeights"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
Spoil = Callable[[list[Step]], list[Step]]
numbers = count(10)


@asynccontextmanager
async def unchanged(rig: Rig) -> AsyncIterator[Rig]:
    """Check that the server at the end has the weights that it had, nothing open, and takes an update."""
    engine, updater, number = rig.engine, rig.engine.updater, next(numbers)
    before = (updater.serving, engine.weights)
    updater.events.clear()
    updater.options.clear()
    yield rig
    await until(lambda: rig.server.admission.active(Kind.UPDATE) == 0)
    await until(lambda: updater.events.count("close") == len(updater.options))
    assert (updater.serving, engine.weights) == before
    assert (await rig.inference.Generate(generate("y"), timeout=20)).outputs[0].text == "z"
    tensors = fake_tensors(number % 100 + 10)
    reply = await push(rig, steps(tensors, update_id=f"next {number}"))
    assert reply.outcome == weights_pb2.UPDATE_OUTCOME_COMMITTED
    assert updater.serving == bytes_of(tensors) != before[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server_of_file() -> AsyncIterator[Rig]:
    """Serve the uploads of all tests that need no server of their own."""
    async with serving(updatable()) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="module")
async def rig(server_of_file: Rig) -> AsyncIterator[Rig]:
    async with unchanged(server_of_file) as rig:
        yield rig


def _replaced(index: int, step: Step) -> Spoil:
    return lambda messages: [*messages[:index], step, *messages[index + 1 :]]


def _listed(*parts: Step) -> Step:
    return Step(chunks=weights_pb2.TensorChunks(chunks=[part.chunk for part in parts]))


NEXT_BYTE = f"the next byte of {EMBEDDING} is"
SPOILED: dict[str, tuple[Spoil, str, str]] = {
    "nothing at all": (lambda m: [], "INVALID_FIELD", "begin"),
    "no begin": (lambda m: m[1:], "INVALID_FIELD", "begin must be the first"),
    "begin twice": (lambda m: [m[0], *m], "INVALID_FIELD", "begin comes once"),
    "no commit": (lambda m: m[:-1], "INVALID_FIELD", "without commit"),
    "begin only": (lambda m: m[:1], "INVALID_FIELD", "without commit"),
    "commit twice": (lambda m: [*m, m[-1]], "INVALID_FIELD", "nothing may follow commit"),
    "a chunk after commit": (lambda m: [*m, m[1]], "INVALID_FIELD", "nothing may follow commit"),
    "no step": (_replaced(2, Step()), "INVALID_FIELD", "has no step"),
    "no step first": (lambda m: [Step(), *m], "INVALID_FIELD", "begin must be the first"),
    "reordered": (lambda m: [m[0], m[2], m[1], *m[3:]], "INVALID_FIELD", f"is 1000; {NEXT_BYTE} 0"),
    "a chunk twice": (lambda m: [m[0], m[1], *m[1:]], "INVALID_FIELD", f"is 0; {NEXT_BYTE} 1000"),
    "a chunk left out": (lambda m: [m[0], *m[2:]], "INVALID_FIELD", f"is 1000; {NEXT_BYTE} 0"),
    "unknown tensor": (_replaced(1, chunk(2, 0, b"x")), "INVALID_FIELD", "must be below 2"),
    "a list in another order": (
        lambda m: [m[0], _listed(m[2], m[1]), *m[3:]],
        "INVALID_FIELD",
        f"chunks.chunks[0].offset: is 1000; {NEXT_BYTE} 0",
    ),
    "unknown tensor in a list": (
        lambda m: [m[0], _listed(m[1], chunk(2, 0, b"x")), *m[2:]],
        "INVALID_FIELD",
        "chunks.chunks[1].tensor_index: must be below 2",
    ),
    "no bytes in a list": (
        lambda m: [m[0], _listed(m[1], chunk(1, 0, b"")), *m[2:]],
        "INVALID_FIELD",
        "chunks.chunks[1].data: must have at least one byte",
    ),
    "an empty list": (_replaced(1, _listed()), "INVALID_FIELD", "must have 1 to 4096 chunks, not 0"),
    "a long list": (
        lambda m: [m[0], _listed(*[chunk(1, i, b"x") for i in range(4097)]), *m[1:]],
        "INVALID_FIELD",
        "must have 1 to 4096 chunks, not 4097",
    ),
    "another total": (lambda m: [*m[:-1], commit(TOTAL + 1)], "INVALID_FIELD", "bytes have come"),
    "no total": (lambda m: [*m[:-1], commit(0)], "INVALID_FIELD", "bytes have come"),
    "in place and staged": (
        lambda m: [begin(NEW, staging=weights_pb2.STAGING_MODE_IN_PLACE, stage_only=True), *m[1:]],
        "INVALID_FIELD",
        "begin.staging",
    ),
    "other generation": (
        lambda m: [begin(NEW, expected_generation=10**6), *m[1:]],
        "GENERATION_CHANGED",
        "generation 1000000",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
async def test_a_spoiled_upload_changes_nothing(rig: Rig, name: str) -> None:
    spoil, reason, part = SPOILED[name]
    failure = await failure_of(push(rig, spoil(steps(NEW))))
    assert failure.reason == reason
    assert part in failure.message


def _corrupted(by: str) -> list[Step]:
    """Return all messages of an update. The first byte of its second chunk is not the one of which the
    manifest has a checksum.
    """
    messages = steps(NEW)
    if by == "sha256":
        for entry, (_, data) in zip(messages[0].begin.manifest.tensors, NEW.values(), strict=True):
            entry.crc32c, entry.sha256 = 0, hashlib.sha256(data).digest()
    messages[2].chunk.data = b"\0" + messages[2].chunk.data[1:]
    return messages


def _beyond_bfloat16() -> list[Step]:
    """3.4e38 is a float32 that no bfloat16 holds."""
    shape = NEW[EMBEDDING][0].shape
    wide = np.full(shape, 3.4e38, np.float32).tobytes()
    return steps({**NEW, EMBEDDING: (SentTensor(EMBEDDING, "F32", shape), wide)})


def _too_few() -> list[Step]:
    """Neither the first tensor's last chunk nor any of the second tensor comes; the total is of what came."""
    first, *parts, _ = steps(NEW)
    parts = parts[:-2]
    return [first, *parts, commit(sum(len(part.chunk.data) for part in parts))]


BAD_TENSORS: dict[str, tuple[Callable[[], list[Step]], str, str, dict[str, str]]] = {
    "a byte, by CRC-32C": (
        lambda: _corrupted("crc32c"),
        "DATA_LOSS",
        "CHECKSUM_MISMATCH",
        {EMBEDDING: "CHECKSUM"},
    ),
    "a byte, by SHA-256": (
        lambda: _corrupted("sha256"),
        "DATA_LOSS",
        "CHECKSUM_MISMATCH",
        {EMBEDDING: "CHECKSUM"},
    ),
    "not finite": (
        lambda: steps(fake_tensors(0xFF), refuse_non_finite=True),
        "INVALID_ARGUMENT",
        "INVALID_TENSORS",
        {EMBEDDING: "NON_FINITE", NORM: "NON_FINITE"},
    ),
    "beyond the dtype served": (
        _beyond_bfloat16,
        "INVALID_ARGUMENT",
        "INVALID_TENSORS",
        {EMBEDDING: "DTYPE"},
    ),
    "too few bytes": (
        _too_few,
        "INVALID_ARGUMENT",
        "INVALID_TENSORS",
        {EMBEDDING: "INCOMPLETE", NORM: "INCOMPLETE"},
    ),
    "too many bytes": (
        lambda: [*steps(NEW)[:-1], chunk(1, len(NEW[NORM][1]), b"x"), commit(TOTAL + 1)],
        "INVALID_ARGUMENT",
        "INVALID_TENSORS",
        {NORM: "INCOMPLETE"},
    ),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
async def test_bad_tensors_are_named_and_change_nothing(rig: Rig, name: str) -> None:
    make, code, reason, expected = BAD_TENSORS[name]
    failure = await failure_of(push(rig, make()))
    assert (failure.code.name, failure.reason) == (code, reason)
    assert failure.tensors == expected


async def test_a_message_that_is_none(rig: Rig) -> None:
    call: Any = rig.channel.stream_unary(UPDATE)
    first = begin(NEW).SerializeToString()
    assert (await failure_of(call(iter([first, b"\xff"])))).reason == "INVALID_FIELD"


async def test_a_field_of_a_newer_contract(rig: Rig) -> None:
    """In a chunk: `TensorChunk` has no field 9."""
    call: Any = rig.channel.stream_unary(UPDATE)
    newer = b"\x12\x02\x48\x01"
    failure = await failure_of(call(iter([begin(NEW).SerializeToString(), newer])))
    assert (failure.reason, failure.info.metadata["field"]) == (
        "UNSUPPORTED_FEATURE",
        "chunk.TensorChunk#9",
    )


async def test_a_chunk_that_is_too_large() -> None:
    """Larger than what GetServerInfo allows, though the message is small enough."""
    async with serving(updatable(), max_receive_bytes=5000) as rig, unchanged(rig):
        most = (await rig.control.GetServerInfo(control_pb2.GetServerInfoRequest())).max_chunk_bytes
        assert most == 5000 - 64
        too_large = [begin(NEW, update_id="u"), chunk(1, 0, bytes(most + 1))]
        failure = await failure_of(push(rig, too_large))
        assert failure.violations == {"chunk.data": f"must have at most {most} bytes, not {most + 1}"}


async def test_chunks_that_are_too_large_together() -> None:
    async with serving(updatable(), max_receive_bytes=3000) as rig, unchanged(rig):
        most = (await rig.control.GetServerInfo(control_pb2.GetServerInfoRequest())).max_chunk_bytes
        parts = [chunk(1, 0, bytes(8)), chunk(0, 0, bytes(1000)), chunk(0, 1000, bytes(most - 1007))]
        failure = await failure_of(push(rig, [begin(NEW, update_id="u"), _listed(*parts)]))
        told = f"must have at most {most} bytes, with those before it, not {most + 1}"
        assert failure.violations == {"chunks.chunks[2].data": told}


async def test_chunks_in_one_message_are_taken_as_if_they_came_alone() -> None:
    async with serving(updatable()) as rig:
        first, alone, *parts, last = steps(NEW)
        assert (await push(rig, [first, _listed(alone), _listed(*parts), last])).tensors_updated == 2
        assert rig.engine.updater.serving == bytes_of(NEW)


async def test_a_chunk_without_bytes(rig: Rig) -> None:
    """It would only keep an upload alive that does not go on."""
    failure = await failure_of(push(rig, [begin(NEW, update_id="u"), chunk(1, 0, b"")]))
    assert failure.violations == {"chunk.data": "must have at least one byte"}


async def test_the_largest_chunk_is_taken() -> None:
    async with serving(updatable(), max_receive_bytes=3000) as rig:
        most = (await rig.control.GetServerInfo(control_pb2.GetServerInfoRequest())).max_chunk_bytes
        assert (await push(rig, steps(NEW, size=most))).tensors_updated == 2


async def test_a_message_above_the_receive_limit() -> None:
    async with serving(updatable(), max_receive_bytes=3000) as rig, unchanged(rig):
        failure = await failure_of(push(rig, [begin(NEW), chunk(0, 0, bytes(3001))]))
        assert failure.reason == "MESSAGE_TOO_LARGE"


# -- two at once --


async def test_a_second_update_is_refused_while_the_first_goes_on(rig: Rig) -> None:
    first = rig.inference.UpdateWeights()
    await first.write(begin(NEW, update_id="first"))
    await until(lambda: bool(rig.engine.updater.options))
    failure = await failure_of(push(rig, steps(NEW, update_id="second")))
    assert (failure.code.name, failure.reason) == ("ABORTED", "UPDATE_UNDER_WAY")
    assert dict(failure.info.metadata) == {"update_id": "first", "staged": "false"}
    assert failure.retry_after_s == 1.0
    first.cancel()


async def test_a_second_update_is_refused_while_one_is_staged() -> None:
    async with serving(updatable()) as rig:
        await push(rig, steps(NEW, update_id="first", stage_only=True))
        failure = await failure_of(push(rig, steps(NEW, update_id="second")))
        assert dict(failure.info.metadata) == {"update_id": "first", "staged": "true"}
        assert failure.retry_after_s is None, "it stays until somebody does something"


async def test_an_update_that_follows_a_refused_one_at_once_is_taken() -> None:
    """The refusal comes after the place is free."""
    async with serving(updatable()) as rig:
        for _ in range(20):
            assert (await failure_of(push(rig, steps(NEW)[:-1]))).reason == "INVALID_FIELD"
        await push(rig, steps(NEW))


# -- the client goes away --


def framed(message: Step) -> bytes:
    return grpc_message(message.SerializeToString())


async def opened(peer: Peer, sent: Sequence[bytes]) -> int:
    stream = await peer.call(UPDATE, None, end=False)
    for part in sent:
        await peer.send(frame(DATA, 0, stream, part))
    return stream


WHOLE = [framed(step) for step in steps(NEW, size=2000)]


async def reset(peer: Peer, stream: int) -> None:
    await peer.reset(stream)


async def vanish(peer: Peer, _: int) -> None:
    """Have the connection reset, as the system of a process does that is killed with unread data."""
    raw = peer.writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def close(_peer: Peer, _stream: int) -> None:
    """Do nothing: the connection is closed after this anyway."""


ENDS = pytest.mark.parametrize("end", [reset, vanish, close], ids=lambda end: end.__name__)
End = Callable[[Peer, int], Awaitable[None]]


async def cut_off(rig: Rig, sent: Sequence[bytes], num_whole: int, end: End) -> None:
    """Send these bytes of an upload, wait until so many messages are taken, and end what is there by hand.
    The weights must stay as they are.
    """
    events, options = rig.engine.updater.events, rig.engine.updater.options
    generation, begun, written = rig.engine.weights.generation, len(options), events.count("write")
    async with Peer(rig.server.address) as peer:
        stream = await opened(peer, sent)
        if num_whole:
            await until(lambda: len(options) == begun + 1)
            num_chunks = min(num_whole, len(WHOLE) - 1) - 1
            await until(lambda: events.count("write") == written + num_chunks)
        await end(peer, stream)
    await until(lambda: rig.server.admission.active(Kind.UPDATE) == 0)
    await until(lambda: events.count("close") == len(options))  # before that the next one would be refused
    assert rig.engine.weights.generation == generation


@ENDS
async def test_a_pusher_that_ends_after_any_message_changes_nothing(rig: Rig, end: End) -> None:
    """Even after the last one, as long as the stream has not ended."""
    for number in range(len(WHOLE) + 1):
        await cut_off(rig, WHOLE[:number], number, end)


@ENDS
async def test_a_pusher_that_ends_within_a_message_changes_nothing(rig: Rig, end: End) -> None:
    """One byte of it is there, half of it, or all but one byte."""
    for number, message in enumerate(WHOLE):
        for size in {1, len(message) // 2, len(message) - 1}:
            await cut_off(rig, [*WHOLE[:number], message[:size]], number, end)


@pytest.mark.ci
async def test_a_pusher_whose_process_is_killed_changes_nothing(rig: Rig, tmp_path: Path) -> None:
    """After begin, and after all chunks."""
    events = rig.engine.updater.events
    for number in (1, len(WHOLE) - 1):
        sent = [step.SerializeToString() for step in steps(NEW, size=2000)[:number]]
        file = tmp_path / "messages"
        file.write_bytes(b"".join(len(one).to_bytes(8, "little") + one for one in sent))
        module = "tests.service.servicers.weights.cut_pusher"
        command = [sys.executable, "-m", module, rig.server.address, str(file)]
        begun, written = len(rig.engine.updater.options), events.count("write")
        process = await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parents[4])
        try:
            await until(lambda: len(rig.engine.updater.options) == begun + 1)  # noqa: B023 -- awaited here
            await until(lambda: events.count("write") == written + number - 1)  # noqa: B023 -- awaited here
        finally:
            process.kill()
            await process.wait()
        await until(lambda: rig.server.admission.active(Kind.UPDATE) == 0)


async def test_a_connection_that_dies_is_no_end_of_a_stream(rig: Rig) -> None:
    """For gRPC a lost connection also ends the stream of messages, and now and then before it cancels the
    call. So this is tried many times.
    """
    generation, events = rig.engine.weights.generation, rig.engine.updater.events

    async def dies(*, when_taken: bool) -> None:
        taken = events.count("write") + len(WHOLE) - 2
        async with Peer(rig.server.address) as peer:
            stream = await opened(peer, WHOLE)
            if when_taken:  # it is refused if the server has not noticed yet that the one before is gone
                await until(lambda: events.count("write") >= taken or peer.ended(stream))
        await until(lambda: rig.server.admission.active(Kind.UPDATE) == 0)

    for attempt in range(40):
        await dies(when_taken=attempt % 2 == 1)
        assert rig.engine.weights.generation == generation


class Gone(Exception):
    """What is raised where nothing can be sent to the client any more."""


@pytest.mark.parametrize("source", ["chunks", "file"])
async def test_a_stream_that_ends_when_its_client_is_gone_changes_nothing(
    rig: Rig, tmp_path: Path, source: str
) -> None:
    """The same, without gRPC: all messages are there, and the client is not."""
    of_file = [begin(uri=written(NEW, tmp_path / "new.safetensors")), commit(0)]
    messages = steps(NEW) if source == "chunks" else of_file

    async def arrived() -> AsyncIterator[Undecoded]:
        for message in messages:
            yield Undecoded("UpdateWeights", Step.FromString, message.SerializeToString())

    async def confirm() -> None:
        raise Gone

    updates = WeightUpdates(rig.serving, roots=(tmp_path,), max_receive_bytes=1 << 20)
    with pytest.raises(Gone):
        await updates.update(arrived(), confirm)


async def test_the_same_bytes_with_an_end_are_an_update() -> None:
    """What the tests above send is right, but for its end."""
    async with serving(updatable()) as rig, Peer(rig.server.address, initial_window=1000) as peer:
        stream = await opened(peer, WHOLE)
        await peer.send(frame(DATA, 1, stream))
        reply = weights_pb2.UpdateWeightsResponse.FromString(await peer.message(stream))
        assert reply.outcome == weights_pb2.UPDATE_OUTCOME_COMMITTED


@pytest.mark.parametrize("where", ["begin", "write"])
async def test_a_client_that_goes_while_a_thread_works(rig: Rig, where: str) -> None:
    """The upload is closed, also if it is opened only after the client has gone."""
    updater = rig.engine.updater
    call = rig.inference.UpdateWeights()
    if where == "begin":
        updater.waits.clear()
    await call.write(begin(NEW))
    await until(lambda: "begin" in updater.events)
    if where == "write":
        await until(lambda: bool(updater.options))
        updater.waits.clear()
        await call.write(next(chunks(NEW)))
    call.cancel()
    await until(lambda: rig.server.admission.active(Kind.UPDATE) == 0)
    updater.waits.set()


@pytest.mark.parametrize("how", ["deadline", "cancel"])
async def test_a_client_that_gives_up_while_requests_are_waited_for(how: str) -> None:
    engine = updatable(hold=True)
    async with serving(engine) as rig:
        running = asyncio.ensure_future(rig.inference.Generate(generate("a")))
        await until(lambda: len(engine.seen) == 1)
        pushes: list[asyncio.Future[object]] = []
        for timeout_s in (0.5, 5) if how == "deadline" else (60,):
            pushes.append(asyncio.ensure_future(push(rig, steps(NEW), timeout=timeout_s)))
            await until(lambda: pushes[-1].done() or bool(engine.waiting_changes))
            if engine.waiting_changes:
                break
            # On a busy machine the first deadline may pass before. Its update ends a little later.
            assert pushes[-1].exception() is not None
            await until(lambda: rig.server.admission.active(Kind.UPDATE) == 0)
        pushing = pushes[-1]
        waiting = engine.waiting_changes[0].done
        if how == "cancel":
            pushing.cancel()
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await pushing
        await until(waiting.cancelled)
        engine.release()
        assert (await running).outputs[0].text.endswith("z")
        assert (engine.updater.serving, engine.weights.generation) == (bytes_of(OLD), 1)


# -- time --


async def test_an_upload_that_stalls_is_ended() -> None:
    async with serving(updatable(), bounds=Bounds(update_stall_limit_s=0.3)) as rig, unchanged(rig):
        call = rig.inference.UpdateWeights()
        await call.write(begin(NEW))
        await call.write(next(chunks(NEW)))
        failure = await failure_of(call)
        assert (failure.code.name, failure.reason) == ("RESOURCE_EXHAUSTED", "STALLED_SENDER")
        assert failure.info.metadata["limit_s"] == "0.3"


async def test_the_limit_of_an_upload_is_not_that_of_other_messages() -> None:
    """A trainer may take its time between two chunks."""
    async with serving(updatable(), bounds=Bounds(receive_limit_s=0.2, update_stall_limit_s=0)) as rig:
        call = rig.inference.UpdateWeights()
        await call.write(begin(NEW))
        await asyncio.sleep(0.6)
        for step in steps(NEW)[1:]:
            await call.write(step)
        await call.done_writing()
        assert (await asyncio.wait_for(call, 20)).tensors_updated == 2


# -- the server's own bounds and end --


async def test_updates_take_no_places_of_requests() -> None:
    bounds = Bounds(max_rpcs=1, max_update_rpcs=4)
    async with serving(updatable(hold=True), bounds=bounds) as rig:
        uploads = [rig.inference.UpdateWeights() for _ in range(2)]
        for upload in uploads:
            await upload.write(begin(NEW, update_id=f"u{id(upload)}"))
        await until(lambda: bool(rig.engine.updater.options))
        refused = await failure_of(push(rig, steps(NEW, update_id="third")))
        assert refused.reason in ("BUSY", "UPDATE_UNDER_WAY")
        running = asyncio.ensure_future(rig.inference.Generate(generate("a")))
        await until(lambda: len(rig.engine.seen) == 1)
        assert (await failure_of(rig.inference.Generate(generate("a")))).info.metadata["limit"] == "max_rpcs"
        rig.engine.release()
        await asyncio.wait_for(running, 20)
        for upload in uploads:
            upload.cancel()


async def test_too_many_updates_at_once() -> None:
    async with serving(updatable(), bounds=Bounds(max_update_rpcs=2)) as rig:
        upload = rig.inference.UpdateWeights()
        await upload.write(begin(NEW))
        await until(lambda: bool(rig.engine.updater.options))
        failure = await failure_of(push(rig, steps(NEW)))
        assert failure.info.metadata["limit"] == "max_update_rpcs_per_address"
        upload.cancel()


async def refused_by_a_stop(rig: Rig, upload: Any) -> Failure:
    stopping = asyncio.ensure_future(rig.server.stop())
    failure = await failure_of(upload)
    await stopping
    return failure


async def test_a_server_that_stops_refuses_the_upload_under_way() -> None:
    engine = updatable()
    async with serving(engine, grace_s=20.0) as rig:
        call = rig.inference.UpdateWeights()
        for step in steps(NEW):
            await call.write(step)
        await until(lambda: engine.updater.events.count("write") == len(steps(NEW)) - 2)
        failure = await refused_by_a_stop(rig, call)
        assert (failure.code.name, failure.reason) == ("UNAVAILABLE", "DRAINING")
    assert engine.updater.events[-1] == "close"
    assert (engine.updater.serving, engine.weights.generation) == (bytes_of(OLD), 1)


async def test_a_server_that_stops_takes_back_an_update_that_waits() -> None:
    engine = updatable(hold=True)
    async with serving(engine, grace_s=20.0) as rig:
        running = asyncio.ensure_future(rig.inference.Generate(generate("a")))
        await until(lambda: len(engine.seen) == 1)
        pushing = asyncio.ensure_future(failure_of(push(rig, steps(NEW))))
        await until(lambda: bool(engine.waiting_changes))
        stopping = asyncio.ensure_future(rig.server.stop())
        assert (await pushing).reason == "DRAINING"
        engine.release()
        assert (await running).outputs[0].text.endswith("z"), "within the grace"
        assert await stopping
    assert (engine.updater.serving, engine.weights.generation) == (bytes_of(OLD), 1)


async def test_before_the_engine_has_started() -> None:
    async with serving(updatable(), start=False) as rig:
        rig.server.attach(rig.engine)
        reply = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert reply.weights.generation == 1


# -- in place --


async def test_a_failed_update_in_place_is_seen_in_health_until_a_full_one_succeeds() -> None:
    engine = updatable(hold=True)
    async with serving(engine) as rig:
        running = asyncio.ensure_future(failure_of(rig.inference.Generate(generate("a"))))
        await until(lambda: len(engine.seen) == 1)
        watch = rig.health.Watch(health_pb2.HealthCheckRequest())
        assert (await asyncio.wait_for(watch.read(), 20)).status == SERVING
        in_place = {
            "staging": weights_pb2.STAGING_MODE_IN_PLACE,
            "in_flight": weights_pb2.IN_FLIGHT_POLICY_KEEP,
        }
        messages = [*steps(NEW, **in_place)[:-1], commit(TOTAL + 1)]  # all leaves are replaced by then
        failure = await failure_of(push(rig, messages))
        assert failure.reason == "INVALID_FIELD"
        assert (await running).reason == "WEIGHTS_INCOMPLETE"
        assert (await asyncio.wait_for(watch.read(), 20)).status == NOT_SERVING
        refused = await failure_of(rig.inference.Generate(generate("a")))
        assert (refused.code.name, refused.reason) == ("UNAVAILABLE", "WEIGHTS_INCOMPLETE")
        partly = await failure_of(push(rig, steps(NEW, partial=True)))
        assert partly.reason == "WEIGHTS_INCOMPLETE", "it would not mend what is missing"
        assert await rig.health_of() == NOT_SERVING
        await push(rig, steps(fake_tensors(9), update_id="full"))
        assert (await asyncio.wait_for(watch.read(), 20)).status == SERVING
        engine.release()
        assert (await rig.inference.Generate(generate("y"), timeout=20)).outputs[0].text == "z"
        watch.cancel()


async def test_an_update_in_place_that_is_cut_off_harms_nothing_before_its_first_leaf(rig: Rig) -> None:
    """A pusher that goes after begin, or with a part of a tensor, has changed nothing."""
    first, part = begin(NEW, staging=weights_pb2.STAGING_MODE_IN_PLACE), next(chunks(NEW))
    for sent in ([first], [first, part]):
        await cut_off(rig, [framed(step) for step in sent], len(sent), reset)
        assert await rig.health_of() == SERVING
