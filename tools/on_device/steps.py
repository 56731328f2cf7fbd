"""Runs steps, each a process of its own with its own time limit, until all have run or the time is out."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

RESULT = "PENSTOCK_ON_DEVICE_RESULT"
"""The variable with the path of the file into which a step writes its result, a JSON object."""
PLATFORM = "PENSTOCK_TEST_PLATFORM"
"""The variable with the platform for which the run was planned; tests/conftest.py reads it, too."""
SAID = "said"
"""The key of a result with the sentence that sums it up."""
LEAST_S = 5.0
"""A step that would have less time than this is not begun."""
LAST_WORDS_S = 3.0
"""How long a process has to say where it hangs."""
_MOST_OUTPUT = 1 << 20

State = Literal["done", "failed", "killed", "not reached"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A program to run."""

    name: str
    command: Sequence[str]
    limit_s: float
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of this step alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Steps that belong together. The next stage begins when all of them have ended."""

    title: str
    steps: tuple[Step, ...]
    limit_s: float
    """Most seconds of all steps together, so that later stages get their turn."""
    at_once: int = 1
    """How many steps run at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a step."""

    name: str
    state: State
    seconds: float = 0.0
    result: Mapping[str, Any] = field(default_factory=dict)
    """What the step wrote last, even if it failed or was killed afterwards."""
    output: str = ""
    how: str = ""
    """How it ended, unless all was well."""


class Runner:
    """Runs stages under a total limit. `tell` gets each outcome at once, on the caller's thread."""

    def __init__(
        self, *, work: Path, environment: Mapping[str, str], limit_s: float, tell: Callable[[Outcome], object]
    ) -> None:
        """`work` gets the outputs and results of steps. Time counts from now."""
        self._work = work
        self._environment = environment
        self._until_s = time.monotonic() + limit_s
        self._tell = tell
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_over = False

    def run(self, stages: Sequence[Stage], cwd: Path) -> None:
        """Run all stages. If the caller's thread is interrupted, all processes are killed first."""
        for stage in stages:
            until_s = min(self._until_s, time.monotonic() + stage.limit_s)
            pool = ThreadPoolExecutor(stage.at_once)
            try:
                running = [pool.submit(self._one, step, until_s, cwd) for step in stage.steps]
                for done in as_completed(running):
                    self._tell(done.result())
            except BaseException:
                self._end()
                raise
            finally:
                pool.shutdown(cancel_futures=True)

    def _one(self, step: Step, until_s: float, cwd: Path) -> Outcome:
        began_s = time.monotonic()
        left_s = min(until_s, self._until_s) - began_s
        if left_s < min(LEAST_S, step.limit_s):
            return Outcome(name=step.name, state="not reached", how="there was no time left")
        log, result = self._work / f"{step.name}.log", self._work / f"{step.name}.json"
        result.unlink(missing_ok=True)  # that of an earlier run
        try:
            with self._lock, log.open("wb") as output:
                if self._is_over:
                    return Outcome(name=step.name, state="not reached", how="the run was interrupted")
                process = subprocess.Popen(
                    step.command,
                    cwd=cwd,
                    env={**self._environment, **step.variables, RESULT: str(result)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._running.add(process)
        except OSError as error:
            return Outcome(name=step.name, state="failed", how=f"it could not be started: {error}")
        limit_s = min(step.limit_s, left_s)
        try:
            how = _how(process.wait(limit_s))
            state: State = "failed" if how else "done"
        except subprocess.TimeoutExpired:
            reason = "its limit" if limit_s == step.limit_s else "what was left of the time"
            state, how = "killed", f"it was killed after {limit_s:.0f} s, {reason}"
            ask_where(process)
        finally:
            _kill_group(process)
            with self._lock:
                self._running.discard(process)
        return Outcome(
            name=step.name,
            state=state,
            seconds=time.monotonic() - began_s,
            result=_read_result(result),
            output=log.read_bytes()[-_MOST_OUTPUT:].decode(errors="replace"),
            how=how,
        )

    def _end(self) -> None:
        """Kill what runs, and let nothing begin."""
        with self._lock:
            self._is_over = True
            for process in self._running:
                _kill_group(process)


def _how(code: int) -> str:
    if code == 0:
        return ""
    return f"it ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with {code}"


def ask_where(process: subprocess.Popen[Any]) -> None:
    """Abort the process. With PYTHONFAULTHANDLER, Python then writes where each of its threads is."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LAST_WORDS_S)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all that it has started, unless that began a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_result(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class Result:
    """What a step has found so far, from within the step. All is written anew whenever something is added, so
    that a step that is killed has said that much.
    """

    def __init__(self) -> None:
        self.file = Path(os.environ.get(RESULT, os.devnull))
        self._found: dict[str, Any] = {}

    def add(self, **found: Any) -> None:
        """Add figures, by names in which "_" stands for a space."""
        self._found |= {name.replace("_", " "): value for name, value in found.items()}
        print(found, flush=True)
        if self.file != Path(os.devnull):
            part = self.file.with_suffix(".part")
            part.write_text(json.dumps(self._found, default=str), encoding="utf-8")
            part.replace(self.file)

    def say(self, sentence: str) -> None:
        """Set the sentence that sums all up."""
        self.add(**{SAID: sentence})
