"""Ends RPCs whose reply is not taken: each is given up after a while, and its task and memory are freed.

A message is followed from when gRPC gets it until gRPC asks for more; by then it has passed the peer's window
completely. gRPC cannot tell a peer that takes no part of a message for the stall limit from one that has
vanished, so the time limit of a message grows with its size.

A call that is refused at its headers has no place among those that may go on at once (`admission`). Refusals
that are not taken are therefore bounded here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.service.errors import Busy
from penstock.service.limits.admission import Gate
from penstock.service.replies.readers import SLOWEST_BYTES_PER_S, StallLog
from penstock.service.rpcs.calls import Ender

SECOND_LOOK_S = 0.2
"""Seconds between finding that a reply is late and ending it. If the event loop itself was held up, gRPC's
message that the reply has left may be waiting unread.
"""
LAST_WORDS_S = 5.0
"""A reader that comes back within this many seconds after the stall limit still learns how its RPC ended."""
MAX_REFUSALS = 24_576
"""How many statuses of calls without a place may be on their way out at once. One address may have half of
them, so that a client that reads gets a status for each of 10,000 calls at once.
"""


class Sends:
    """All replies of one server that are being sent. Used on its event loop only."""

    def __init__(self, stall_limit_s: float, stalls: StallLog) -> None:
        self._limit_s = stall_limit_s + LAST_WORDS_S
        self._stall_limit_s = stall_limit_s
        self._stalls = stalls
        self._ender = Ender()
        self.refusals = Gate("refusals", MAX_REFUSALS, time.monotonic, per_address=MAX_REFUSALS // 2)
        """Counts the statuses of calls without a place that are being sent."""
        self.num_stalled = 0
        """How many calls were ended because their client did not read."""

    def start(self, method: str) -> Send:
        """Follow the RPC of the current task until the task ends."""
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        send = Send(self, task, method)
        task.add_done_callback(send.close)
        return send

    def limit_s(self, num_bytes: int) -> float:
        """Seconds that a message of this size may take."""
        return self._limit_s + num_bytes / SLOWEST_BYTES_PER_S

    async def refuse(self, task: asyncio.Task[Any], peer: str) -> None:
        """Count the status of this task's RPC, which has no place, until the task ends. If there are too many
        already, the RPC is ended without a status, and this call is cancelled with it.
        """
        leave = None
        with contextlib.suppress(Busy):
            leave = self.refusals.enter(peer)
        if leave is None:
            self._ender.end(task)
            await asyncio.Event().wait()  # waits until the task is cancelled
        else:
            task.add_done_callback(partial(_call, leave))

    def give_up(self, task: asyncio.Task[Any], method: str) -> None:
        """End the RPC of this task."""
        self._stalls.tell(f"the reply of {method}", self._stall_limit_s)
        self._ender.end(task)


def _call(leave: Callable[[], None], _task: object) -> None:
    leave()


class Send:
    """Follows the messages of one RPC, one after the other."""

    __slots__ = ("_counted", "_due", "_looked", "_loop", "_method", "_sends", "_task", "_timer", "gave_up")

    def __init__(self, sends: Sends, task: asyncio.Task[Any], method: str) -> None:
        self._sends, self._method = sends, method
        self._task: asyncio.Task[Any] | None = task
        self._loop = task.get_loop()
        self._due: float | None = None
        self._looked: float | None = None
        """The due time that had passed when it was checked first."""
        self._timer: asyncio.TimerHandle | None = None
        self._counted = False
        self.gave_up = False
        """Whether the RPC is being ended because its reply was not taken."""

    def begin(self, num_bytes: int = 0) -> None:
        """Note that gRPC now has a message of this size, or a status, to send."""
        self._due = self._loop.time() + self._sends.limit_s(num_bytes)
        # a timer that is set already checks again when it fires: one timer serves many messages
        if self._timer is None:
            self._timer = self._loop.call_at(self._due, self._look)

    async def begin_refusal(self, peer: str) -> None:
        """Note that gRPC now has the status of a call without a place. If there are too many of them, the
        call is ended.
        """
        if self._task is not None:
            await self._sends.refuse(self._task, peer)
        self.begin()

    def done(self) -> None:
        """Note that the message has left."""
        self._due = None

    def stalled(self) -> None:
        """Count the call among those whose client did not read, once."""
        if not self._counted:
            self._counted = True
            self._sends.num_stalled += 1

    def close(self, _: object = None) -> None:
        """Stop following: the RPC's task has ended."""
        self._due = self._task = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def followed(self, context: Any) -> Any:
        """Wrap the RPC's context for a handler that writes by itself."""
        return _FollowedContext(context, self)

    def _look(self) -> None:
        self._timer = None
        if self._due is None or self._task is None:
            return
        if self._loop.time() < self._due:
            self._timer = self._loop.call_at(self._due, self._look)
            return
        if self._looked != self._due:
            self._looked = self._due
            self._timer = self._loop.call_later(SECOND_LOOK_S, self._look)
            return
        self.gave_up = True
        self.stalled()
        task, self._task = self._task, None
        self._sends.give_up(task, self._method)


class _FollowedContext:
    """gRPC's context, whose writes, which are small, are followed."""

    def __init__(self, context: Any, send: Send) -> None:
        self._context, self._send = context, send

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        self._send.begin()
        await self._context.write(message)
        self._send.done()

    async def abort(self, *status: Any) -> None:
        self._send.begin()
        await self._context.abort(*status)
