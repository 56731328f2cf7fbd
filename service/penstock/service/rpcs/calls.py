"""Ends an RPC for good when its peer takes or sends nothing any more.

grpc.aio runs an RPC in two tasks. One runs the handler and sends what it returns. The other started the
first, and waits for gRPC's core to say that the call is over. Core says so when a status has left or the
client gave up. If the peer keeps its connection open and takes nothing, core never says so, and the call
stays with all the memory that core holds for it. Cancelling the first task alone does not help, nor does
sending a status, which waits behind what is stuck; and there is no other way to cancel a call on the server's
side.

If both tasks are cancelled, nothing holds the call any more. Core treats a call that is released before its
end as cancelled: it drops what was to be sent, and sends the peer CANCELLED and RST_STREAM, which need no
window.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any

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
    """The handler that this task started, if it is one of these. The task's coroutine, made by Cython, holds
    it among its variables.
    """
    for variables in gc.get_referents(task.get_coro()):
        for value in gc.get_referents(variables):
            found = handlers.get(id(value))
            if found is not None:
                return found
    return None
