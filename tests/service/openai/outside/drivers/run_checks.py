"""Runs the checks of one file here, in the environment of a library from PyPI, and prints what came of each.

    python run_checks.py FILE URL MODEL KEY

FILE has functions `check_*(endpoint)`, which may be asynchronous. Each is run, whatever became of those
before it, and a line of JSON tells its name without `check_` and its error, or null where it passed. This
program needs the standard library alone.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Endpoint:
    """Where a library finds the OpenAI front."""

    url: str
    """Ends in /v1."""
    model: str
    key: str


def main() -> None:
    file, *rest = sys.argv[1:]
    endpoint = Endpoint(*rest)
    checks = [(name, it) for name, it in runpy.run_path(file).items() if name.startswith("check_")]
    with asyncio.Runner() as loop:  # one for all: some libraries keep their connections for the next call
        run(checks, endpoint, loop)


def run(checks: Sequence[tuple[str, Any]], endpoint: Endpoint, loop: asyncio.Runner) -> None:
    for name, check in checks:
        error = None
        try:
            if inspect.iscoroutinefunction(check):
                loop.run(check(endpoint))
            else:
                check(endpoint)
        except Exception as raised:  # noqa: BLE001 -- whatever a check raises is its outcome
            error = f"{type(raised).__name__}: {raised}"
        line = json.dumps({"check": name.removeprefix("check_"), "error": error})
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
