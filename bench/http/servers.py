"""Starts a server and an OpenAI front before it, each in a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.load.process import cpu
from penstock.client import Client

_SERVER_READY = "penstock: ready on "
_FRONT_READY = "penstock: openai on "
_STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Rig:
    """A server and its front."""

    address: str
    """Of the server."""
    host: str
    port: int
    """Of the front."""
    model: str
    """The name that requests use."""
    server: int
    front: int
    """Ids of the processes."""

    def cpu(self) -> tuple[float, float]:
        """Return the processor time of the server, without what computes the model, and of the front, in
        seconds.
        """
        return cpu(self.server).host, _all(self.front)


def _all(pid: int) -> float:
    """Add up the processor time of a process and of its children (a front's workers)."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return cpu(pid).host + sum(_all(child) for child in children)


@contextlib.contextmanager
def running(model: str, log: Path, serve: Sequence[str] = (), front: Sequence[str] = ()) -> Iterator[Rig]:
    """Run a server of this model with more flags for `penstock serve`, and a front with more for `penstock
    openai`. Raises RuntimeError if one does not come up.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as errors, contextlib.ExitStack() as stack:

        def start(*arguments: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-m", "penstock.cli", *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            stack.callback(process.wait, _STOP_S)
            stack.callback(process.terminate)
            return process

        server = start("serve", model, "--port", "0", *serve)
        address = _told(server, _SERVER_READY)
        client = start("openai", "--addr", address, "--port", "0", *front)
        host, _, port = _told(client, _FRONT_READY).removeprefix("http://").rstrip("/").rpartition(":")
        with Client(address) as calls:
            name = calls.model_info().model
        yield Rig(address, host, int(port), name, server.pid, client.pid)


def _told(process: subprocess.Popen[str], before: str) -> str:
    """Return what a process prints on stdout after these words."""
    assert process.stdout is not None
    line = next((line for line in process.stdout if before in line), None)
    if line is None:
        raise RuntimeError(f"a process ended with {process.wait()}; see the log")
    return line.partition(before)[2].strip()
