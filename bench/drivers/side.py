"""Runs a driver in a process of its own, so that two versions of Penstock can be up at once
(`bench.compare`).

The process (`bench.side_process`) reads waves from standard input, one a line, and answers each with its
traces. Between two waves it waits for a line, which costs nothing. It runs only the waves; the process that
asked computes the figures from the traces. Needs only the standard library and Penstock's sources.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from bench.drivers.session import Driver
from bench.workloads import Job
from penstock.cli.measuring.stats import RequestTrace

_STOP_S = 60.0


class Side:
    """A `Driver` whose engine is in another process, which ends with this object or with this process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `command`, which calls `serve`. `wait_until_up` must be called next."""
        # The child has a session of its own, so that an interrupt from the keyboard goes to the parent, which
        # then ends the child.
        self._command = " ".join(command)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(environment),
            start_new_session=True,
        )
        self.startup: Mapping[str, Any] = {}

    def wait_until_up(self) -> None:
        """Wait until the engine is up. Raises RuntimeError if it does not come up."""
        self.startup = self._answer()

    def run_wave(self, jobs: Sequence[Job]) -> list[RequestTrace]:
        answer = self._ask({"wave": [dataclasses.asdict(job) for job in jobs]})
        if "error" in answer:
            raise ValueError(answer["error"])
        return [_trace(fields) for fields in answer["traces"]]

    def about_repeat(self) -> Mapping[str, Any]:
        return self._ask({"about": True})

    def close(self) -> None:
        """End the engine and its process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process is gone
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process is gone, and reading reports its exit code
            print(json.dumps(command), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._command} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _trace(fields: Mapping[str, Any]) -> RequestTrace:
    arrivals = tuple((time, count) for time, count in fields["arrivals"])
    return RequestTrace(**{**fields, "arrivals": arrivals})


def serve(driver: Driver, startup: Mapping[str, Any], commands: TextIO, answers: TextIO) -> None:
    """Report that the engine is up, then run what is asked until there is nothing more."""

    def answer(value: Mapping[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    answer(startup)
    for line in commands:
        command = json.loads(line)
        if "about" in command:
            answer(driver.about_repeat())
            continue
        jobs = [Job(**{**job, "token_ids": tuple(job["token_ids"])}) for job in command["wave"]]
        try:
            answer({"traces": [dataclasses.asdict(trace) for trace in driver.run_wave(jobs)]})
        except ValueError as error:
            answer({"error": str(error)})


def own_output() -> TextIO:
    """Keep standard output for the answers: everything else that is printed goes to standard error from now
    on.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers
