"""Folders of their own for programs from npm that only some tests run.

They are made once, in the folder for temporary files. Where the packages cannot be downloaded the test is
skipped, or fails where toolchains are required (see `tests.support.toolchains`).
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from pathlib import Path

from tests.support.toolchains import alone_in, refuse, require

INSTALL_S = 600


def node_packages(*packages: str) -> Path:
    """Make a folder whose node_modules has these packages, such as "zod@4.6.7", and what they need.

    Node finds them for every script that lies in the folder.
    """
    require("node", "npm")
    name = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"penstock-tests-npm-{name}"
    complete = folder / "complete"
    with alone_in(folder):
        if not complete.exists():
            done = subprocess.run(
                ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", *packages],
                capture_output=True,
                text=True,
                timeout=INSTALL_S,
                check=False,
            )
            if done.returncode:
                refuse(f"{' '.join(packages)} could not be installed:\n{done.stderr}")
            complete.touch()
    return folder
