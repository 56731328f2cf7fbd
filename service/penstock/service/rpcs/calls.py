"""How an RPC ends for good whose peer takes nothing, or sends nothing.

grpc.aio runs an RPC in two tasks: one runs the handler and sends what it gives, the other started the first
and waits for gRPC's core to say that the call is over. Core says so when a status has left or the client gave
up, so never, if the peer keeps its connection and takes nothing: then the call stays with all that core holds
of it. Cancelling the first task alone, or asking for a status to be sent behind what is stuck, changes
nothing of that, and there is no other way to cancel a call on the server's side.

If both tasks are cancelled, nobody holds the call any more. Core takes a call that is given back before its
end for cancelled: it drops what was to be sent, and the peer gets a CANCELLED and a RST_STREAM, which need no
window.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any

AT_ONCE = 500
"""So many tasks are looked at before others on the event loop have a turn."""
_OUTER = "_schedule_rpc_coro"
"""The coroutine of the second task."""

Task = asyncio.Task[Any]


class Ender:
    """Ends RPCs. Used on one event loop only."""

    def __init__(self) -> None:
        self._doomed: list[Task] = []
        self._sweep: asyncio.Task[None] | None = None

    def end(self, handler: Task) -> None:
        """End the RPC whose handler runs in this task: it is cancelled soon, wherever it waits."""
        self._doomed.append(handler)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().create_task(self._run(), name="penstock-end-rpcs")

    async def _run(self) -> None:
        """All that are to be ended by now in one go: each takes a look at every task."""
        try:
            while self._doomed:
                doomed = {id(task): task for task in self._doomed if not task.done()}
                self._doomed = []
                await _cancel(doomed)
        finally:
            self._sweep = None


async def _cancel(handlers: dict[int, Task]) -> None:
    """These tasks, by their ids, and those that started them."""
    for count, task in enumerate(list(asyncio.all_tasks())):
        if count % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)
        # A coroutine of Cython's that has just ended has no name any more, and its task is not done yet.
        if _OUTER in (getattr(task.get_coro(), "__qualname__", None) or ""):
            handler = _handler_of(task, handlers)
            if handler is not None:
                handler.cancel()
                task.cancel()
                del handlers[id(handler)]
            # A task that is held on to keeps its call from being given back.
            del handler
        del task
    for handler in handlers.values():
        handler.cancel()
    handlers.clear()


def _handler_of(task: Task, handlers: dict[int, Task]) -> Task | None:
    """Which of these the task started: its coroutine, made by Cython, has it among its variables."""
    for variables in gc.get_referents(task.get_coro()):
        for value in gc.get_referents(variables):
            found = handlers.get(id(value))
            if found is not None:
                return found
    return None
