"""RPCs whose reply nobody takes: each is given up after a while, with its task, its memory and core's.

What is sent is followed from when gRPC gets it until it asks for more: by then all of it has passed the
peer's window. A peer that takes no part of a message for the stall limit is too slow for gRPC to tell from
one that has vanished, so a large message has a limit that grows with its size.

A call that is refused at its headers has no place among those that may go on at once (`admission`), so
refusals that nobody takes are bounded here.
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
"""Between finding that a reply is late and ending it: where the event loop itself was held up, gRPC's word
that the reply has left may lie there unread.
"""
LAST_WORDS_S = 5.0
"""A reader that comes back so long after the stall limit still learns how its RPC ended."""
MAX_REFUSALS = 24_576
"""Statuses of calls without a place that may be on their way out at once. One address may have half of them,
so that a client which reads gets a status for each of 10,000 calls at once.
"""


class Sends:
    """All replies of one server that are on their way. Used on its event loop only."""

    def __init__(self, stall_limit_s: float, stalls: StallLog) -> None:
        self._limit_s = stall_limit_s + LAST_WORDS_S
        self._stall_limit_s = stall_limit_s
        self._stalls = stalls
        self._ender = Ender()
        self._refusals = Gate("refusals", MAX_REFUSALS, time.monotonic, per_address=MAX_REFUSALS // 2)

    @property
    def num_refusals(self) -> int:
        """Statuses of calls without a place that are on their way out."""
        return self._refusals.active

    def start(self, method: str) -> Send:
        """Follow the RPC of this task from now on until the task's end."""
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        send = Send(self, task, method)
        task.add_done_callback(send.close)
        return send

    def limit_s(self, num_bytes: int) -> float:
        """How long a message of this size may take, in seconds."""
        return self._limit_s + num_bytes / SLOWEST_BYTES_PER_S

    async def refuse(self, task: asyncio.Task[Any], peer: str) -> None:
        """Count the status of this task's RPC, which has no place, until the task ends. Beside too many
        others it gets none: the RPC is ended, and so is this.
        """
        leave = None
        with contextlib.suppress(Busy):
            leave = self._refusals.enter(peer)
        if leave is None:
            self._ender.end(task)
            await asyncio.Event().wait()  # until the task is cancelled
        else:
            task.add_done_callback(partial(_call, leave))

    def give_up(self, task: asyncio.Task[Any], method: str) -> None:
        """End the RPC of this task."""
        self._stalls.tell(f"the reply of {method}", self._stall_limit_s)
        self._ender.end(task)


def _call(leave: Callable[[], None], _task: object) -> None:
    leave()


class Send:
    """The messages of one RPC, one after the other."""

    __slots__ = ("_due", "_looked", "_loop", "_method", "_sends", "_task", "_timer", "gave_up")

    def __init__(self, sends: Sends, task: asyncio.Task[Any], method: str) -> None:
        self._sends, self._method = sends, method
        self._task: asyncio.Task[Any] | None = task
        self._loop = task.get_loop()
        self._due: float | None = None
        self._looked: float | None = None
        """What was late when it was looked at."""
        self._timer: asyncio.TimerHandle | None = None
        self.gave_up = False
        """Whether the RPC is being ended for it."""

    def begin(self, num_bytes: int = 0) -> None:
        """gRPC is given a message of this size, or a status, or is asked for a message of up to this size."""
        self._due = self._loop.time() + self._sends.limit_s(num_bytes)
        if self._timer is None:  # else it looks again when it fires: one timer serves many messages
            self._timer = self._loop.call_at(self._due, self._look)

    async def begin_refusal(self, peer: str) -> None:
        """gRPC is given the status of a call without a place. Beside too many others the call is ended."""
        if self._task is not None:
            await self._sends.refuse(self._task, peer)
        self.begin()

    def done(self) -> None:
        """The message has left, or has come."""
        self._due = None

    def close(self, _: object = None) -> None:
        """The RPC's task has ended."""
        self._due = self._task = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def followed(self, context: Any) -> Any:
        """The RPC's context, for a handler that writes by itself."""
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
        task, self._task = self._task, None
        self._sends.give_up(task, self._method)


class _FollowedContext:
    """gRPC's context, whose writes are followed; they are small."""

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
