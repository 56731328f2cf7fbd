"""Keeps the OpenAI front of `penstock serve --openai-port`: a process beside the server, and another one
whenever it dies.

The server's process holds the port, so that another program's use of it is told before the model is loaded,
and so that callers who connect while one front follows another wait for a second and are not refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import pickle
import signal
import sys
import time

from penstock.openai.settings import Settings
from penstock.service.listening.listen_options import tcp_address
from penstock.service.listening.listeners import bound_socket

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
        except Exception:
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
