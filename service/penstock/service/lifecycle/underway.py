"""RPCs while the server has no engine yet, and while it stops.

`Calls` keeps track of the RPCs that are under way, so that the server can stop without cutting any of them
off.

`LateServicer` stands for a servicer that is bound after the server has started. gRPC must know all methods
before it starts. The contract's methods need an engine, and the server answers health checks long before it
has one. So gRPC gets a stand-in that looks for the servicer at each call.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from penstock.runtime.errors import Draining, NotReady

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_SETTLE_S = 3.0
_MOMENT_S = 0.03
_LATE_S = 0.02


class Calls(grpc.aio.ServerInterceptor):
    """Knows how many RPCs have begun, which RPCs of the contract have not ended, and which of those have not
    reached the engine yet. Used on the event loop only.
    """

    def __init__(self) -> None:
        self._num_begun = 0
        self.num_running = 0
        """How many RPCs of the contract have begun and not ended."""
        self.is_draining = False
        """Whether `drain` was called."""
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
        """Make `wait_idle` wait for the RPC of this task until its last byte has left. Raises Draining if
        `drain` was called; the RPC is waited for nevertheless.
        """
        self.num_running += 1
        self._idle.clear()
        task = asyncio.current_task()
        assert task is not None, "gRPC calls handlers in a task"
        # The callback is the task's and not the context's: the context refers to its callbacks and they to
        # it, and this cycle would keep the call alive until a garbage collection.
        task.add_done_callback(self._end)
        if self.is_draining:
            raise Draining

    @contextlib.asynccontextmanager
    async def preparing(self) -> AsyncIterator[None]:
        """Mark what is awaited inside as coming before the engine has the request. `drain` interrupts it,
        wherever it waits, and then this raises Draining.
        """
        if self.is_draining:
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
        """Let no RPC of the contract reach the engine from now on: those on their way there end with
        Draining. RPCs whose requests are in the engine go on.
        """
        self.is_draining = True
        now = asyncio.get_running_loop().time()
        for limit in self._preparing:
            limit.reschedule(now)

    def _end(self, _task: Any) -> None:
        self.num_running -= 1
        if not self.num_running:
            self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no RPC of the contract is left, for at most `timeout_s` seconds. Returns whether none
        is.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self._idle.is_set()

    async def wait_settled(self) -> None:
        """Wait until no RPC has begun for a moment, but not for long if they keep coming.

        gRPC hands RPCs over one by one. Those that it has not handed over when it is stopped end with a bare
        CANCELLED, which clients do not retry.
        """
        now = asyncio.get_running_loop().time
        ends_s = now() + _SETTLE_S
        while now() < ends_s:
            num_begun, wakes_s = self._num_begun, now() + _MOMENT_S
            await asyncio.sleep(_MOMENT_S)
            is_late = now() > wakes_s + _LATE_S  # on a busy machine a moment without RPCs says less
            for _ in range(5):  # RPCs that were handed over meanwhile may begin now
                await asyncio.sleep(0)
            if num_begun == self._num_begun and not is_late:
                return


class LateServicer:
    """Has the methods of a service, which raise NotReady until a servicer is bound.

    Each method is a plain function that returns what the servicer's method returns: a coroutine or an async
    generator. It must be called inside an interceptor that handles either.
    """

    def __init__(self, service: ServiceDescriptor) -> None:
        self._servicer: Any = None
        for method in service.methods:
            setattr(self, method.name, functools.partial(self._call, method.name))

    def bind(self, servicer: Any) -> None:
        """Pass calls to this servicer from now on."""
        self._servicer = servicer

    def _call(self, method: str, request: Any, context: Any) -> Any:
        if self._servicer is None:
            raise NotReady
        return getattr(self._servicer, method)(request, context)
