"""Empty virtual environments, filled by uv, for tests that install what the project builds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

UV = Path(sys.executable).with_name("uv")


def environment(folder: Path, *arguments: str | Path) -> Path:
    """Make a new virtual environment with what `uv pip install ARGUMENTS` puts into it; its folder of
    programs.
    """
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    programs = folder / "bin"
    install(programs, *arguments)
    return programs


def install(programs: Path, *arguments: str | Path) -> None:
    """`uv pip install ARGUMENTS` into the environment of these programs."""
    command = [UV, "pip", "install", "--quiet", "--python", programs / "python", *arguments]
    subprocess.run(list(map(str, command)), check=True)


def variables() -> dict[str, str]:
    """Return the variables for a program in such an environment. By PYTHONPATH it would find the tree's
    modules.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def output_of(*command: str | Path) -> str:
    """Return what the program, one of such an environment, writes to stdout; it must end with code 0."""
    return subprocess.check_output(list(map(str, command)), env=variables(), text=True)


def versions(programs: Path) -> dict[str, str]:
    """Return what is installed in the environment: names and versions."""
    code = (
        "from importlib.metadata import distributions as d; [print(i.name.lower(), i.version) for i in d()]"
    )
    return dict(line.split() for line in output_of(programs / "python", "-c", code).splitlines())
