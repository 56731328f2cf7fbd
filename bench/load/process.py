"""What a server's process takes: processor time, by the kind of thread, and memory. Linux only."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_FRONT = "penstock.service.relay.process"
"""Is in the command line of a front process."""
_MODEL_THREADS = "tf_XLA"
"""How the names begin of the threads that compute the model on a CPU."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """Processor time in seconds."""

    loop: float = 0.0
    """Of the main thread, which runs the event loop."""
    model: float = 0.0
    """Of the threads that compute the model."""
    other: float = 0.0
    """Of all other threads: the engine's own, gRPC's, the journal's."""
    fronts: float = 0.0
    """Of the server's front processes, if it has any."""

    @property
    def host(self) -> float:
        """All but the model's."""
        return self.loop + self.other

    def __sub__(self, before: Cpu) -> Cpu:
        return Cpu(
            self.loop - before.loop,
            self.model - before.model,
            self.other - before.other,
            self.fronts - before.fronts,
        )


def cpu(pid: int) -> Cpu:
    """Read the processor time of a process so far. Threads that have ended do not count; a server's stay."""
    loop = model = other = 0.0
    fronts = sum(cpu(front).host for front in _fronts(pid))
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name = (task / "comm").read_text()
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:  # it has just ended
            continue
        if task.name == str(pid):
            loop += seconds
        elif name.startswith(_MODEL_THREADS):
            model += seconds
        else:
            other += seconds
    return Cpu(loop, model, other, fronts)


def _fronts(pid: int) -> list[int]:
    """List the ids of a server's front processes."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            children += map(int, (task / "children").read_text().split())
    return [child for child in children if _FRONT in Path(f"/proc/{child}/cmdline").read_text()]


def memory(pid: int) -> int:
    """Read the resident memory of a process in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
