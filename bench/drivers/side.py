"""Runs a driver in a process of its own, so that two versions of Penstock can be up at once
(`bench.compare`).

The process (`bench.side_process`) reads waves and answers each with its traces, as `bench.child` says. It
runs only the waves; the process that asked computes the figures from the traces. Needs only the standard
library and Penstock's sources.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from bench.child import Child, answer
from bench.drivers.session import Driver
from bench.workloads import Job
from penstock.cli.measuring.stats import RequestTrace


class Side:
    """A `Driver` whose engine is in another process, which ends with this object or with this process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `command`, which calls `serve`. `wait_until_up` must be called next."""
        self._child = Child(command, environment)
        self.startup: Mapping[str, Any] = {}

    def wait_until_up(self) -> None:
        """Wait until the engine is up. Raises RuntimeError if it does not come up."""
        self.startup = self._child.answer()

    def run_wave(self, jobs: Sequence[Job]) -> list[RequestTrace]:
        found = self._child.ask({"wave": [dataclasses.asdict(job) for job in jobs]})
        if "error" in found:
            raise ValueError(found["error"])
        return [_trace(fields) for fields in found["traces"]]

    def about_repeat(self) -> Mapping[str, Any]:
        return self._child.ask({"about": True})

    def close(self) -> None:
        """End the engine and its process."""
        self._child.close()


def _trace(fields: Mapping[str, Any]) -> RequestTrace:
    arrivals = tuple((time, count) for time, count in fields["arrivals"])
    return RequestTrace(**{**fields, "arrivals": arrivals})


def serve(driver: Driver, startup: Mapping[str, Any], commands: TextIO, answers: TextIO) -> None:
    """Report that the engine is up, then run what is asked until there is nothing more."""
    answer(startup, answers)
    for line in commands:
        command = json.loads(line)
        if "about" in command:
            answer(driver.about_repeat(), answers)
            continue
        jobs = [Job(**{**job, "token_ids": tuple(job["token_ids"])}) for job in command["wave"]]
        try:
            answer({"traces": [dataclasses.asdict(trace) for trace in driver.run_wave(jobs)]}, answers)
        except ValueError as error:
            answer({"error": str(error)}, answers)
