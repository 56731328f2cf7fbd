"""Ends RPCs whose reply is not taken: each is given up after a while, and its task and memory are freed.

`Send` follows a message from when gRPC gets it until gRPC asks for more; by then it has passed the peer's
window completely. gRPC cannot tell a peer that takes no part of a message for the stall limit from one that
has vanished, so the time limit of a message grows with its size.

A call that is refused at its headers has no place among those that may go on at once (`limits.admission`).
Refusals that are not taken are therefore bounded here, by `Sends`.

`Ender` ends an RPC for good when its peer takes or sends nothing any more. grpc.aio runs an RPC in two tasks.
One runs the handler and sends what it returns. The other started the first, and waits for gRPC's core to say
that the call is over. Core says so when a status has left or the client gave up. If the peer keeps its
connection open and takes nothing, core never says so, and the call stays with all the memory that core holds
for it. Cancelling the first task alone does not help, nor does sending a status, which waits behind what is
stuck; and there is no other way to cancel a call on the server's side.

If both tasks are cancelled, nothing holds the call any more. Core treats a call that is released before its
end as cancelled: it drops what was to be sent, and sends the peer CANCELLED and RST_STREAM, which need no
window.

So nothing may hold an RPC's context or task in a circle of references. Tests run with Python's garbage
collector off, to prove that nothing does.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.service.errors import Busy
from penstock.service.limits.admission import Gate
from penstock.service.replies.outputs import SLOWEST_BYTES_PER_S, StallLog

AT_ONCE = 500
"""How many tasks are looked at before others on the event loop have a turn."""
_OUTER = "_schedule_rpc_coro"
"""The name of the second task's coroutine."""

Task = asyncio.Task[Any]


class Ender:
    """Ends RPCs. Used on one event loop only."""

    def __init__(self) -> None:
        self._doomed: list[Task] = []
        self._sweep: asyncio.Task[None] | None = None

    def end(self, handler: Task) -> None:
        """End the RPC whose handler runs in this task. Its tasks are cancelled soon, wherever they wait."""
        self._doomed.append(handler)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().create_task(self._run(), name="penstock-end-rpcs")

    async def _run(self) -> None:
        """End all RPCs that are due in one pass, because each pass looks at every task of the loop."""
        try:
            while self._doomed:
                doomed = {id(task): task for task in self._doomed if not task.done()}
                self._doomed = []
                await _cancel(doomed)
        finally:
            self._sweep = None


async def _cancel(handlers: dict[int, Task]) -> None:
    """Cancel these handlers' tasks, given by their ids, and the tasks that started them."""
    for count, task in enumerate(list(asyncio.all_tasks())):
        if count % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)
        # A coroutine of Cython that has just ended has no name any more, although its task is not done yet.
        if _OUTER in (getattr(task.get_coro(), "__qualname__", None) or ""):
            handler = _handler_of(task, handlers)
            if handler is not None:
                handler.cancel()
                task.cancel()
                del handlers[id(handler)]
            # A variable that refers to a task would keep its call alive.
            del handler
        del task
    for handler in handlers.values():
        handler.cancel()
    handlers.clear()


def _handler_of(task: Task, handlers: dict[int, Task]) -> Task | None:
    """Find the handler that this task started, if it is one of these. The task's coroutine, made by Cython,
    holds it among its variables.
    """
    for variables in gc.get_referents(task.get_coro()):
        for value in gc.get_referents(variables):
            found = handlers.get(id(value))
            if found is not None:
                return found
    return None


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
        """Return the seconds that a message of this size may take."""
        return self._limit_s + num_bytes / SLOWEST_BYTES_PER_S

    async def refuse(self, task: Task, peer: str) -> None:
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

    def give_up(self, task: Task, method: str) -> None:
        """End the RPC of this task."""
        self._stalls.tell(f"the reply of {method}", self._stall_limit_s)
        self._ender.end(task)


def _call(leave: Callable[[], None], _task: object) -> None:
    leave()


class Send:
    """Follows the messages of one RPC, one after the other."""

    __slots__ = ("_counted", "_due", "_looked", "_loop", "_method", "_sends", "_task", "_timer", "gave_up")

    def __init__(self, sends: Sends, task: Task, method: str) -> None:
        self._sends, self._method = sends, method
        self._task: Task | None = task
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
