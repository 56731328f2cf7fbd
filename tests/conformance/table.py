"""Reads the table of cases: what each request of the contract is answered with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.toolchains import ROOT

CASES = Path(__file__).parent / "cases"
RUN = "{run}"
"""In the table it stands for a word that differs from run to run, so that ids are new each time."""


@dataclass(frozen=True, slots=True)
class Case:
    """One call and what must come of it. README.md beside this file explains the fields."""

    name: str
    method: str
    expect: Mapping[str, Any]
    requests: Sequence[Mapping[str, Any]] = ({},)
    metadata: Mapping[str, str] | None = None
    timeout_s: float | None = None
    vary: Sequence[str] = ()
    near: Sequence[str] = ()

    def call(self) -> dict[str, Any]:
        """Return what a driver is told."""
        told: dict[str, Any] = {"name": self.name, "method": self.method, "requests": list(self.requests)}
        if self.metadata is not None:
            told["metadata"] = dict(self.metadata)
        if self.timeout_s is not None:
            told["timeout_s"] = self.timeout_s
        return told


@dataclass(frozen=True, slots=True)
class Step:
    """A call that the tests make around the cases, for the state in which the cases find the server."""

    method: str
    requests: Sequence[Mapping[str, Any]] = ({},)
    held: int = 0
    """0: the call runs to its end. Otherwise it goes on while the cases run, and so many of its messages are
    read before.
    """
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """One file of the table: a server, and the cases that are run with it, in order."""

    name: str
    server: Mapping[str, Any]
    """How it is started and stopped; README.md beside this file lists the fields."""
    cases: Sequence[Case]
    before: Sequence[Step] = ()
    after: Sequence[Step] = ()


def for_run(value: Any, run: str) -> Any:
    """Return the same with this run's word in the place of RUN, and the repository's path in that of
    "{root}".
    """
    return json.loads(json.dumps(value).replace(RUN, run).replace("{root}", str(ROOT)))


def for_table(value: Any, run: str) -> Any:
    """Return the same with RUN in the place of this run's word."""
    return json.loads(json.dumps(value).replace(run, RUN))


@cache
def groups() -> tuple[Group, ...]:
    return tuple(_read(file) for file in sorted(CASES.glob("*.json")))


def _read(file: Path) -> Group:
    data = json.loads(file.read_text())
    return Group(
        name=file.stem,
        server=data.pop("server"),
        cases=tuple(Case(**case) for case in data.pop("cases")),
        before=tuple(Step(**step) for step in data.pop("before", ())),
        after=tuple(Step(**step) for step in data.pop("after", ())),
        **data,
    )
