"""What runs in a process of `trace_writing`: it improves the trace of one folder and ends.

    python -m penstock.runtime.profiling.trace_process CONNECTION LIFELINE

The arguments are file descriptors, see `penstock.runtime.machine.children`.
"""

from __future__ import annotations

from pathlib import Path

from penstock.runtime.machine import confined
from penstock.runtime.machine.background import lower_priority
from penstock.runtime.profiling.operations import MalformedTrace
from penstock.runtime.profiling.perfetto import improve

_MEMORY_BYTES = 4 << 30
"""A trace has at most a million events, which are handled one after the other."""


def main() -> None:
    """Answer the name of a folder with what went wrong there; empty if nothing."""
    connection = confined.connect()
    lower_priority()
    confined.limit_memory(_MEMORY_BYTES)
    folder = Path(connection.recv_bytes().decode())
    problem = ""
    try:
        improve(folder)
    except (MalformedTrace, OSError, MemoryError) as error:
        problem = f"{type(error).__name__}: {error}"
    connection.send_bytes(problem.encode())


if __name__ == "__main__":
    main()
