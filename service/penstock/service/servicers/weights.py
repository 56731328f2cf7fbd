"""UpdateWeights, CommitWeights and DiscardWeights: from messages to the engine's updater and back.

Chunks are decoded, checked and written in threads; the event loop only hands them over. While one is written,
the next one is received.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from penstock.runtime.errors import InvalidRequest, UnsupportedFeature, Violation
from penstock.runtime.updating.interface import UpdateOutcome, UpdateReport
from penstock.service.backend import Upload
from penstock.service.replies.update_messages import commit_response, update_response
from penstock.service.requests.convert_weights import (
    Begin,
    check_discard,
    out_of_order,
    to_begin,
    to_commit,
)
from penstock.service.requests.support import check_supported
from penstock.service.rpcs.decoding import Undecoded
from penstock.service.servicers.serving import Serving
from penstock.service.servicers.uploads import OpenUpload, outcome_of
from penstock.v1 import control_pb2, weights_pb2

log = logging.getLogger(__name__)

_Take: TypeAlias = Callable[[weights_pb2.TensorChunk], None]
_Confirm: TypeAlias = Callable[[], Awaitable[None]]
MAX_CHUNK_BYTES = 2 * 1024 * 1024
"""The largest chunk that a server takes, unless its messages must be smaller."""
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
        self, steps: AsyncIterator[Undecoded], confirm: _Confirm
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
        first = await anext(steps, None)
        if first is None:
            raise out_of_order("the stream has ended before begin")
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

    async def _receive(
        self, begin: Begin, steps: AsyncIterator[Undecoded], confirm: _Confirm
    ) -> UpdateReport:
        """Take the tensors that follow on the stream."""
        open_it = partial(self._engine.updater.begin, begin.options, begin.manifest)
        async with OpenUpload(self._lanes, open_it) as opened:
            take = partial(_write, opened.upload, self.max_chunk_bytes)
            total_bytes = await _until_commit(steps, take, opened)
            await confirm()
            return await self._finish(begin, opened.upload, total_bytes)

    async def _read(self, begin: Begin, steps: AsyncIterator[Undecoded], confirm: _Confirm) -> UpdateReport:
        """Read the tensors from files, once the client has committed that."""
        roots = self._allowed_roots()
        open_it = partial(self._engine.updater.open_uri, begin.options, begin.uri, roots=roots)
        async with OpenUpload(self._lanes, open_it) as opened:
            total_bytes = await _until_commit(steps, _refuse_chunk, opened)
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


async def _until_commit(steps: AsyncIterator[Undecoded], take: _Take, opened: OpenUpload[Any]) -> int:
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
        take(message.chunk)
        return None
    if kind == "commit":
        return int(message.commit.total_bytes)
    raise out_of_order("begin comes once, as the first message" if kind else "a message has no step")


def _write(upload: Upload, most: int, chunk: weights_pb2.TensorChunk) -> None:
    data = chunk.data
    if not data:  # it would say nothing, and keep an upload alive that does not go on
        raise InvalidRequest([Violation("chunk.data", "must have at least one byte")])
    if len(data) > most:
        described = f"must have at most {most} bytes, not {len(data)}"
        raise InvalidRequest([Violation("chunk.data", described)])
    upload.write(chunk.tensor_index, chunk.offset, data)


def _refuse_chunk(chunk: weights_pb2.TensorChunk) -> None:
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
