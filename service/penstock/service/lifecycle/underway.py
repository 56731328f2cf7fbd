"""What of the RPCs is under way, for whoever is to end the server and wants to cut off nobody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from penstock.runtime.errors import Draining

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_SETTLE_S = 3.0
_MOMENT_S = 0.03
_LATE_S = 0.02


class Calls(grpc.aio.ServerInterceptor):
    """How many RPCs have begun, which of the contract's have not ended, and which of these are still on their
    way to the engine. On the event loop only.
    """

    def __init__(self) -> None:
        self._num_begun = 0
        self._num_running = 0
        self._draining = False
        self._preparing: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        self._num_begun += 1
        return await continuation(handler_call_details)

    def begin(self) -> None:
        """Wait in `wait_idle` for the RPC of this task, until its last byte has left. Raises Draining, which
        it waits for as well, once `drain` was called.
        """
        self._num_running += 1
        self._idle.clear()
        task = asyncio.current_task()
        assert task is not None, "gRPC calls handlers in a task"
        # Not with the call's context, which refers to its callbacks and they to it: the circle would keep a
        # call from its end until Python looks for such.
        task.add_done_callback(self._end)
        if self._draining:
            raise Draining

    @contextlib.asynccontextmanager
    async def preparing(self) -> AsyncIterator[None]:
        """What is awaited inside comes before the engine has the request: `drain` breaks it off, wherever it
        waits, and then this raises Draining.
        """
        if self._draining:
            raise Draining
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._preparing.add(limit)
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise Draining from None
        finally:
            self._preparing.discard(limit)

    def drain(self) -> None:
        """From now on no RPC of the contract gets to the engine: those that are on their way there end as
        Draining. What is with the engine goes on.
        """
        self._draining = True
        now = asyncio.get_running_loop().time()
        for limit in self._preparing:
            limit.reschedule(now)

    def _end(self, _task: Any) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until none is left, for so long; whether none is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self._idle.is_set()

    async def wait_settled(self) -> None:
        """Wait until no RPC has begun for a moment, but not for long where they keep coming.

        gRPC hands RPCs over one by one. Those that it still has when it is stopped end as a bare CANCELLED,
        which tells a client nothing, and which none sends again.
        """
        now = asyncio.get_running_loop().time
        ends_s = now() + _SETTLE_S
        while now() < ends_s:
            num_begun, wakes_s = self._num_begun, now() + _MOMENT_S
            await asyncio.sleep(_MOMENT_S)
            is_late = now() > wakes_s + _LATE_S  # on a busy machine a moment without RPCs says less
            for _ in range(5):  # what was handed over meanwhile may begin now
                await asyncio.sleep(0)
            if num_begun == self._num_begun and not is_late:
                return
