"""The programs that run the cases, one for each language, and one for grpcurl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.toolchains import ROOT, go_program, require

LIMIT_S = 280


@dataclass(frozen=True, slots=True)
class Driver:
    """A program that takes --addr and --cases, and prints one line for each case."""

    name: str
    command: Callable[[], Sequence[str]]
    """Its words. Skips the test where a toolchain is missing."""
    folder: Path = ROOT
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, addr: str, calls: Sequence[Mapping[str, Any]], file: Path) -> list[dict[str, Any]]:
        """What came of each call, in order. `file` is where the calls are written for the program."""
        file.write_text(json.dumps(calls))
        done = subprocess.run(
            [*self.command(), "--addr", addr, "--cases", str(file)],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"the driver for {self.name} failed:\n{done.stdout}\n{done.stderr}"
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        assert [answer.pop("name") for answer in answers] == [call["name"] for call in calls]
        return answers


def _python() -> list[str]:
    return [sys.executable, "-m", "tests.conformance.python_driver"]


def _grpcurl() -> list[str]:
    program = str(go_program("grpcurl"))
    return [sys.executable, "-m", "tests.conformance.grpcurl_driver", "--program", program]


@cache
def _go() -> list[str]:
    require("go")
    return ["go", "run", "./internal/conformance"]


PYTHON = Driver("python", _python, environment={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
GRPCURL = Driver("grpcurl", _grpcurl, environment=PYTHON.environment)
GO = Driver("go", _go, ROOT / "clients" / "go")
DRIVERS = (PYTHON, GRPCURL, GO)
