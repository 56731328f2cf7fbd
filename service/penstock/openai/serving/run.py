"""Serves the front until it is told to stop, in this process or in several workers that share its listening
socket: it starts them, replaces those that die, and ends them. Each worker keeps its metrics in files that
all can read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Final

from prometheus_client import multiprocess

from penstock.client.connection.address import is_loopback
from penstock.openai.batches.runner import opened_folder
from penstock.openai.counts import FOLDER_VARIABLE
from penstock.openai.serving.logs import open_logs
from penstock.openai.serving.tls import certificate_of
from penstock.openai.serving.worker import CLOSE_S, READY, run_worker
from penstock.openai.settings import Settings, SettingsError
from penstock.openai.store import ResponseStore

log = logging.getLogger("penstock.openai")

_PROGRAM: Final = "penstock.openai.serving.worker"
_SHORT_LIFE_S: Final = 5.0
"""A worker that lived for less than this is replaced after a pause, which gets longer each time."""
_MOST_PAUSE_S: Final = 30.0
_KILL_S: Final = CLOSE_S + 5.0
"""How long a worker may take after its grace until it is killed."""


def run_workers(settings: Settings, listening: socket.socket, on_ready: Callable[[], None]) -> int:
    """Serve until SIGTERM or SIGINT. Returns 0 after a graceful end, and 1 if a worker could not start."""
    with tempfile.TemporaryDirectory(prefix="penstock-openai-") as folder:
        return asyncio.run(_Workers(settings, listening, folder).run(on_ready))


class _Workers:
    def __init__(self, settings: Settings, listening: socket.socket, folder: str) -> None:
        self._settings = settings
        self._listening = listening
        self._folder = folder
        self._told_to_stop = asyncio.Event()
        self._running: set[asyncio.subprocess.Process] = set()

    async def run(self, on_ready: Callable[[], None]) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        stopping = asyncio.create_task(self._told_to_stop.wait())
        starting = asyncio.gather(*(self._start() for _ in range(self._settings.workers)))
        await asyncio.wait((stopping, starting), return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and not all(starting.result()):
            self._on_signal()
            await self._ended()
            return 1
        watching = []
        if starting.done():
            on_ready()
            watching = [asyncio.create_task(self._watch(process)) for process in list(self._running)]
        await stopping
        await self._ended()
        await asyncio.gather(starting, *watching)
        return 0

    async def _start(self) -> asyncio.subprocess.Process | None:
        """Start a worker, and wait until it serves. None if it ended before that."""
        ready, pipe = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                _PROGRAM,
                str(self._listening.fileno()),
                str(pipe),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(self._listening.fileno(), pipe),
                env={**os.environ, FOLDER_VARIABLE: self._folder},
            )
        finally:
            os.close(pipe)
        self._running.add(process)
        assert process.stdin is not None, "it is a pipe"
        process.stdin.write(pickle.dumps(self._settings))
        if self._told_to_stop.is_set():  # while the process was being made
            process.terminate()
        if await asyncio.to_thread(_read_all, ready) != READY:
            await self._reap(process)
            return None
        return process

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Replace a worker whenever it dies, until the front is told to stop."""
        current: asyncio.subprocess.Process | None = process
        began, pause_s = time.monotonic(), 0.0
        while True:
            if current is not None:
                await self._reap(current)
            if self._told_to_stop.is_set():
                return
            log.error("a worker ended by itself and is replaced; its requests have failed")
            lived_s = time.monotonic() - began
            pause_s = 0.0 if lived_s > _SHORT_LIFE_S else min(_MOST_PAUSE_S, 2 * pause_s + 1.0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told_to_stop.wait(), pause_s)
                return
            began = time.monotonic()
            current = await self._start()

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        if process in self._running:
            self._running.discard(process)
            multiprocess.mark_process_dead(process.pid, self._folder)  # type: ignore[no-untyped-call]  # no hints

    def _on_signal(self) -> None:
        """Ask all workers to stop. A second signal reaches them as such, and ends them at once."""
        self._told_to_stop.set()
        for process in self._running:
            if process.returncode is None:
                process.terminate()

    async def _ended(self) -> None:
        """Wait until all workers have ended; those that take too long are killed."""
        give_up_at = time.monotonic() + self._settings.grace_s + _KILL_S
        while running := [process for process in self._running if process.returncode is None]:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                log.error("%d workers did not end in time, and are killed", len(running))
                for process in running:
                    process.kill()
            waiting = [asyncio.ensure_future(process.wait()) for process in running]
            await asyncio.wait(waiting, timeout=left_s if left_s > 0 else None)


def _read_all(descriptor: int) -> bytes:
    """Read until the other end is closed, and close this one."""
    with open(descriptor, "rb") as file:
        return file.read()


_BACKLOG: Final = 2048


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT, and print the address on stdout once the port is open. Returns the exit
    code. Raises ValueError for settings that cannot be honoured.
    """
    certificate_of(settings)  # so that wrong files are told here, and not by each worker
    if (store := ResponseStore.of(settings)) is not None:
        store.close()
    folder = opened_folder(settings)
    if folder is not None:
        folder.close()
    listening = _listening(settings)
    open_logs(settings.log_format)

    def tell() -> None:
        # One write: a line of the log could come between the address and its newline otherwise.
        sys.stdout.write(f"penstock: openai on {_url(settings, listening)}\n")
        sys.stdout.flush()

    log.info("calling %s for %d worker%s", settings.addr, settings.workers, "s" * (settings.workers > 1))
    for warning in _warnings(settings):
        log.warning("listening on %s: %s", settings.host, warning)
    with listening:
        if settings.workers > 1:
            return run_workers(settings, listening, tell)
        run_worker(settings, listening, tell)
    return 0


def _listening(settings: Settings) -> socket.socket:
    """Open the port. Raises SettingsError if that is not possible."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        why = error.strerror or str(error)
        raise SettingsError(f"port: cannot listen on {settings.host}:{settings.port}: {why}") from error
    made.setblocking(False)
    return made


def _url(settings: Settings, listening: socket.socket) -> str:
    scheme = "http" if settings.tls_cert is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{listening.getsockname()[1]}"


def _warnings(settings: Settings) -> list[str]:
    """Say what the operator has allowed with `insecure`."""
    if is_loopback(settings.host):
        return []
    found = []
    if settings.tls_cert is None:
        found.append("keys of callers cross the network in plaintext")
    if settings.token is not None:
        found.append("whoever reaches that may use the model: requests without a key get that of --token")
    return found
