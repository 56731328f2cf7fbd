"""grpc.aio's server, but that no call can end it.

grpcio 1.85 (also 1.84 and before, and what will be 1.86 so far) decodes the `:path` of a call of a method
that it does not know in the one task that takes in all calls. A path that is not UTF-8 ends that task, and
with it the address for good, while the process goes on. So here all methods are registered by name, which
gRPC's core tells apart by itself, and all other calls are answered without a look at their path: cygrpc keeps
it from Python, so the refusal cannot quote it.

For this, names are used that are not grpcio's public ones. pyproject.toml allows no other minor version than
those that tests/service/listening/test_grpc_server.py was run with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server as grpc_aio

log = logging.getLogger(__name__)

MAX_REFUSING = 2048
"""Refusals of unknown methods that may be on their way at once, at one address. Whoever calls one beside so
many others, which nobody takes, is cancelled without a word.
"""

Refuse: TypeAlias = "Callable[[grpc.aio.ServicerContext[Any, Any]], Awaitable[None]]"
"""Ends a call of a method that the server does not have. It runs in a task of its own."""


class _Core(cygrpc.AioServer):  # type: ignore[misc]  # of a module without hints
    """The part that is written in Cython."""

    def __init__(self, refuse: Refuse, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._refuse = refuse
        self._refusing: set[asyncio.Task[None]] = set()

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        """What the server's main task waits for to have a call of a method; None: of those without a name.

        For these it waits for ever, until the server is stopped.
        """
        if method is not None:
            future: asyncio.Future[Any] = super()._make_request_call_future(method)
            return future
        return asyncio.get_running_loop().create_task(self._take_unknown())

    async def _take_unknown(self) -> None:
        """Raises what cygrpc raises once the server is being stopped."""
        while True:
            state = await self._request_call()
            if len(self._refusing) >= MAX_REFUSING:
                del state  # then gRPC's core ends the call as CANCELLED
                continue
            task = asyncio.create_task(self._refused(state))
            del state
            self._refusing.add(task)  # the loop itself does not keep a task from being collected
            task.add_done_callback(self._refusing.discard)

    async def _refused(self, state: Any) -> None:
        context = cygrpc._ServicerContext(state, None, None, asyncio.get_running_loop())
        del state  # a call that nobody holds is one that gRPC's core ends
        try:
            await self._refuse(context)
        except (grpc.aio.AbortError, grpc.aio.InternalError):  # told, or nobody is there to be told
            pass
        except Exception:
            log.exception("a bug in how calls of unknown methods are refused")


class RefusingServer(grpc_aio.Server):
    """A grpc.aio server whose calls of methods without a registered handler all go to `refuse`."""

    def __init__(
        self,
        refuse: Refuse,
        *,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        options: Sequence[tuple[str, Any]],
    ) -> None:
        self._loop = cygrpc.get_working_loop()
        arguments = grpc_aio._augment_channel_arguments(options, None)
        self._server = _Core(refuse, self._loop, None, (), tuple(interceptors), arguments, None)
