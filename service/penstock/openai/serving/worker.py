"""One worker: it serves the listening socket until it is told to stop.

As a program it is one of several workers. It gets the socket and a pipe by the numbers of their descriptors,
and its settings on stdin; it says on the pipe that it serves, and ends when stdin does, because its parent is
gone then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Final

import uvloop

from penstock.openai.front import Front
from penstock.openai.serving.logs import open_logs
from penstock.openai.serving.server import HttpServer
from penstock.openai.serving.tls import certificate_of
from penstock.openai.settings import Settings

log = logging.getLogger("penstock.openai")

READY: Final = b"ready\n"
_FILES_FOR_OTHERS: Final = 128


def run_worker(
    settings: Settings, listening: socket.socket, on_ready: Callable[[], None], parent: int | None = None
) -> None:
    """Serve until SIGTERM or SIGINT. Raises ValueError for settings that cannot be honoured. With a `parent`,
    which is a descriptor that ends with it, SIGINT is left to the parent, whose end counts as a signal.
    """
    _raise_limit(settings.max_connections + _FILES_FOR_OTHERS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, listening, on_ready, parent))


async def _serve(
    settings: Settings, listening: socket.socket, on_ready: Callable[[], None], parent: int | None
) -> None:
    told_to_stop = asyncio.Event()
    _on_signals(told_to_stop)
    if parent is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which sends it to the parent, too
        _on_end(parent, told_to_stop)
    certificate = certificate_of(settings)
    front = Front.made(settings)
    server = HttpServer(front)
    try:
        await server.start(listening, certificate)
        on_ready()
        await told_to_stop.wait()
        log.info("stopping: no new requests; running ones have %g s", settings.grace_s)
        await server.stop(settings.grace_s)
    finally:
        await front.backend.close()


def _on_signals(told_to_stop: asyncio.Event) -> None:
    """Let the first SIGTERM or SIGINT ask to stop, and the second end the process."""

    def stop(number: int) -> None:
        if told_to_stop.is_set():
            log.warning("second signal: ending at once")
            logging.shutdown()
            os._exit(128 + number)
        told_to_stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)


def _on_end(parent: int, told_to_stop: asyncio.Event) -> None:
    """Let the end of the parent ask to stop."""
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(parent)
        told_to_stop.set()

    loop.add_reader(parent, ended)


def _raise_limit(wanted: int) -> None:
    """Raise the limit on open files to what the connections may need, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def main() -> None:
    """Run as one of several workers; the arguments are the numbers of the socket's and the pipe's
    descriptors.
    """
    settings: Settings = pickle.load(sys.stdin.buffer)
    listening, pipe = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    open_logs(settings.log_format)

    def tell() -> None:
        os.write(pipe, READY)
        os.close(pipe)

    run_worker(settings, listening, tell, parent=sys.stdin.fileno())


if __name__ == "__main__":
    main()
