"""UpdateWeights, CommitWeights and DiscardWeights: from messages to the engine's updater and back.

Chunks are decoded, checked and written in threads; the event loop only hands them over. While one is written,
the next one is received.

`OpenUpload` and `outcome_of` see to what an RPC begins in a thread and must end, however the RPC itself ends:
an upload, or a change that it asks the engine for.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar

from penstock.runtime.errors import InvalidRequest, UnsupportedFeature, Violation
from penstock.runtime.updating.interface import UpdateOutcome, UpdateReport
from penstock.service.backend import Upload
from penstock.service.replies.messages import commit_response, update_response
from penstock.service.requests.control import (
    Begin,
    check_discard,
    out_of_order,
    to_begin,
    to_commit,
)
from penstock.service.requests.support import check_supported
from penstock.service.rpcs.interceptors import Undecoded
from penstock.service.servicers.serving import Serving
from penstock.service.threads.lanes import Lanes
from penstock.v1 import control_pb2, weights_pb2

log = logging.getLogger(__name__)

T = TypeVar("T")


class Closes(Protocol):
    """An upload: what is left of it, when its RPC ends, is closed."""

    def close(self) -> None: ...


class TakesBytes(Protocol):
    """What the chunks of a stream are written to."""

    def write(self, tensor_index: int, offset: int, data: bytes) -> None: ...


UploadT = TypeVar("UploadT", bound=Closes)


class Ended(Generic[T]):
    """Something that one thread makes, and another one ends: as soon as it is made, if that is later."""

    def __init__(self, make: Callable[[], T], end: Callable[[T], object]) -> None:
        self._make, self._end = make, end
        self._lock = threading.Lock()
        self._made: list[T] = []
        self._is_wanted = True

    def make(self) -> T:
        """Make it, once. Blocks."""
        made = self._make()
        with self._lock:
            self._made.append(made)
            is_wanted = self._is_wanted
        if not is_wanted:
            self._end(made)
        return made

    def end(self) -> None:
        """End it. Blocks, but does not wait for `make`."""
        with self._lock:
            self._is_wanted = False
            made = list(self._made)
        for one in made:
            self._end(one)


class OpenUpload(Generic[UploadT]):
    """An upload, as an async context. Leaving the context closes the upload. Unless it was committed before,
    nothing has changed then, and its memory is free.

    The RPC may end at any time, also while a thread opens the upload or works on it.
    """

    def __init__(self, lanes: Lanes, open_it: Callable[[], UploadT]) -> None:
        """`open_it` makes the upload, in a thread."""
        self._lanes = lanes
        self._opened: Ended[UploadT] = Ended(open_it, lambda upload: upload.close())
        self._last: asyncio.Future[Any] | None = None

    async def __aenter__(self) -> Self:
        """Open the upload. Raises what the updater refuses."""
        try:
            self.upload = await self._lanes.weights(self._opened.make)
        except asyncio.CancelledError:
            await _in_lane(self._lanes, self._opened.end)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the upload. This waits until it is closed, so that the next one is not refused."""
        self._last = None
        await _in_lane(self._lanes, self._opened.end)

    def start(self, work: Callable[[], object]) -> None:
        """Begin work on the upload in a thread. `last` must have been awaited since the work before."""
        assert self._last is None, "one thing is done after the other"
        self._last = self._lanes.weights(work)
        self._last.add_done_callback(_notice)

    async def last(self) -> Any:
        """Wait for the work that was begun last. Returns what it returned, and None if there is none. Raises
        what it raised.
        """
        if self._last is None:
            return None
        try:
            return await self._last
        finally:
            self._last = None


async def outcome_of(lanes: Lanes, ask: Callable[[], Future[T]]) -> T:
    """Ask the engine for a change, in a thread, and wait until it was made. If the RPC ends before that, the
    change is taken back, unless it is being made already.
    """
    asked: Ended[Future[T]] = Ended(ask, lambda future: future.cancel())
    try:
        # Shielded, because cancelling frees memory, which is not done on the event loop.
        return await asyncio.shield(asyncio.wrap_future(await lanes.weights(asked.make)))
    except asyncio.CancelledError:
        await _in_lane(lanes, asked.end)
        raise
    finally:
        del asked  # an error refers to this frame, and this variable to the error


async def _in_lane(lanes: Lanes, end: Callable[[], None]) -> None:
    """Have something ended in a thread, also if this task is cancelled meanwhile."""
    try:
        ending = lanes.weights(end, weight=0)
    except RuntimeError:  # the server has ended, and with it its threads
        end()
    else:
        await asyncio.shield(ending)


def _notice(work: asyncio.Future[Any]) -> None:
    """Look at the error of work that maybe nobody waits for any more; asyncio would log it."""
    if not work.cancelled():
        work.exception()


_Take: TypeAlias = Callable[[Sequence[weights_pb2.TensorChunk], Sequence[str]], None]
"""Takes chunks, each with the path of its field in the message."""
Confirm: TypeAlias = Callable[[], Awaitable[None]]
MAX_CHUNK_BYTES = 2 * 1024 * 1024
"""The largest chunk that a server takes, unless its messages must be smaller."""
MOST_LISTED = 4096
"""Chunks of a message that has several."""
_BESIDE_DATA = 64
"""The most bytes that a message has beside the data of its chunk."""


class WeightUpdates:
    """Takes new weights for one engine."""

    def __init__(self, serving: Serving, *, roots: Sequence[Path] = (), max_receive_bytes: int) -> None:
        """`roots` are the directories that files of weights may lie in; `max_receive_bytes` is the largest
        message that the server takes.
        """
        self._engine = serving.engine
        self._lanes = serving.lanes
        self._calls = serving.calls
        self._roots = tuple(roots)
        self.max_chunk_bytes = max(1, min(MAX_CHUNK_BYTES, max_receive_bytes - _BESIDE_DATA))
        """The largest chunk that is taken."""

    async def update(
        self, steps: AsyncIterator[Undecoded], confirm: Confirm
    ) -> weights_pb2.UpdateWeightsResponse:
        """Take an update: begin, chunks, commit, end of the stream. Before all of them have come, nothing has
        changed. Raises what refuses it.

        `confirm` sends the client something, and raises if the client is gone: for gRPC a stream has also
        ended when its connection is lost.

        An update whose id is known is answered at once, and so is one that is only validated.
        """
        async with self._calls.preparing():
            begin = await self._begin(steps)
            report = self._engine.updater.already_committed(begin.options.update_id)
            if report is None and begin.validate_only:
                report = await self._validate(begin)
            elif report is None and begin.uri:
                report = await self._read(begin, steps, confirm)
            elif report is None:
                report = await self._receive(begin, steps, confirm)
        _tell(begin.options.update_id, report)
        return update_response(report)

    async def commit(self, request: control_pb2.CommitWeightsRequest) -> control_pb2.CommitWeightsResponse:
        """Make staged weights serve. Raises UnknownUpdate, UpdateUnderWay, and what refuses it."""
        running, updater = to_commit(request), self._engine.updater
        async with self._calls.preparing():
            report = updater.already_committed(request.update_id)
            if report is None or report.outcome is UpdateOutcome.STAGED:
                ask = partial(
                    updater.commit_staged,
                    request.update_id,
                    in_flight=running.policy,
                    drain_timeout_s=running.drain_timeout_s,
                )
                report = await outcome_of(self._lanes, ask)
                _tell(request.update_id, report)
        return commit_response(report)

    async def discard(self, request: control_pb2.DiscardWeightsRequest) -> control_pb2.DiscardWeightsResponse:
        """Drop staged weights, and answer once their memory is free."""
        check_discard(request)
        work = partial(self._engine.updater.discard, request.update_id)
        return control_pb2.DiscardWeightsResponse(discarded=await self._lanes.weights(work))

    async def _begin(self, steps: AsyncIterator[Undecoded]) -> Begin:
        first = await first_of(steps)
        return await self._lanes.weights(lambda: to_begin(first.decode()))

    async def _validate(self, begin: Begin) -> UpdateReport:
        updater, options = self._engine.updater, begin.options
        if begin.uri:
            work = partial(updater.validate_uri, options, begin.uri, roots=self._allowed_roots())
        else:
            work = partial(updater.validate, options, begin.manifest)
        await self._lanes.weights(work)
        serving = self._engine.weights
        return UpdateReport(outcome=UpdateOutcome.VALIDATED, current=serving, previous=serving)

    async def _receive(self, begin: Begin, steps: AsyncIterator[Undecoded], confirm: Confirm) -> UpdateReport:
        """Take the tensors that follow on the stream."""
        open_it = partial(self._engine.updater.begin, begin.options, begin.manifest)
        async with OpenUpload(self._lanes, open_it) as opened:
            take = partial(write_chunks, opened.upload, self.max_chunk_bytes)
            total_bytes = await until_commit(steps, take, opened)
            await confirm()
            return await self._finish(begin, opened.upload, total_bytes)

    async def _read(self, begin: Begin, steps: AsyncIterator[Undecoded], confirm: Confirm) -> UpdateReport:
        """Read the tensors from files, once the client has committed that."""
        roots = self._allowed_roots()
        open_it = partial(self._engine.updater.open_uri, begin.options, begin.uri, roots=roots)
        async with OpenUpload(self._lanes, open_it) as opened:
            total_bytes = await until_commit(steps, _refuse_chunks, opened)
            await confirm()
            opened.start(opened.upload.read)
            await opened.last()
            return await self._finish(begin, opened.upload, total_bytes)

    def _allowed_roots(self) -> Sequence[Path]:
        if not self._roots:
            raise UnsupportedFeature(["begin.uri"], "the server was started without --weights-root")
        return self._roots

    async def _finish(self, begin: Begin, upload: Upload, total_bytes: int) -> UpdateReport:
        if begin.options.stage_only:
            return await self._lanes.weights(partial(upload.stage, total_bytes))
        return await outcome_of(self._lanes, partial(upload.commit, total_bytes))


async def first_of(steps: AsyncIterator[Undecoded]) -> Undecoded:
    """Return the first message of a stream. Raises what says that there is none."""
    first = await anext(steps, None)
    if first is None:
        raise out_of_order("the stream has ended before begin")
    return first


async def until_commit(steps: AsyncIterator[Undecoded], take: _Take, opened: OpenUpload[Any]) -> int:
    """Take the messages after begin, until the stream ends. Returns the commit's `total_bytes`.

    Nothing is committed before the stream has ended: a client that dies before has not done its part.
    """
    async for step in steps:
        if await opened.last() is not None:
            raise out_of_order("nothing may follow commit")
        opened.start(partial(_take_step, step, take))
    total_bytes: int | None = await opened.last()
    if total_bytes is None:
        raise out_of_order("the stream has ended without commit")
    return total_bytes


def _take_step(step: Undecoded, take: _Take) -> int | None:
    """Decode a message after begin. A chunk is taken; of a commit `total_bytes` is returned. Blocks."""
    message = step.decode()
    check_supported(message)
    kind = message.WhichOneof("step")
    if kind == "chunk":
        take((message.chunk,), ("chunk",))
        return None
    if kind == "chunks":
        chunks = message.chunks.chunks
        if not 1 <= len(chunks) <= MOST_LISTED:
            described = f"must have 1 to {MOST_LISTED} chunks, not {len(chunks)}"
            raise InvalidRequest([Violation("chunks.chunks", described)])
        take(chunks, [f"chunks.chunks[{i}]" for i in range(len(chunks))])
        return None
    if kind == "commit":
        return int(message.commit.total_bytes)
    raise out_of_order("begin comes once, as the first message" if kind else "a message has no step")


def write_chunks(
    upload: TakesBytes, most: int, chunks: Sequence[weights_pb2.TensorChunk], paths: Sequence[str]
) -> None:
    """Write chunks, which have at most `most` bytes together. Raises InvalidRequest, and what the upload
    refuses.
    """
    num_bytes = 0
    for chunk, path in zip(chunks, paths, strict=True):
        data = chunk.data
        num_bytes += len(data)
        if not data:  # it would say nothing, and keep an upload alive that does not go on
            raise InvalidRequest([Violation(f"{path}.data", "must have at least one byte")])
        if num_bytes > most:
            together = "" if len(chunks) == 1 else ", with those before it"
            described = f"must have at most {most} bytes{together}, not {num_bytes}"
            raise InvalidRequest([Violation(f"{path}.data", described)])
        try:
            upload.write(chunk.tensor_index, chunk.offset, data)
        except InvalidRequest as refused:
            raise InvalidRequest(
                [
                    Violation(violation.field.replace("chunk", path, 1), violation.description)
                    for violation in refused.violations
                ]
            ) from None


def _refuse_chunks(_chunks: Sequence[weights_pb2.TensorChunk], _paths: Sequence[str]) -> None:
    raise out_of_order("no chunk may follow a begin with a uri")


def _tell(update_id: str, report: UpdateReport) -> None:
    """Log what came of an update. The texts are the caller's, and may hold anything."""
    log.info(
        "update %a is %s: generation %d, label %a; %d tensors, %d bytes, staged in %.3f s, paused for %.4f s",
        update_id,
        report.outcome.value,
        report.current.generation,
        report.current.label,
        report.num_tensors,
        report.num_bytes,
        report.staged_s,
        report.paused_s,
    )
