"""A follower's side of a group: one RPC to the leader, which brings its calls and tells that it is alive."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from penstock.runtime.errors import ConfigError, GroupEnded
from penstock.runtime.following.interface import (
    Call,
    Facts,
    GroupOptions,
    Prepared,
    Taken,
    UpdateRecord,
)
from penstock.service.group import group_pb2
from penstock.service.group.leader import BEATS, SERVICE
from penstock.service.group.messages import record_of, report_message

log = logging.getLogger(__name__)

Request, Response = group_pb2.FollowRequest, group_pb2.FollowResponse
_HEALTH = "/grpc.health.v1.Health/Check"
"""Answered without a key by every server that listens, also while it loads its model."""
_ASK_TIMEOUT_S = 5.0
_ASK_AGAIN_S = 0.5
_ABSENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class FollowerLink:
    """The RPC of one follower. `meet`, `begin` and `calls` are used on one thread, in this order."""

    def __init__(
        self,
        channel: grpc.Channel,
        metadata: Sequence[tuple[str, str | bytes]],
        options: GroupOptions,
        on_lost: Callable[[GroupEnded], None],
    ) -> None:
        """`on_lost` is called, on a thread of its own, when the group has ended in another way than by the
        leader's stop: the thread that makes calls may hang in one.
        """
        self._options, self._on_lost = options, on_lost
        self._reports: queue.SimpleQueue[group_pb2.FollowRequest | None] = queue.SimpleQueue()
        self._records: queue.SimpleQueue[group_pb2.FollowResponse | Exception] = queue.SimpleQueue()
        self._heard_s: float | None = None
        """When something came last; None: the leader is not there yet, and is waited for."""
        self._is_welcome = False
        self.is_stopped = False
        """Whether the leader has stopped gracefully, or was not there yet when this process was told to
        stop."""
        self._is_over = threading.Event()
        self._channel, self._metadata = channel, metadata

    # -- the dispatch log --

    def meet(self, facts: Facts) -> None:
        """See `LeaderLink`. Waits for the leader as long as it takes. ConfigError, too, if TLS keeps this
        process from it.
        """
        assert self._options.process_id is not None, "a process of a group has a number"
        self._find()
        self._reports.put(Request(hello=group_pb2.Hello(process_id=self._options.process_id, facts=facts)))
        method: Any = self._channel.stream_stream(
            f"/{SERVICE}/Follow", Request.SerializeToString, Response.FromString
        )
        answers = method(self._told(), metadata=self._metadata, wait_for_ready=True)
        threading.Thread(target=self._read, args=(answers,), name="penstock-link", daemon=True).start()
        threading.Thread(target=self._watch, name="penstock-group", daemon=True).start()
        self._next("welcome")
        self._is_welcome = True

    def begin(self, facts: Facts) -> None:
        """See `LeaderLink`."""
        self._reports.put(Request(ready=group_pb2.Ready(facts=facts)))
        self._next("begun")

    def calls(self) -> Iterator[Call | UpdateRecord]:
        """See `LeaderLink`."""
        while True:
            message = self._record()
            if message.HasField("stop"):
                self.is_stopped = True
                return
            try:
                record = record_of(message)
            except ValueError as error:
                raise GroupEnded(f"a call of the leader's cannot be read: {error}") from error
            if record is None:
                raise GroupEnded(f"the leader has sent {message.WhichOneof('record')!r} in place of a call")
            yield record
            del record  # the bytes of a tensor need not be kept until the next one comes

    # -- what this process tells --

    def report(self, report: Taken | Prepared) -> None:
        """See `LeaderLink`."""
        self._reports.put(report_message(report))

    def leave(self) -> None:
        """Ask the leader to end the group gracefully, or wait for it no longer if it is not there yet. Any
        thread may call this, also in a handler of a signal.
        """
        if self._heard_s is None:
            self.is_stopped = True
            self._records.put(_stopped_early())
            return
        self._reports.put(Request(leaving=group_pb2.Leaving()))

    def fail(self, reason: str) -> None:
        """Tell the leader that this process ends, and why. Waits a moment until it has left."""
        self._is_over.set()
        self._reports.put(Request(failed=group_pb2.Failed(reason=reason)))
        self._reports.put(None)
        time.sleep(0.2)

    def _told(self) -> Iterator[group_pb2.FollowRequest]:
        beat_s = self._options.silence_s / BEATS
        while True:
            try:
                report = self._reports.get(timeout=beat_s)
            except queue.Empty:
                report = Request(alive=group_pb2.Alive())
            if report is None:
                return
            yield report

    # -- how it is done --

    def _find(self) -> None:
        """Wait until the leader's server answers."""
        ask: Any = self._channel.unary_unary(_HEALTH)
        closed_s: float | None = None
        while not self.is_stopped:
            try:
                ask(b"", timeout=_ASK_TIMEOUT_S)
                return
            except grpc.RpcError as error:
                failure: Any = error
                if failure.code() not in _ABSENT:  # something is there, and will say what is wrong
                    return
                details = failure.details() or ""
            if "CERTIFICATE_VERIFY_FAILED" in details:
                raise ConfigError(
                    f"group_ca: the leader's certificate is not from these authorities: {details}"
                )
            if "handshake failed" in details:
                raise ConfigError(f"leader: TLS with it fails: {details}")
            now_s = time.monotonic()
            closed_s = (closed_s or now_s) if "Socket closed" in details else None
            if closed_s is not None and now_s - closed_s > self._options.silence_s:
                raise ConfigError(
                    "tls_cert: the leader closes every connection of this process: it wants TLS, or a "
                    "certificate from the authorities of its own client_ca"
                )
            time.sleep(_ASK_AGAIN_S)
        raise _stopped_early()

    def _next(self, kind: str) -> None:
        """Wait for a record of this kind."""
        record = self._record()
        if record.HasField("stop"):
            self.is_stopped = True
            raise GroupEnded("the leader has stopped")
        if not record.HasField(kind):  # type: ignore[arg-type]  # a name that the message has
            raise GroupEnded(f"the leader has sent {record.WhichOneof('record')!r} in place of {kind!r}")

    def _record(self) -> group_pb2.FollowResponse:
        record = self._records.get()
        if isinstance(record, Exception):
            raise record
        return record

    def _read(self, answers: Any) -> None:
        """Run the thread that receives, also while a call takes long. It holds the RPC to the end of this
        process, for which the leader waits.
        """
        try:
            for answer in answers:
                self._heard_s = time.monotonic()
                if answer.HasField("refused"):
                    self._end(_refusal(answer.refused))
                elif not answer.HasField("alive"):
                    if answer.HasField("stop"):
                        self._is_over.set()
                    self._records.put(answer)
            self._end(GroupEnded("the leader has ended the RPC"))
        except grpc.RpcError as error:
            self._end(self._rpc_error(error))

    def _rpc_error(self, error: Any) -> Exception:
        what = f"{error.code().name}: {error.details()}"
        if self._is_welcome or error.code() is grpc.StatusCode.UNAVAILABLE:
            return GroupEnded(f"the leader is gone: {what}")
        return ConfigError(f"leader: it does not take this process in: {what}")

    def _watch(self) -> None:
        """Run the thread that notices that the leader says nothing."""
        silence_s = self._options.silence_s
        while not self._is_over.wait(silence_s / BEATS / 2):
            if self._heard_s is not None and time.monotonic() - self._heard_s > silence_s:
                self._end(GroupEnded(f"the leader has said nothing for {silence_s:g} s"))

    def _end(self, error: Exception) -> None:
        if self._is_over.is_set():
            return
        self._is_over.set()
        self._records.put(error)
        if isinstance(error, GroupEnded):
            self._on_lost(error)


def _stopped_early() -> GroupEnded:
    return GroupEnded("this process was told to stop before its leader was there")


def _refusal(refused: group_pb2.Refused) -> Exception:
    reasons = "; ".join(refused.reasons)
    return (
        GroupEnded(reasons) if refused.ended else ConfigError(f"the processes of the group differ: {reasons}")
    )
