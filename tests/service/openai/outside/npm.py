"""Programs from npm that only some tests run, each in a folder of its test.

They take hundreds of megabytes each, so they go with the test. npm keeps what it has downloaded. Where the
packages cannot be downloaded the test is skipped, or fails where toolchains are required (see
`tests.support.toolchains`).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.toolchains import refuse, require

INSTALL_S = 600


def node_packages(parent: Path, *packages: str) -> Path:
    """Make a folder whose node_modules has these packages, such as "zod@4.6.7", and what they need.

    Node finds them for every script that lies in the folder.
    """
    require("node", "npm")
    folder = parent / "npm"
    command = ["npm", "install", "--prefix", str(folder), "--prefer-offline", "--no-audit", "--no-fund"]
    done = subprocess.run(
        [*command, *packages], capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    if done.returncode:
        refuse(f"{' '.join(packages)} could not be installed:\n{done.stderr}")
    return folder
