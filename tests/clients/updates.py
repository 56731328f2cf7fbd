"""A server's side of UpdateWeights, written by hand: it puts tensors together and checks what the contract
says.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from penstock.v1 import types_pb2, weights_pb2
from tests.clients.failing import Failure

MAX_CHUNK_BYTES = 1024
BEFORE = types_pb2.WeightsVersion(label="initial", generation=0)


def crc32c(data: bytes) -> int:
    """CRC32C by its definition, bit by bit: the reflected polynomial 0x82F63B78."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


class FakeUpdates:
    """Takes updates, and keeps what it was sent."""

    def __init__(self) -> None:
        self.begins: list[weights_pb2.UpdateWeightsBegin] = []
        """What each stream began with."""
        self.received: list[dict[str, bytes]] = []
        """The bytes of each tensor, for each stream."""
        self.keeps = True
        """Whether it keeps the bytes of tensors, and checks them."""
        self.chunk_sizes: list[int] = []
        self.commits: list[int] = []
        """total_bytes of each commit."""
        self.committed: list[str] = []
        """The ids of updates that went live."""
        self.answer_after: int | None = None
        """The number of messages after which it answers, without reading more; it counts from 1."""
        self.failure_after: tuple[int, Failure] | None = None
        """A failure after that many messages, once."""
        self.lose_reply = False
        """Fail with UNAVAILABLE after the next commit has been carried out."""
        self.hold_after: int | None = None
        """The number of messages after which it reads no more and waits for `go_on`."""
        self.go_on = threading.Event()
        self.holds = threading.Event()
        """Set while it waits."""
        self.num_messages = 0
        """Of the last stream."""
        self.ended = threading.Event()
        """Set when a stream has ended, however it ended."""

    def handle(
        self, requests: Iterable[weights_pb2.UpdateWeightsRequest], context: Any
    ) -> weights_pb2.UpdateWeightsResponse:
        self.num_messages = 0
        self.ended.clear()
        if not context.add_callback(self.ended.set):
            self.ended.set()  # the call ended before this function ran, so that nobody calls back
        begin = weights_pb2.UpdateWeightsBegin()
        tensors: dict[str, bytes] = {}
        for request in requests:
            self.num_messages += 1
            step = request.WhichOneof("step")
            if step == "begin":
                begin = request.begin
                self.begins.append(begin)
                self.received.append(tensors)
                tensors.update({spec.name: b"" for spec in begin.manifest.tensors})
                if begin.update_id in self.committed:
                    return self.report(begin, tensors, weights_pb2.UPDATE_OUTCOME_ALREADY_COMMITTED)
            for chunk in [request.chunk] if step == "chunk" else request.chunks.chunks:
                name = begin.manifest.tensors[chunk.tensor_index].name
                assert chunk.offset == len(tensors[name]) or not self.keeps
                self.chunk_sizes.append(len(chunk.data))
                if self.keeps:
                    tensors[name] += chunk.data
            if self.num_messages == self.hold_after:
                self.holds.set()
                self.go_on.wait(60)
            if self.num_messages == self.answer_after:
                return self.report(begin, tensors, weights_pb2.UPDATE_OUTCOME_ALREADY_COMMITTED)
            if self.failure_after is not None and self.num_messages == self.failure_after[0]:
                failure, self.failure_after = self.failure_after[1], None
                self._fail(failure, context)
            if step == "commit":
                self.commits.append(request.commit.total_bytes)
                return self._commit(begin, tensors, context)
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the stream ended without a commit")
        raise AssertionError("unreachable")

    def _commit(
        self, begin: weights_pb2.UpdateWeightsBegin, tensors: dict[str, bytes], context: Any
    ) -> weights_pb2.UpdateWeightsResponse:
        if begin.validate_only:
            assert not any(tensors.values())
            return self.report(begin, tensors, weights_pb2.UPDATE_OUTCOME_VALIDATED)
        for spec in begin.manifest.tensors if self.keeps else ():
            assert spec.crc32c == crc32c(tensors[spec.name]), spec.name
        if begin.stage_only:
            return self.report(begin, tensors, weights_pb2.UPDATE_OUTCOME_STAGED)
        self.committed.append(begin.update_id)
        if self.lose_reply:
            self.lose_reply = False
            context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        return self.report(begin, tensors, weights_pb2.UPDATE_OUTCOME_COMMITTED)

    def _fail(self, failure: Failure, context: Any) -> None:
        context.set_trailing_metadata(failure.trailing_metadata())
        context.abort(failure.code, failure.message)

    def report(
        self, begin: weights_pb2.UpdateWeightsBegin, tensors: dict[str, bytes], outcome: Any
    ) -> weights_pb2.UpdateWeightsResponse:
        return weights_pb2.UpdateWeightsResponse(
            current=types_pb2.WeightsVersion(label=begin.version_label, generation=1),
            previous=BEFORE,
            outcome=outcome,
            tensors_updated=len(tensors),
            bytes_received=sum(map(len, tensors.values())),
            staged_in=Duration(seconds=2, nanos=500_000_000),
            paused_for=Duration(nanos=250_000_000),
            in_flight=weights_pb2.InFlightReport(waited=1, aborted=2, kept=3, recomputed=4),
            digest=b"\x01\x02",
        )
