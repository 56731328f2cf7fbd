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

from tests.support.toolchains import ROOT, alone_in, go_program, kept_folder, require

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
    tracked = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output([*tracked, "protos/*.proto", "clients/java"], cwd=ROOT, text=True)
    files = listed.splitlines()
    sources = {file: (ROOT / file).read_bytes() for file in sorted(files) if (ROOT / file).is_file()}
    root = kept_folder("java", repr(sources).encode())
    module, complete = root / "clients" / "java", root / "complete"
    with alone_in(root):
        if not (complete.exists() and _has_jars(module)):
            for file, content in sources.items():
                (root / file).parent.mkdir(parents=True, exist_ok=True)
                (root / file).write_bytes(content)
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
            complete.touch()
    target = module / "target"
    parts = [str(target / "classes"), str(target / "test-classes"), (target / "classpath.txt").read_text()]
    return ["java", "-cp", os.pathsep.join(parts), "penstock.conformance.Main"]


def _has_jars(module: Path) -> bool:
    """Say whether the jars are still there with which the driver was built. They lie in Maven's folder."""
    jars = (module / "target" / "classpath.txt").read_text().strip()
    return all(os.path.exists(jar) for jar in jars.split(os.pathsep))


PYTHON = Driver("python", _python, environment={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
GRPCURL = Driver("grpcurl", _grpcurl, environment=PYTHON.environment, built="grpcurl")
GO = Driver("go", _go, ROOT / "clients" / "go", built="Go")
JAVA = Driver("java", _java, built="Java")
DRIVERS = (PYTHON, GRPCURL, GO, JAVA)
