"""A program in a process of its own that answers questions, one after the other. Questions and answers are
JSON objects, one a line.

Both ends are here: `Child` is used by who asks, `own_output` and `answer` by the program that is asked.
Between two questions the program waits for a line, which costs nothing. Needs only the standard library,
because the program may run in another environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

_STOP_S = 60.0


class Child:
    """A process that answers. It ends with this object or with this process."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, stop_s: float = _STOP_S
    ) -> None:
        """Start `command`. When this object is closed, the process has `stop_s` seconds to end."""
        self._command = " ".join(command)
        self._stop_s = stop_s
        # The child has a session of its own, so that an interrupt from the keyboard goes to the parent, which
        # then ends the child.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(environment),
            start_new_session=True,
        )

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a question. Raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process is gone, and reading reports its exit code
            print(json.dumps(question), file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Return the next answer, such as the one that a program gives unasked when it is ready. Raises
        RuntimeError if the process has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._command} ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End the process: it reads the end of its questions, and is killed if it has not ended in time."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process is gone
            self._process.stdin.close()
        try:
            self._process.wait(self._stop_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def own_output() -> TextIO:
    """Keep standard output for the answers: everything else that is printed goes to standard error from now
    on.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def answer(value: Mapping[str, Any], answers: TextIO) -> None:
    print(json.dumps(value), file=answers, flush=True)
