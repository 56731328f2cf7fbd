"""The real demo server with keys, the real OpenAI front before it, and programs that call the front."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.demo_server import ROOT, running, served_demo

DRIVERS = Path(__file__).parent / "drivers"
TOOL_S = 600
GREEDY = json.dumps({"temperature": 0})
"""Sampling defaults: what a tool finds must be the same each time, and few of them give a temperature."""
SERVED = ("--override-generation-config", GREEDY, "--max-model-len", "2048")
"""With the demo model's whole context an answer without a limit may take minutes."""


@dataclass(frozen=True)
class Endpoint:
    """Where the tools find the front."""

    url: str
    """Without the /v1 at its end."""
    model: str
    key: str

    @property
    def api(self) -> str:
        return f"{self.url}/v1"


@contextlib.contextmanager
def demo_front(folder: Path) -> Iterator[Endpoint]:
    """Serve the demo model to callers with a key, and OpenAI's API before it, which keeps responses."""
    keys = folder / "keys.json"
    added = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "keys", "add", "tools", "--file", str(keys)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    (key,) = (word for word in added.stdout.split() if word.startswith("psk_tools_"))
    with (
        served_demo("--keys", str(keys), *SERVED) as address,
        running(
            *("penstock.cli", "openai", "--addr", address, "--port", "0"),
            *("--store", str(folder / "responses.db"), "--files", str(folder / "files")),
            until="openai on",
        ) as (_, url),
    ):
        yield Endpoint(url.rstrip("/"), "demo", key)


def finish(
    command: Sequence[str | Path], folder: Path, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a tool to its end, in a folder, whatever it exits with."""
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=TOOL_S,
        cwd=folder,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | dict(variables or {}),
        check=False,
    )


def outcomes_of(done: subprocess.CompletedProcess[str]) -> dict[str, str | None]:
    """Return what a driver printed: each check with its error, or None."""
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert lines, f"{done.stdout}\n{done.stderr}"
    return {line["check"]: line["error"] for line in lines}


def python_driver(python: Path | str, driver: str, endpoint: Endpoint, folder: Path) -> dict[str, str | None]:
    """Return the outcomes of a file of checks in `drivers`, run by this Python."""
    command = [python, DRIVERS / "run_checks.py", DRIVERS / f"{driver}.py"]
    return outcomes_of(finish([*command, endpoint.api, endpoint.model, endpoint.key], folder))
