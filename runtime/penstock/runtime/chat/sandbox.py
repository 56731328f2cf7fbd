"""Callers' chat templates are rendered in a process of their own.

Jinja's sandbox keeps a template from Python's internals, but not from looping or from allocating: nested
loops of the 100,000 rounds that it grants, `9 ** (9 ** 9)` (worked out while the template compiles, in C,
holding the interpreter's lock) and a string doubled forty times would each stop the whole server. A process
can be killed, and its memory is bounded by the kernel. It is started by the first template that needs it (a
second, for the imports), stays, renders one after the other, and is replaced after one that had to be killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("sandbox_worker.py")
START_LIMIT_S = 60.0
"""For the imports, on a busy machine."""


class TemplateFailed(Exception):
    """A template was refused; the message says why, going on from "the chat template"."""


class TemplateSandbox:
    """Renders templates nobody vouches for. Thread-safe; callers wait for one another."""

    def __init__(self, *, time_limit_s: float = 5.0, max_chars: int = 4 * 1024 * 1024) -> None:
        """`time_limit_s` of wall-clock time per template; `max_chars` of output."""
        self._time_limit_s = time_limit_s
        self._max_chars = max_chars
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def render(self, variables: Mapping[str, Any]) -> str:
        """Text of transformers' `render_jinja_template(**variables)`; `variables` are JSON values.

        Raises TemplateFailed where the template raises, or exceeds a limit.
        """
        message = json.dumps({"variables": variables, "max_chars": self._max_chars}).encode()
        with self._lock:
            if self._worker is None or not self._worker.alive:
                self._worker = _Worker()
            reply = self._worker.ask(message, self._time_limit_s)
            if reply is None:
                self._worker.stop()
                self._worker = None
                raise TemplateFailed(
                    f"took longer than {self._time_limit_s:g} s or too much memory, and was stopped"
                )
        if "error" in reply:
            raise TemplateFailed(reply["error"])
        return reply["text"]

    def close(self) -> None:
        """End the process, if one runs; the next template starts another."""
        with self._lock:
            if self._worker is not None:
                self._worker.stop()
                self._worker = None


class _Worker:
    """One process, ready to render."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                # Isolated, and without the server's environment: that may hold secrets.
                [sys.executable, "-I", "-X", "utf8", str(WORKER), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"HF_HUB_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1"} | _linking(),
            )
        self.stop = weakref.finalize(self, _stop, self._process, self._pipe)
        """Kill the process; also called when the owner is dropped, and at exit."""
        if self._receive(START_LIMIT_S) is None:
            self.stop()
            raise RuntimeError(f"the process for chat templates does not start: {WORKER}")

    @property
    def alive(self) -> bool:
        """False where something else ended it, such as the kernel for want of memory."""
        return self._process.poll() is None

    def ask(self, message: bytes, limit_s: float) -> dict[str, str] | None:
        """The answer; None if none came in time or the process died."""
        try:
            self._pipe.send_bytes(message)
        except OSError:
            return None
        return self._receive(limit_s)

    def _receive(self, limit_s: float) -> dict[str, str] | None:
        try:
            if not self._pipe.poll(limit_s):
                return None
            reply: dict[str, str] = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            return None
        return reply


def _linking() -> dict[str, str]:
    """What the dynamic linker may need to load numpy."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}


def _stop(process: subprocess.Popen[bytes], pipe: Connection) -> None:
    process.kill()
    process.wait()
    pipe.close()
