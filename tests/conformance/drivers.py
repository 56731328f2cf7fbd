"""The programs that run the cases, one for each language, and one for grpcurl."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
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
    built: str = ""
    """What is built for it: a word of tests.support.suite.drawing.BUILT."""

    def run(
        self, addr: str, calls: Sequence[Mapping[str, Any]], file: Path, reflection: str = ""
    ) -> list[dict[str, Any]]:
        """Return what came of each call, in order. `file` is where the calls are written for the program;
        `reflection` is metadata that grpcurl sends when it asks for the contract, "NAME: VALUE".
        """
        file.write_text(json.dumps(calls))
        done = subprocess.run(
            [*self.command(), "--addr", addr, "--cases", str(file)],
            cwd=self.folder,
            env={**os.environ, **self.environment, "CONFORMANCE_REFLECTION": reflection},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"the driver for {self.name} failed:\n{done.stderr}"
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


@cache
def _java() -> list[str]:
    """Build the driver in a folder of its own: the tests of the module may run Maven in clients/java
    meanwhile.
    """
    require("java", "mvn")
    root = Path(tempfile.mkdtemp(prefix="penstock-java-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    shutil.copytree(ROOT / "protos", root / "protos", ignore=shutil.ignore_patterns("*.py*", "__pycache__"))
    module = root / "clients" / "java"
    shutil.copytree(ROOT / "clients" / "java", module, ignore=shutil.ignore_patterns("target"))
    done = subprocess.run(
        ["mvn", "--batch-mode", "--quiet", "-DskipTests", "process-test-classes"],
        cwd=module,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"Maven failed:\n{done.stdout}\n{done.stderr}"
    target = module / "target"
    parts = [str(target / "classes"), str(target / "test-classes"), (target / "classpath.txt").read_text()]
    return ["java", "-cp", os.pathsep.join(parts), "penstock.conformance.Main"]


PYTHON = Driver("python", _python, environment={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
GRPCURL = Driver("grpcurl", _grpcurl, environment=PYTHON.environment, built="grpcurl")
GO = Driver("go", _go, ROOT / "clients" / "go", built="Go")
JAVA = Driver("java", _java, built="Java")
DRIVERS = (PYTHON, GRPCURL, GO, JAVA)
