"""In the engine's process: a server whose clients are front processes.

It has the methods of grpc.aio's server that the service uses, so that it is given the same servicers and
interceptors, and nothing beyond it knows whether gRPC runs in this process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import grpc

from penstock.runtime.errors import ConfigError
from penstock.service.fronts.calls import Served
from penstock.service.fronts.processes import FrontProcess
from penstock.service.fronts.settings import FrontSettings
from penstock.service.limits.bounds import backlog_of, call_options
from penstock.service.listening.grpc_server import MakeServer, Refuse
from penstock.service.listening.listeners import HeldPort
from penstock.service.options import ServerOptions


class LinkServer:
    """Answers the calls of its front processes, from `start` to `stop`."""

    def __init__(
        self,
        num_processes: int,
        settings: FrontSettings,
        refuse: Refuse,
        *,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        hang_limit_s: float = 0.0,
    ) -> None:
        """`settings` are those of each process, but for the methods. `refuse` ends calls of methods without a
        handler. A process that does nothing for `hang_limit_s` seconds is replaced; 0: it never is.
        """
        self._hang_limit_s = hang_limit_s
        self._num_processes, self._settings = num_processes, settings
        self._refuse, self._interceptors = refuse, tuple(interceptors)
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self.processes: tuple[FrontProcess, ...] = ()
        """The front processes, once the server was started."""

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Do nothing: generated code also registers every method by its name."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Add the methods of a service."""
        self._handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    async def start(self) -> None:
        """Start the processes, and return once all of them listen. Raises ConfigError if one cannot."""
        streaming = {method: handler.response_streaming for method, handler in self._handlers.items()}
        settings = dataclasses.replace(self._settings, methods=streaming)
        served = Served(self._refuse, self._interceptors, self._handlers)
        self.processes = tuple(
            FrontProcess(number, settings, served, self._hang_limit_s)
            for number in range(1, self._num_processes + 1)
        )
        try:
            await asyncio.gather(*(process.start() for process in self.processes))
        except ConfigError:
            await self.stop(0.0)
            raise

    async def stop(self, grace_s: float | None) -> None:
        """Take no further calls; those that run may go on for `grace_s` seconds. May be called again with a
        shorter grace.
        """
        for process in self.processes:
            process.stop(grace_s or 0.0)
        await asyncio.gather(*(process.ended() for process in self.processes), return_exceptions=True)

    async def wait_for_termination(self, timeout_s: float | None = None) -> bool:
        """Wait until the server was stopped. Returns whether it was not within the time. Raises FrontsLost if
        front processes cannot live.
        """
        endings = [asyncio.ensure_future(process.ended()) for process in self.processes]
        done, going_on = await asyncio.wait(endings, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for one in going_on:
            one.cancel()
        for one in done:
            one.result()
        return not done


def link_server(options: ServerOptions, port: HeldPort) -> MakeServer:
    """Return what makes a server with such options, whose front processes listen on `port`."""
    bounds = options.bounds
    settings = FrontSettings(
        address=port.address,
        tls=options.listen.tls,
        methods={},
        options=[
            ("grpc.so_reuseport", 1),
            *call_options(bounds, options.max_receive_bytes),
            *options.connections.arguments(),
        ],
        max_connections=bounds.max_connections // options.front_processes,
        max_calls=2 * backlog_of(bounds),
        log_level=logging.getLogger().getEffectiveLevel(),
    )

    def make(refuse: Refuse, *, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> grpc.aio.Server:
        # It is one as far as the service knows.
        return cast(
            "grpc.aio.Server",
            LinkServer(
                options.front_processes,
                settings,
                refuse,
                interceptors=interceptors,
                hang_limit_s=options.watchdog_s,
            ),
        )

    return make
