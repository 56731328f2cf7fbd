"""In the engine's process: starts front processes, and another one whenever one dies; and a server whose
clients they are.

It has the methods of grpc.aio's server that the service uses, so that it is given the same servicers and
interceptors, and nothing beyond it knows whether gRPC runs in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import grpc

from penstock.runtime.errors import ConfigError
from penstock.service.limits.bounds import backlog_of, call_options
from penstock.service.listening.grpc_server import MakeServer, Refuse
from penstock.service.listening.listeners import HeldPort
from penstock.service.options import ServerOptions
from penstock.service.relay.calls import LinkCalls, Served
from penstock.service.relay.link import Kind, Line, Link, pack_seconds
from penstock.service.relay.settings import FrontSettings

log = logging.getLogger(__name__)

PROGRAM = "penstock.service.relay.process"
NOT_FOR_FRONTS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Signals that are meant for the engine's process. A terminal and a service manager send them to all
processes of a server.
"""
KILL_AFTER_S = 2.5
"""A front process that has not ended so long after its grace is killed."""
LONG_LIFE_S = 10.0
"""A front process that dies sooner than this has failed to live."""
MOST_FAILURES = 6
"""So many failures to live in a row mean that front processes cannot live here."""
FIRST_PAUSE_S = 0.1
"""The pause after the first such failure, in seconds; it doubles with each."""
LEAST_HANG_S = 2.0
"""For less than this any process does nothing now and then, where the machine is busy."""
_LOOKS = 4
"""How often a front process that gives no sign of life is looked at before it is killed."""
_LAST_MOMENT_S = 2.0
"""Seconds in which a process that has closed its link ends by itself."""


class FrontsLost(Exception):
    """Front processes die as soon as they are started. It ends the server, so it is told to no caller."""


class FrontProcess:
    """One front process after the other, of which one lives at a time. Used on its event loop only."""

    def __init__(self, number: int, settings: FrontSettings, served: Served, hang_limit_s: float) -> None:
        """Keep a process; one that does nothing for so long, or LEAST_HANG_S if that is more, is killed; 0:
        never.
        """
        self._number = number
        self._hang_limit_s = hang_limit_s and max(hang_limit_s, LEAST_HANG_S)
        self._pongs = 0
        """How many signs of life have come."""
        self._settings, self._served = settings, served
        self._process: asyncio.subprocess.Process | None = None
        self._link: Link | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._kill_timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process that lives now."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the first process, and return once it listens. Raises ConfigError if it cannot."""
        listening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeping = asyncio.create_task(self._keep(listening), name=f"penstock-front-{self._number}")
        await asyncio.wait({self._keeping, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            await self._keeping  # raises what ended it
            raise ConfigError("a front process was stopped before it listened")
        listening.result()

    async def ended(self) -> None:
        """Wait until no further process is started and the last one has ended. Raises FrontsLost."""
        if self._keeping is not None:
            await asyncio.shield(self._keeping)

    def stop(self, grace_s: float) -> None:
        """Have the process take no further calls, and end once its calls have, or when the grace is over. May
        be called again with a shorter grace.
        """
        self._stopping.set()
        if self._link is not None:
            self._link.send(Kind.STOP, 0, pack_seconds(grace_s))
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        if self._process is not None:
            loop = asyncio.get_running_loop()
            self._kill_timer = loop.call_later(grace_s + KILL_AFTER_S, self.kill)

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _keep(self, first: asyncio.Future[None]) -> None:
        """Keep a process alive until `stop`. `first` is done when the first one listens or cannot."""
        failures = 0
        while not self._stopping.is_set():
            began_s = time.monotonic()
            how = await self._live(first)
            if self._stopping.is_set():
                return
            if not first.done():
                first.set_exception(ConfigError(f"a front process {how}"))
                return
            failures = failures + 1 if time.monotonic() - began_s < LONG_LIFE_S else 0
            log.error("front process %d %s; its calls are cancelled, another starts", self._number, how)
            if failures >= MOST_FAILURES:
                raise FrontsLost(f"front process {self._number} {how}, for the {failures}th time in a row")
            if failures:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), FIRST_PAUSE_S * 2 ** (failures - 1))

    async def _live(self, first: asyncio.Future[None]) -> str:
        """Run one process to its end, and say how it ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            # The process inherits this, so that it also ignores them until it has begun to.
            were_blocked = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_FRONTS)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", PROGRAM, str(theirs.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            except OSError as error:
                ours.close()
                return f"could not be started: {error.strerror}"
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_FRONTS - were_blocked)
        self._process = process
        try:
            refusal = await self._serve(ours, first)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _LAST_MOMENT_S)
        finally:
            self.kill()
            code = await process.wait()
            self._process = None
            if self._kill_timer is not None:
                self._kill_timer.cancel()
        return refusal or f"ended with the code {code}"

    async def _serve(self, connection: socket.socket, first: asyncio.Future[None]) -> str:
        """Run the calls of one process until its link is closed. Returns why it cannot listen, if so."""
        lost, listens = asyncio.Event(), asyncio.Event()
        refusals: list[str] = []

        def receive(kind: int, number: int, payload: bytes) -> None:
            if number:
                calls.receive(kind, number, payload)
            elif kind == Kind.LOG:
                self._log(Line.of(payload))
            elif kind == Kind.REFUSED:
                refusals.append(f"cannot listen: {payload.decode()}")
                link.close()
            elif kind == Kind.PONG:
                self._pongs += 1
            elif kind == Kind.LISTENING:
                listens.set()
                if not first.done():
                    first.set_result(None)

        link = Link(receive, lost.set)
        calls = LinkCalls(self._served, link)
        await asyncio.get_running_loop().create_connection(lambda: link, sock=connection)
        self._link = link
        link.send(Kind.START, 0, self._settings.packed())
        watching = asyncio.create_task(self._watch(link, listens))
        try:
            if self._stopping.is_set():
                return ""
            await lost.wait()
        finally:
            watching.cancel()
            self._link = None
            link.close()
            calls.lose()
        return "".join(refusals)

    async def _watch(self, link: Link, listens: asyncio.Event) -> None:
        """Kill the process if it does nothing for too long, so that another one takes its place."""
        await listens.wait()  # until then it loads its program, which may take any time
        while self._hang_limit_s:
            pongs = self._pongs
            link.send(Kind.PING)
            for _ in range(_LOOKS):  # not one long wait: a suspended machine wakes both processes at once
                await asyncio.sleep(self._hang_limit_s / _LOOKS)
                if self._pongs != pongs:
                    break
            else:
                log.error("front process %d has done nothing for %g s", self._number, self._hang_limit_s)
                self.kill()
                return
            await asyncio.sleep(self._hang_limit_s / _LOOKS)

    def _log(self, line: Line) -> None:
        logging.getLogger(line.logger).log(line.level, "front process %d: %s", self._number, line.text)


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
        """Take the `settings` of each process, but for the methods. `refuse` ends calls of methods without a
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
