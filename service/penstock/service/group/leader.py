"""The leader's side of a group: it waits for the followers, sends them the calls of its runner, and ends the
group when one of them is lost.

A follower is lost if its RPC ends, or if nothing comes of it for `GroupOptions.silence_s`. The leader itself
is lost for this purpose if its engine has work and makes no progress for so long, as in a collective in which
a follower is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc

from penstock.runtime.errors import (
    ConfigError,
    GroupEnded,
    InvalidRequest,
    PenstockError,
    Violation,
    WeightsError,
)
from penstock.runtime.following.interface import (
    Call,
    Facts,
    GroupOptions,
    Piece,
    Prepared,
    UpdateBegin,
    UpdateOver,
    UpdateRecord,
    differences,
)
from penstock.runtime.loop.interface import Pulse
from penstock.service.access.callers import ANYBODY, CURRENT_CALLER, Caller
from penstock.service.access.roles import check_controls
from penstock.service.group import group_pb2
from penstock.service.group.messages import call_bytes, prepared_of, update_bytes
from penstock.service.lifecycle.watchdog import Stillness

log = logging.getLogger(__name__)

SERVICE = group_pb2.DESCRIPTOR.services_by_name["GroupService"].full_name
FOLLOW = f"{SERVICE}/Follow"
BEATS = 5
"""Signs of life within the time after which a process is lost."""
_MOST_WAITING_BYTES = 1 << 30
"""Bytes of calls that one follower may have waiting: far more than those of the steps in flight. The patches
of one large image are 100 MB, and a step may encode several. Beyond that the engine's thread waits."""
_TAKEN_AT_ONCE_BYTES = 1 << 20
_MOST_UNTAKEN_BYTES = 8 << 20
"""Bytes of an update's tensors that may be under way to a follower."""
_SETTLE_S = 2.0
"""Seconds that the followers' ends are waited for after the loss of one."""
_EXPLAIN_S = 1.0
"""Seconds in which the loss of a follower is noticed after a collective has failed because of it."""
_TELL_S = 10.0

Response = group_pb2.FollowResponse


class _Follower:
    """What is known of one follower. The leader's lock guards it, but for `wake`."""

    def __init__(self, process_id: int, facts: Facts, loop: asyncio.AbstractEventLoop) -> None:
        self.process_id = process_id
        self.facts = facts
        self.ready: Facts | None = None
        self.seen_s = time.monotonic()
        self.is_over = False
        """Whether its RPC ends after the calls that wait."""
        self._loop = loop
        self.untaken_bytes = 0
        """Of the tensors of updates, what it was told and has not taken."""
        self._waiting: deque[bytes] = deque()
        self._behind: deque[bytes] = deque()
        self.waiting_bytes = 0
        """Of calls, those that are not taken yet."""
        self._is_told = False
        self.wake = asyncio.Event()
        """Set when something waits; used on the event loop only."""

    def put(self, data: bytes) -> None:
        """Let a message wait to be sent."""
        self._waiting.append(data)
        self.waiting_bytes += len(data)
        self._wake()

    def put_behind(self, data: bytes) -> None:
        """Let a message wait behind all that `put` lets wait, also later."""
        self._behind.append(data)
        self._wake()

    def _wake(self) -> None:
        if not self._is_told:  # the event loop is woken once for all that waits
            self._is_told = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                self._loop.call_soon_threadsafe(self.wake.set)

    def take(self) -> list[bytes]:
        """Return the next messages, or one of those behind; none if none waits."""
        taken, size = [], 0
        while self._waiting and size < _TAKEN_AT_ONCE_BYTES:
            taken.append(self._waiting.popleft())
            size += len(taken[-1])
        self.waiting_bytes -= size
        if not taken and self._behind and not self.is_over:
            taken.append(self._behind.popleft())
        if not taken:
            self._is_told = False  # until then the event loop comes again by itself
            self.wake.clear()
        return taken


class _UpdateUnderWay:
    """What is known of a weight update. The leader's lock guards it."""

    def __init__(self) -> None:
        self.prepared: dict[int, Prepared] = {}
        """What has come of it, by the follower's number."""
        self.is_given_up = False


class GroupLeader:
    """The leader's dispatch log, and the servicer that its followers call. Methods may be called on any
    thread, but `Follow` on the server's event loop.
    """

    def __init__(self, options: GroupOptions, force_end: Callable[[GroupEnded], None]) -> None:
        """`force_end` ends this process; it is called if the group has ended, and the process goes on."""
        self.options = options
        self._force_end = force_end
        self._changed = threading.Condition()
        self._followers: dict[int, _Follower] = {}
        self._updates: dict[int, _UpdateUnderWay] = {}
        self._update_numbers = itertools.count(1)
        self._facts: Facts | None = None
        self._is_met = False
        self._ended: GroupEnded | None = None
        self._is_stopped = False
        self._pulse: Callable[[], Pulse] | None = None
        self.on_end: Callable[[GroupEnded], None] = lambda error: None
        """Called once when the group ends in another way than by `stop`, on any thread."""
        self.caller_of: Callable[[Any], Caller] = lambda context: ANYBODY
        """Called with the context of a follower's RPC that is under way: its caller, by the keys that are
        valid now. Raises if its key is not.
        """
        self.on_leaving: Callable[[], None] = lambda: None
        """Called on the event loop when a follower asks for the graceful end of the group."""

    # -- the dispatch log --

    def meet(self, facts: Facts) -> None:
        """See `DispatchLog`."""
        threading.Thread(target=self._watch, name="penstock-group", daemon=True).start()
        with self._changed:
            self._facts = facts
            self._wait("have come", lambda follower: True)
            self._compare({follower.process_id: follower.facts for follower in self._all}, facts)
            self._is_met = True
            self._send_all(Response(welcome=group_pb2.Welcome()))
        log.info("all %d processes of the group are there", self.options.processes)

    def begin(self, facts: Facts) -> None:
        """See `DispatchLog`."""
        with self._changed:
            self._wait("have compiled their programs", lambda follower: follower.ready is not None)
            self._compare({follower.process_id: follower.ready or {} for follower in self._all}, facts)
            self._send_all(Response(begun=group_pb2.Begun()))

    def append(self, call: Call) -> None:
        """See `DispatchLog`."""
        data = call_bytes(call)
        with self._changed:

            def has_room() -> bool:
                self._check()
                most = max(follower.waiting_bytes for follower in self._followers.values())
                return most == 0 or most + len(data) <= _MOST_WAITING_BYTES

            if self._changed.wait_for(has_room, self.options.silence_s):
                for follower in self._followers.values():
                    follower.put(data)
                return
        raise _alike(self.end(f"a follower has read nothing for {self.options.silence_s:g} s"))

    def open_update(self) -> int:
        """See `DispatchLog`."""
        return next(self._update_numbers)

    def tell(self, record: UpdateRecord, process_id: int | None = None) -> None:
        """See `DispatchLog`."""
        data = update_bytes(record)
        size = len(record.data) if isinstance(record, Piece) else 0
        with self._changed:
            if isinstance(record, UpdateBegin):
                self._updates[record.number] = _UpdateUnderWay()

            def receivers() -> list[_Follower]:
                self._check_update(record.number)
                return self._all if process_id is None else [self._followers[process_id]]

            def has_room() -> bool:
                untaken = max(follower.untaken_bytes for follower in receivers())
                return untaken + size <= _MOST_UNTAKEN_BYTES

            self._changed.wait_for(has_room)
            for follower in receivers():
                follower.untaken_bytes += size
                follower.put_behind(data)

    def prepared(self, number: int) -> Mapping[int, Prepared]:
        """See `DispatchLog`."""
        with self._changed:

            def are_all() -> bool:
                found = self._check_update(number).prepared
                return len(found) == self.options.processes - 1

            self._changed.wait_for(are_all)
            return dict(self._updates[number].prepared)

    def give_up_update(self, number: int) -> None:
        """See `DispatchLog`."""
        with self._changed:
            if number in self._updates:
                self._updates[number].is_given_up = True
                self._changed.notify_all()

    def close_update(self, number: int) -> None:
        """See `DispatchLog`."""
        with self._changed:
            if self._updates.pop(number, None) is not None:
                data = update_bytes(UpdateOver(number))
                for follower in self._followers.values():
                    follower.put_behind(data)

    def explained(self, error: Exception) -> GroupEnded:
        """See `DispatchLog`."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None, _EXPLAIN_S)
            ended = self._ended
        cause = str(error).partition("\n")[0]
        return _alike(ended or self.end(f"a collective failed: {cause}"))

    # -- life --

    def watch(self, pulse: Callable[[], Pulse]) -> None:
        """End the group, too, from now on if an engine with this pulse has work and makes no progress."""
        self._pulse = pulse

    def end(self, reason: str) -> GroupEnded:
        """End the group. Returns why it has ended, which is the first reason that there was."""
        with self._changed:
            if self._ended is not None or self._is_stopped:
                return self._ended or GroupEnded("the leader has stopped")
            self._ended = GroupEnded(reason)
            self._refuse_all([reason], ended=True)
            self._changed.notify_all()
        log.error("the group ends: %s", reason)
        force = threading.Timer(self.options.silence_s, self._force_end, (self._ended,))
        force.daemon = True
        force.start()
        self.on_end(self._ended)
        return self._ended

    def stop(self) -> None:
        """Tell the followers that the leader has stopped, unless the group has ended, and wait until their
        processes are gone: JAX aborts those that still run when its coordinator, which is in this process,
        is gone.
        """
        with self._changed:
            if self._ended is None and not self._is_stopped:
                self._is_stopped = True
                self._send_all(Response(stop=group_pb2.Stop()))
                for follower in self._followers.values():
                    follower.is_over = True
                self._changed.notify_all()
            self._changed.wait_for(lambda: not self._followers, self._settle_s)

    @property
    def failure(self) -> GroupEnded | None:
        """Why the group has ended, if it has in another way than by `stop`."""
        return self._ended

    # -- the servicer --

    async def Follow(self, reports: AsyncIterator[group_pb2.FollowRequest], context: Any) -> None:
        """Serve one follower until the end of the group, or of the RPC, which ends the group."""
        check_controls(CURRENT_CALLER.get(), "Follow")
        first = await anext(aiter(reports), None)
        if first is None or not first.HasField("hello"):
            raise InvalidRequest([Violation("hello", "must be the first message")])
        follower, reasons = self._entered(first.hello)
        if follower is None:
            await context.write(_refused(reasons).SerializeToString())
            return
        works = (self._read(reports, follower), self._beat(follower, context))
        tasks = [asyncio.create_task(work) for work in works]
        lost = "its connection was lost"
        try:
            await self._write(follower, context)
        except BaseException as error:
            if not isinstance(error, (asyncio.CancelledError, grpc.aio.BaseError)):
                lost = f"it cannot be written to: {error!r}"
            raise
        finally:
            for task in tasks:
                task.cancel()
            self._left(follower, lost)

    def _entered(self, hello: group_pb2.Hello) -> tuple[_Follower | None, list[str]]:
        """Take a follower in, or say why not."""
        number = hello.process_id
        follower = _Follower(number, dict(hello.facts), asyncio.get_running_loop())
        with self._changed:
            if self._ended is not None:
                return None, [self._ended.reason]
            if not 1 <= number < self.options.processes:
                return None, [
                    f"process_id: a follower's is from 1 to {self.options.processes - 1}, not {number}"
                ]
            if number in self._followers:
                return None, [f"process_id: another process with the number {number} is there already"]
            if self._is_met or self._is_stopped:
                return None, ["the group runs already, and ends soon: start again"]
            self._followers[number] = follower
            self._changed.notify_all()
        log.info("process %d of %d has come", number, self.options.processes)
        return follower, []

    async def _write(self, follower: _Follower, context: Any) -> None:
        while True:
            with self._changed:
                messages, is_over = follower.take(), follower.is_over
                self._changed.notify_all()  # whoever waits for room
            for data in messages:
                await context.write(data)
            if messages:
                continue  # more may have come meanwhile
            if is_over:
                # The follower's process ends now. That breaks its connection, which cancels this task.
                await asyncio.sleep(self._settle_s)
                return
            await follower.wake.wait()

    async def _beat(self, follower: _Follower, context: Any) -> None:
        """Say again and again that the leader is alive, as long as the follower may hear it."""
        alive = Response(alive=group_pb2.Alive()).SerializeToString()
        while True:
            try:
                check_controls(self.caller_of(context), "Follow")
            except PenstockError as error:
                self.end(f"process {follower.process_id} may not follow any more: {error}")
                return
            with self._changed:
                follower.put(alive)
            await asyncio.sleep(self.options.silence_s / BEATS)

    async def _read(self, reports: AsyncIterator[group_pb2.FollowRequest], follower: _Follower) -> None:
        async for report in reports:
            with self._changed:
                follower.seen_s = time.monotonic()
                if report.HasField("ready"):
                    follower.ready = dict(report.ready.facts)
                    self._changed.notify_all()
                if report.HasField("taken"):
                    follower.untaken_bytes -= report.taken.num_bytes
                    self._changed.notify_all()
                if report.HasField("prepared") and report.prepared.number in self._updates:
                    under_way = self._updates[report.prepared.number]
                    under_way.prepared[follower.process_id] = prepared_of(report.prepared)
                    self._changed.notify_all()
            if report.HasField("failed"):
                self.end(f"process {follower.process_id} cannot go on: {report.failed.reason}")
            if report.HasField("leaving"):
                log.warning("process %d was told to stop, so the group stops", follower.process_id)
                self.on_leaving()

    def _left(self, follower: _Follower, why: str) -> None:
        with self._changed:
            is_expected = follower.is_over or self._is_stopped
        if not is_expected:  # before it is forgotten, so that no call is appended for fewer followers
            self.end(f"process {follower.process_id} is gone: {why}")
        with self._changed:
            self._followers.pop(follower.process_id, None)
            self._changed.notify_all()

    @property
    def _settle_s(self) -> float:
        """Seconds that the ends of followers are waited for: longer where all of them are well."""
        return self.options.silence_s if self._ended is None else _SETTLE_S

    # -- how it is done; all of it is called with the lock held, but `_watch` --

    @property
    def _all(self) -> list[_Follower]:
        return sorted(self._followers.values(), key=lambda follower: follower.process_id)

    def _check(self) -> None:
        if self._ended is not None:
            raise _alike(self._ended)
        if self._is_stopped:
            raise GroupEnded("the leader has stopped")

    def _check_update(self, number: int) -> _UpdateUnderWay:
        """Return an update that goes on. Raises GroupEnded, or WeightsError if it was given up or cannot be
        made.
        """
        self._check()
        under_way = self._updates[number]
        if under_way.is_given_up:
            raise WeightsError("the update was taken back")
        for process, prepared in sorted(under_way.prepared.items()):
            if prepared.problem:
                raise WeightsError(f"process {process} of the group: {prepared.problem}")
        return under_way

    def _wait(self, what: str, is_done: Callable[[_Follower], bool]) -> None:
        """Wait until all followers are there, and done with something."""

        def missing() -> list[int]:
            numbers = range(1, self.options.processes)
            found = self._followers
            return [number for number in numbers if number not in found or not is_done(found[number])]

        while missing():
            self._check()
            if not self._changed.wait_for(lambda: not missing() or self._ended is not None, _TELL_S):
                log.info("waiting until all processes %s: %s", what, ", ".join(map(str, missing())))
        self._check()

    def _compare(self, facts: Mapping[int, Facts], ours: Facts) -> None:
        """Raise ConfigError, and refuse all followers, if the facts of one are others than ours."""
        found = [
            f"process {number}: {difference}"
            for number, theirs in facts.items()
            for difference in differences(ours, theirs)
        ]
        if found:
            self._is_stopped = True
            self._refuse_all(found, ended=False)
            self._changed.wait_for(lambda: not self._followers, self._settle_s)
            raise ConfigError(f"the processes of the group differ: {'; '.join(found)}")

    def _send_all(self, message: group_pb2.FollowResponse) -> None:
        for follower in self._followers.values():
            follower.put(message.SerializeToString())

    def _refuse_all(self, reasons: list[str], *, ended: bool) -> None:
        for follower in self._followers.values():
            follower.is_over = True
            follower.put(_refused(reasons, ended=ended).SerializeToString())

    def _watch(self) -> None:
        """Run the thread that notices who says nothing."""
        silence_s = self.options.silence_s
        period_s = silence_s / BEATS / 2
        stillness = Stillness(silence_s, time.monotonic())
        while self._ended is None and not self._is_stopped:
            time.sleep(period_s)
            now_s = time.monotonic()
            with self._changed:
                silent = [one.process_id for one in self._all if now_s - one.seen_s > silence_s]
            pulse = None if self._pulse is None else self._pulse()
            if silent:
                self.end(f"process {silent[0]} has said nothing for {silence_s:g} s")
            elif pulse is not None and stillness.look(now_s, pulse.progress, pulse.has_work):
                self.end(f"a step takes longer than {silence_s:g} s: a process hangs")


def _alike(error: GroupEnded) -> GroupEnded:
    """Copy the error for another thread to raise. Requests raise the first one in their coroutines, whose
    frames are then in its traceback, and the engine's thread would clear them with its own (`failing`).
    """
    return GroupEnded(error.reason)


def _refused(reasons: list[str], *, ended: bool = True) -> group_pb2.FollowResponse:
    return Response(refused=group_pb2.Refused(reasons=reasons, ended=ended))


def add_group_service(servicer: Any, server: grpc.aio.Server) -> None:
    """Register the service with a server."""
    follow = grpc.stream_stream_rpc_method_handler(
        servicer.Follow, group_pb2.FollowRequest.FromString, Response.SerializeToString
    )
    server.add_registered_method_handlers(SERVICE, {"Follow": follow})
