"""The client for Go: its own tests, which start servers of the demo model, and what Go finds in its code."""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models.toy import TEST_CACHE
from tests.support.toolchains import require

ROOT = Path(__file__).parents[3]
MODULE = ROOT / "clients" / "go"
TESTS_S = 900

pytestmark = pytest.mark.sweep


@pytest.fixture(autouse=True)
def _go() -> None:
    require("go")


def ran(*command: str | Path, cwd: Path = MODULE, **environment: str) -> str:
    """What a command printed. Fails with that unless its exit code is 0."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TESTS_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_checked_in_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    tools = Path(sys.executable).parent
    template = MODULE / "buf.gen.yaml"
    ran(tools / "buf", "generate", "--template", template, "--output", tmp_path, cwd=ROOT)
    checked_in, fresh = MODULE / "penstockv1", tmp_path / "clients" / "go" / "penstockv1"
    names = sorted(path.name for path in checked_in.iterdir())
    assert names == sorted(path.name for path in fresh.iterdir())
    assert "control_grpc.pb.go" in names
    _, stale, unread = filecmp.cmpfiles(checked_in, fresh, names, shallow=False)
    assert (stale, unread) == ([], []), "run `make proto-go`"


def test_the_code_is_formatted_and_go_finds_nothing_wrong_with_it() -> None:
    assert ran("gofmt", "-l", ".") == ""
    ran("go", "vet", "./...")
    assert ran("go", "mod", "tidy", "-diff") == ""


def test_the_tests_of_the_module_pass() -> None:
    """Each starts from this interpreter, so that they test the servers of this environment."""
    command = f"{sys.executable} -m penstock.cli"
    said = ran(
        "go",
        "test",
        "-count=1",
        "-v",
        "./...",
        PENSTOCK_COMMAND=command,
        PENSTOCK_TEST_CACHE=str(TEST_CACHE),
    )
    assert "--- PASS: " in said
    assert "--- SKIP: " not in said, said
