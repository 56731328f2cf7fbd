"""grpc.aio's server, changed so that no call can end it, and so that it may be stopped more than once.

For a call of an unknown method grpcio 1.85 (also 1.84 and earlier, and 1.86 so far) decodes the `:path` in
the task that accepts all calls. A path that is not UTF-8 ends that task, and with it the address for good,
while the process goes on. Therefore all methods are registered by name here, which gRPC's core tells apart by
itself, and all other calls are refused without looking at their path. cygrpc does not pass that path to
Python, so the refusal cannot quote it.

cygrpc frees the server at the end of the first call of `shutdown`. Another call whose grace passes at that
moment cancels the calls of a server that is gone, which ends the process (SIGSEGV). Therefore cygrpc is given
one grace that never passes, and is told when the calls are to be cancelled.

This needs names that are not public in grpcio. pyproject.toml allows only the minor versions that
tests/service/listening/test_grpc_server.py was run with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server as grpc_aio

log = logging.getLogger(__name__)

MAX_REFUSING = 2048
"""How many refusals of unknown methods one address may be sending at once. Beyond that such calls are
cancelled without a status.
"""

_FOREVER_S = 1e9

Refuse: TypeAlias = "Callable[[grpc.aio.ServicerContext[Any, Any]], Awaitable[None]]"
"""Ends a call of a method that the server does not have. It runs in a task of its own."""


class MakeServer(Protocol):
    """Makes a server that passes every call of a method without a registered handler to `refuse`."""

    def __call__(
        self, refuse: Refuse, *, interceptors: Sequence[grpc.aio.ServerInterceptor]
    ) -> grpc.aio.Server: ...


class _Core(cygrpc.AioServer):  # type: ignore[misc]  # the module has no type hints
    """The part of the server that is written in Cython."""

    def __init__(self, refuse: Refuse, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._refuse = refuse
        self._refusing: set[asyncio.Task[None]] = set()
        self._ending: asyncio.Task[None] | None = None
        self._cancelling: asyncio.Task[None] | None = None

    async def shutdown(self, grace: float | None) -> None:
        """Stop, and cancel what runs after so many seconds, or after fewer if another call says so."""
        if self._ending is None:
            self._ending = asyncio.create_task(super().shutdown(_FOREVER_S))
        done, _ = await asyncio.wait([self._ending], timeout=grace or 0.0)
        if not done and self._cancelling is None:
            self._cancelling = asyncio.create_task(super().shutdown(None))
        await asyncio.shield(self._ending)

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        """Return the future that the server's main task awaits for the next call of `method`. None stands for
        unknown methods, for which the future is done only when the server is stopped.
        """
        if method is not None:
            future: asyncio.Future[Any] = super()._make_request_call_future(method)
            return future
        return asyncio.get_running_loop().create_task(self._take_unknown())

    async def _take_unknown(self) -> None:
        """Refuse calls of unknown methods, until cygrpc raises because the server is being stopped."""
        while True:
            state = await self._request_call()
            if len(self._refusing) >= MAX_REFUSING:
                del state  # then gRPC's core ends the call as CANCELLED
                continue
            task = asyncio.create_task(self._refused(state))
            del state
            self._refusing.add(task)  # the event loop itself keeps no reference to a task
            task.add_done_callback(self._refusing.discard)

    async def _refused(self, state: Any) -> None:
        context = cygrpc._ServicerContext(state, None, None, asyncio.get_running_loop())
        del state  # gRPC's core ends a call that nothing refers to
        try:
            await self._refuse(context)
        except (grpc.aio.AbortError, grpc.aio.InternalError):  # the status was sent, or the client is gone
            pass
        except Exception:  # nobody else would hear of it: gRPC runs this as a task of its own
            log.exception("could not refuse a call of an unknown method; this is a bug in the service")


class RefusingServer(grpc_aio.Server):
    """A grpc.aio server that passes every call of a method without a registered handler to `refuse`."""

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


def refusing_server(
    refuse: Refuse,
    *,
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    options: Sequence[tuple[str, Any]],
) -> grpc.aio.Server:
    """Make such a server."""
    made: Any = RefusingServer(refuse, interceptors=interceptors, options=options)
    server: grpc.aio.Server = made  # it is one by its base class, which the type hints do not know
    return server
