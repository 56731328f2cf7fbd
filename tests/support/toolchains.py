"""Toolchains of other languages: Go, Java and Node.js, which only the tests of their clients and tools need.

Where one is missing, a test is skipped, and says what to install. With PENSTOCK_REQUIRE_TOOLCHAINS=1 it fails
instead: so do `make test-clients` and CI.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest

from tests.support.suite.disk import remove_unused

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools" / "go"
"""The Go module whose go.mod pins the programs that `go_program` builds."""
PACKAGES = {
    "grpcurl": "github.com/fullstorydev/grpcurl/cmd/grpcurl",
    "ghz": "github.com/bojand/ghz/cmd/ghz",
}
TO_INSTALL = {
    "go": "install Go 1.26 or newer (https://go.dev/dl)",
    "java": "install a JDK, 17 or newer (Debian's package openjdk-17-jdk-headless)",
    "mvn": "install Maven 3.8 or newer (Debian's package maven)",
    "node": "install Node.js 20 or newer (https://nodejs.org)",
    "npm": "install npm, which comes with Node.js (https://nodejs.org)",
}
BUILD_S = 900
VERSIONS = "penstock-tests-*-*"
"""The folders of `kept_folder`, of all versions."""


def require(*names: str) -> None:
    """Skip the test, or fail it where toolchains are required, unless the PATH has all of these programs.

    Names are those of TO_INSTALL. May stand in a test, in a fixture, and at the top of a test file.
    """
    for name in names:
        advice = TO_INSTALL[name]
        if shutil.which(name) is None:
            refuse(f"no {name} here: {advice}")


def refuse(why: str) -> NoReturn:
    """Skip the test that runs, or the file that is imported; fail it where toolchains are required."""
    if os.environ.get("PENSTOCK_REQUIRE_TOOLCHAINS") == "1":
        pytest.fail(f"{why} (PENSTOCK_REQUIRE_TOOLCHAINS=1)", pytrace=False)
    pytest.skip(why, allow_module_level=True)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make a folder, which outlasts a run of the tests, if it is missing. Of all processes of tests that name
    it one runs the block, and the others wait. Such folders of other versions go when they have been unused
    for long.

    The lock is on the folder itself, so that a user who may not write to it can use what another has put
    there.
    """
    folder.mkdir(exist_ok=True)
    with suppress(PermissionError):
        os.utime(folder)  # it is used now
    remove_unused(folder.parent.glob(VERSIONS))
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def kept_folder(kind: str, made_of: bytes) -> Path:
    """Return the path of the folder that keeps for later runs what is made of exactly this."""
    digest = hashlib.sha256(made_of).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"penstock-tests-{kind}-{digest}"


def go_program(name: str) -> Path:
    """Return the path of `grpcurl` or `ghz`, in the version that tools/go/go.mod pins.

    It is built at the first call, for about a minute, and kept in the folder for temporary files until the
    pins change. Without Go, or where Go's modules cannot be downloaded, the test is skipped, or fails where
    toolchains are required.
    """
    require("go")
    folder = kept_folder("go", b"".join((TOOLS / file).read_bytes() for file in ("go.mod", "go.sum")))
    program = folder / name
    with alone_in(folder):
        if not program.exists():
            half = folder / f"{name}.half"
            done = subprocess.run(
                ["go", "build", "-o", str(half), PACKAGES[name]],
                cwd=TOOLS,
                capture_output=True,
                text=True,
                timeout=BUILD_S,
                check=False,
            )
            if done.returncode:
                refuse(f"{name} could not be built with Go:\n{done.stderr}")
            half.rename(program)
    return program
