"""Settles and keeps the OpenAI front of `penstock serve --openai-port`: a process beside the server, and
another one whenever it dies.

The server's process holds the port, so that another program's use of it is told before the model is loaded,
and so that callers who connect while one front follows another wait for a second and are not refused.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import math
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.runtime.errors import ConfigError
from penstock.service.limits.bounds import MANY
from penstock.service.listening.listen_options import host_problems, tcp_address, unix_address
from penstock.service.listening.listeners import bound_socket
from penstock.service.options import ServerOptions

if TYPE_CHECKING:
    from penstock.openai.settings import Settings

log = logging.getLogger("penstock.serve")

PROGRAM = "penstock.openai.serving.worker"
READY = b"ready\n"
"""What it says once it takes calls. Its module is not imported here, because that takes long."""
NOT_FOR_THE_FRONT = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Signals that are meant for the server. A terminal and a service manager send them to all its processes; the
front ends when the server tells it to.
"""
LONG_LIFE_S = 10.0
"""A front that dies sooner than this has failed to live."""
MOST_FAILURES = 6
"""So many failures to live in a row mean that the front cannot live here."""
FIRST_PAUSE_S = 0.1
"""The pause after the first such failure, in seconds; it doubles with each."""
_BACKLOG = 2048
"""Connections that wait while there is no front."""
KILL_AFTER_S = 6.0
"""A front that has not ended so long after its grace is killed."""
_FOLDER, _SOCKET = "penstock-front-", "grpc"
"""What the names of these folders begin with, and the name of the socket within."""
_LAST_REPLIES_S = 1.0
"""Seconds after the server's grace that callers may take for what is left of their answers."""


class OpenAIFront:
    """One OpenAI front after the other, of which one lives at a time. Used on its event loop only."""

    def __init__(self, settings: Settings, program: str = PROGRAM) -> None:
        """Take the port. `program` is the module of the front. Raises ConfigError."""
        self._settings, self._program = settings, program
        self._listener = bound_socket(
            settings.host, settings.port, tcp_address(settings.host, settings.port), "--openai-port"
        )
        self._listener.listen(_BACKLOG)
        scheme, port = "http" if settings.tls_cert is None else "https", self._listener.getsockname()[1]
        self.url = f"{scheme}://{tcp_address(settings.host, port)}"
        """Where callers find it."""
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._listens, self._stopping, self._failed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._stopped_s = math.inf

    @property
    def pid(self) -> int | None:
        """The id of the process that lives now."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Begin to keep a front alive."""
        self._keeping = asyncio.create_task(self._keep(), name="penstock-openai-front")

    async def listening(self) -> None:
        """Wait until a front takes calls."""
        await self._listens.wait()

    async def wait_for_failure(self) -> None:
        """Wait until no front can live. The log says why."""
        await self._failed.wait()

    def stop(self) -> None:
        """Have the front take no further calls, and end once those that run have ended, or when the grace is
        over. May be called again.
        """
        if not self._stopping.is_set():
            self._stopping.set()
            self._stopped_s = time.monotonic()
            self._tell_to_stop()

    async def close(self) -> None:
        """Wait until the front has ended after `stop`, and give the port back. May be called again."""
        self.stop()
        if self._keeping is not None:
            left_s = self._stopped_s + self._settings.grace_s + KILL_AFTER_S - time.monotonic()
            await asyncio.wait((self._keeping,), timeout=max(left_s, 0.0))
            self._kill()
            await self._keeping
        self._listener.close()

    async def _keep(self) -> None:
        """Keep a front alive until `stop`."""
        try:
            await self._restart()
        except Exception:  # whatever it is, the server must hear of it and end
            log.exception("no OpenAI front can be kept alive, so the server ends")
        if not self._stopping.is_set():
            self._failed.set()

    async def _restart(self) -> None:
        """Start one front after the other until `stop`, or until it is clear that none can live."""
        failures = 0
        while not self._stopping.is_set():
            began_s = time.monotonic()
            how = await self._live()
            if self._stopping.is_set():
                return
            if not self._listens.is_set():
                log.error("the OpenAI front %s before it took calls, so the server ends", how)
                return
            failures = failures + 1 if time.monotonic() - began_s < LONG_LIFE_S else 0
            if failures >= MOST_FAILURES:
                log.error("the OpenAI front %s, %d times in a row, so the server ends", how, failures)
                return
            log.error("the OpenAI front %s; its calls are lost, another starts", how)
            if failures:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), FIRST_PAUSE_S * 2 ** (failures - 1))

    async def _live(self) -> str:
        """Run one front to its end, and say how it ended."""
        ready, said = os.pipe()
        # The process inherits this. It never lets these signals through.
        were_blocked = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_THE_FRONT)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", self._program, str(self._listener.fileno()), str(said)),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=[self._listener.fileno(), said],
            )
        except OSError as error:
            os.close(ready)
            return f"could not be started: {error.strerror}"
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_THE_FRONT - were_blocked)
            os.close(said)
        self._process = process
        assert process.stdin is not None
        try:
            process.stdin.write(pickle.dumps(self._settings))
            if self._stopping.is_set():  # meanwhile
                self._tell_to_stop()
            if await asyncio.to_thread(_read_all, ready) == READY:
                self._listens.set()
            code = await process.wait()
        finally:
            self._kill()
            await process.wait()
            self._process = None
        return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"

    def _tell_to_stop(self) -> None:
        """Close the front's stdin, which is also what happens when the server dies."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


def _read_all(descriptor: int) -> bytes:
    """Read until the other end is closed, and close this one."""
    with open(descriptor, "rb") as file:
        return file.read()


def front_settings(args: argparse.Namespace, options: ServerOptions) -> Settings | None:
    """Say what the OpenAI front of a server with these options is told; None if there is to be none. Raises
    ConfigError.
    """
    host, wanted, listen = args.openai_host, args.openai_port, options.listen
    if wanted is None:
        for name in ("openai_host", "openai_store"):
            if getattr(args, name) is not None:
                raise ConfigError(f"{name}: needs an openai_port")
        if args.openai_adapter_updates:
            raise ConfigError("openai_adapter_updates: needs an openai_port")
        return None
    if not 0 <= wanted <= 65535:
        raise ConfigError(f"openai_port: must be from 0 to 65535, not {wanted}")
    if host is not None and (bad := host_problems("openai_host", host)):
        raise ConfigError("; ".join(bad))
    host = host or options.host
    problem = listen.exposure_problem((host,), keys=options.keys is not None)
    if problem is not None:
        raise ConfigError(f"openai_{problem}")
    from penstock.openai.settings import Settings  # noqa: PLC0415  # it imports the whole client

    # JSON takes more bytes than the message that is made of it.
    defaults = Settings()
    most_bytes = max(2 * options.max_receive_bytes, defaults.max_body_bytes)
    assert listen.unix_socket is not None, "socket_for_the_front has seen to it"
    return Settings(
        addr=unix_address(listen.unix_socket),
        insecure=True,  # what the server thinks of its own exposure is checked above
        host=host,
        port=wanted,
        tls_cert=listen.tls_cert,
        tls_key=listen.tls_key,
        client_ca=listen.client_ca,
        max_connections=options.bounds.max_connections or MANY,
        max_body_bytes=most_bytes,
        max_waiting_body_bytes=max(defaults.max_waiting_body_bytes, 4 * most_bytes),
        stall_limit_s=options.stall_limit_s,
        grace_s=options.grace_s + _LAST_REPLIES_S,
        store=args.openai_store,
        adapter_updates=args.openai_adapter_updates,
        log_format=args.log_format,
        access_log=options.access_log,
    )


@contextlib.contextmanager
def socket_for_the_front(args: argparse.Namespace) -> Iterator[bool]:
    """Have the server listen on a Unix socket, through which the OpenAI front calls it. Gives whether it is a
    private one that is made up here, because the command line has none.

    Such a socket speaks no TLS, and no bound of one address or connection counts for it, so the front needs
    no certificates and its callers have all the room that there is.
    """
    if args.openai_port is None or args.unix_socket is not None:
        yield False
        return
    _remove_left_sockets()
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:  # which only this user may enter
        args.unix_socket = Path(folder) / _SOCKET
        yield True


def _remove_left_sockets() -> None:
    """Remove such folders of servers that were killed, and so could not remove their own. Those of other
    users cannot be entered.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*/{_SOCKET}"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
                path.parent.rmdir()
