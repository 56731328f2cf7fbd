"""Renders callers' chat templates in a process of their own.

Jinja's sandbox keeps a template from Python's internals, but not from looping or allocating. Each of these
would stop the whole server: nested loops of the 100,000 rounds that it allows; `9 ** (9 ** 9)`, which is
computed while the template compiles, in C, holding the interpreter's lock; and a string doubled forty times.
A process can be killed, and the kernel bounds its processor time and memory. Should a template ever break out
of jinja's sandbox, that process has no files and no network (`confined`).

The first template that needs the process starts it (half a second, for the imports), and it stays. It renders
one template after the other, each in a fork of itself (`template_worker`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

from penstock.runtime.machine.children import Child

WORKER = "penstock.runtime.chat.template_worker"
START_LIMIT_S = 60.0
"""Seconds for the imports, on a busy machine."""
CPU_LIMIT_S = 1.0
"""Seconds of processor time for one template. Models' own templates take a few milliseconds for a long
conversation."""
_WAIT_FACTOR = 10.0
"""If a template does not get its processor time within this many times as long, the machine is far too busy.
"""
_WAIT_LEAST_S = 10.0


class TemplateFailed(Exception):
    """A template was refused. The message says why, as the rest of a sentence that begins with "the chat
    template".
    """


class TemplateSandbox:
    """Renders templates that cannot be trusted. Thread-safe; callers wait for one another."""

    def __init__(self, *, cpu_limit_s: float = CPU_LIMIT_S, max_chars: int = 4 * 1024 * 1024) -> None:
        """`cpu_limit_s`: processor time for each template; `max_chars`: longest output."""
        self._cpu_limit_s = cpu_limit_s
        self._max_chars = max_chars
        self._lock = threading.Lock()
        self._worker: Worker | None = None

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text of `rendering.render_messages(**variables)`; `variables` are JSON values.

        Raises TemplateFailed if the template raises, or exceeds a limit.
        """
        message = json.dumps(
            {"variables": variables, "max_chars": self._max_chars, "cpu_limit_s": self._cpu_limit_s}
        ).encode()
        with self._lock:
            if self._worker is None or not self._worker.alive:
                self._worker = Worker()
            reply = self._worker.ask(message, max(_WAIT_FACTOR * self._cpu_limit_s, _WAIT_LEAST_S))
            if reply is None:
                self._worker.close()
                self._worker = None
                raise TemplateFailed("was not rendered in time by a busy machine, and was stopped")
        if "error" in reply:
            raise TemplateFailed(reply["error"])
        return reply["text"]

    @property
    def worker_pid(self) -> int | None:
        """The process that renders; None if none runs."""
        worker = self._worker
        return worker.pid if worker is not None and worker.alive else None

    def close(self) -> None:
        """End the process, if one runs; the next template starts another."""
        with self._lock:
            if self._worker is not None:
                self._worker.close()
                self._worker = None


class Worker:
    """One process that is ready to render."""

    def __init__(self) -> None:
        self._child = Child(WORKER)
        if self._receive(START_LIMIT_S) is None:
            self.close()
            raise RuntimeError(f"the process for chat templates does not start: {WORKER}")

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs. The kernel may have ended it for lack of memory."""
        return self._child.alive

    def close(self) -> None:
        """Kill the process, and wait for its end."""
        self._child.close()

    def ask(self, message: bytes, limit_s: float) -> dict[str, str] | None:
        """Return the process's answer; None if none came in time, or if the process died."""
        try:
            self._child.connection.send_bytes(message)
        except OSError:
            return None
        return self._receive(limit_s)

    def _receive(self, limit_s: float) -> dict[str, str] | None:
        connection = self._child.connection
        try:
            if not connection.poll(limit_s):
                return None
            reply: dict[str, str] = json.loads(connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            return None
        return reply
