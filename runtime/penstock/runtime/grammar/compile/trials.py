"""Tries grammars in a process of their own, before they are compiled in this one.

llguidance's own limits do not bound what a hostile grammar costs: 4 KB of regular expressions take minutes
and gigabytes, and some inputs end the process. A thread cannot be stopped, but a process can: it has a memory
limit, and is killed if it takes too long. Its result cannot be handed over, but compiling is deterministic,
so what succeeded there succeeds here.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Any

from penstock.runtime.errors import UnavailableError
from penstock.runtime.grammar.vocabulary import Vocabulary
from penstock.runtime.machine.children import Child
from penstock.runtime.requests.grammar import Grammar
from penstock.runtime.schemas.narrowing import GrammarError

_START_LIMIT_S = 60.0
"""Seconds in which a process imports its modules and indexes the vocabulary, which takes about two."""

_MOST_ANSWER_BYTES = 64 * 1024 * 1024
"""llguidance's text of a grammar is a few times as long as the source, which has a limit."""


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """What one trial may take."""

    time_limit_s: float
    memory_bytes: int
    """Address space besides what the process has when it starts."""
    max_lexer_states: int


class Sandbox:
    """Tries grammars in at most `max_processes` processes. Safe to use from many threads.

    Processes start when they are first needed, and end with `close`, or when this object is dropped.
    """

    def __init__(self, vocabulary: Vocabulary, limits: TrialLimits, max_processes: int) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._slots = threading.BoundedSemaphore(max_processes)
        self._idle: list[_Trial] = []

    def check(self, grammar: Grammar) -> str:
        """Return the grammar as llguidance takes it, if it compiles within the limits.

        Raises GrammarError if it does not; UnavailableError if all processes stay busy for the time limit, or
        if none can be started.
        """
        if not self._slots.acquire(timeout=self._limits.time_limit_s):
            raise UnavailableError("every process that compiles grammars is busy; try again later")
        try:
            trial = self._take()
            try:
                return trial.run(grammar)
            finally:
                if trial.alive:
                    self._idle.append(trial)
        finally:
            self._slots.release()

    def close(self) -> None:
        """End the idle processes; later calls start new ones."""
        while self._idle:
            self._idle.pop().kill()

    def _take(self) -> _Trial:
        while True:
            try:
                trial = self._idle.pop()
            except IndexError:
                return _Trial(self._vocabulary, self._limits)
            if trial.alive:
                return trial
            trial.kill()


class _Trial:
    """One process; `trial_process` is what runs in it."""

    def __init__(self, vocabulary: Vocabulary, limits: TrialLimits) -> None:
        self._limits = limits
        try:
            self._child = Child("penstock.runtime.grammar.compile.trial_process")
        except OSError as error:
            raise UnavailableError(f"no process to compile grammars in: {error}") from error
        self._connection = self._child.connection
        try:
            self._connection.send((vocabulary, limits))
            ready = self._connection.poll(_START_LIMIT_S) and self._receive()
        except (EOFError, OSError, ValueError):
            ready = False
        if not ready:
            self.kill()
            raise UnavailableError("the process to compile grammars in did not start")

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child.alive

    def kill(self) -> None:
        """End the process, if it runs."""
        self._child.close()

    def run(self, grammar: Grammar) -> str:
        """See `Sandbox.check`. If the trial ended the process, it is no longer `alive`."""
        limit_s = self._limits.time_limit_s
        try:
            self._connection.send(grammar)
            answered = self._connection.poll(limit_s)
            late = ("", f"compiling it took more than {limit_s:g} s; simplify it")
            text, refused = self._receive() if answered else late
        except (EOFError, OSError, ValueError, TypeError) as error:
            self.kill()
            raise GrammarError(
                "compiling it took too much memory, or llguidance failed; simplify it"
            ) from error
        except BaseException:  # the answer, which is still to come, would be taken for the next grammar's
            self.kill()
            raise
        if not answered:
            self.kill()
        if refused is not None:
            raise GrammarError(refused)
        return str(text)

    def _receive(self) -> Any:
        """Read an answer as JSON, because a hostile grammar may control the process that wrote it."""
        return json.loads(self._connection.recv_bytes(_MOST_ANSWER_BYTES))
