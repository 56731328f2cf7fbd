"""Has the trace of a profile improved in another process: that takes seconds of Python, which would hold up
the engine's thread and the event loop.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from penstock.runtime.errors import ProfileFailed
from penstock.runtime.machine.children import Child

_PROCESS = "penstock.runtime.profiling.trace_process"
_LIMIT_S = 300.0
_LOOK_S = 0.1


def improve_trace(folder: Path, given_up: threading.Event, limit_s: float = _LIMIT_S) -> None:
    """See `perfetto.improve`. Blocks until it is done, or `given_up` is set. ProfileFailed."""
    try:
        child = Child(_PROCESS)
    except OSError as error:
        raise ProfileFailed(f"the process that writes the trace could not be started: {error}") from error
    try:
        child.connection.send_bytes(str(folder.absolute()).encode())
        ends_s = time.monotonic() + limit_s
        while not child.connection.poll(_LOOK_S):
            if given_up.is_set():
                raise ProfileFailed("the engine was shut down before the trace was written")
            if time.monotonic() > ends_s:
                raise ProfileFailed(f"writing the trace took longer than {limit_s:g} s")
        problem = child.connection.recv_bytes().decode()
    except (EOFError, OSError) as error:
        raise ProfileFailed("the process that writes the trace has ended") from error
    finally:
        child.close()
    if problem:
        raise ProfileFailed(f"the trace could not be written: {problem}")
