"""The client for Go: its own tests, which start servers of the demo model, and what Go finds in its code."""

from __future__ import annotations

import filecmp
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.docs.pages import blocks
from tests.docs.readmes import run_readme
from tests.support.models.compilation_cache import TEST_CACHE
from tests.support.toolchains import require

ROOT = Path(__file__).parents[3]
MODULE = ROOT / "clients" / "go"
TESTS_S = 900


@pytest.fixture
def _go() -> None:
    require("go")


def ran(*command: str | Path, cwd: Path = MODULE, **environment: str) -> str:
    """Run a command, and return what it printed. Fails with that unless its exit code is 0."""
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


@pytest.mark.sweep("Go")
@pytest.mark.usefixtures("_go")
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


@pytest.mark.sweep("Go")
@pytest.mark.usefixtures("_go")
def test_the_code_is_formatted_and_go_finds_nothing_wrong_with_it() -> None:
    assert ran("gofmt", "-l", ".") == ""
    ran("go", "vet", "./...")
    ran("go", "mod", "tidy", "-diff")  # exits with 1 if it would change anything


@pytest.mark.sweep("Go")
@pytest.mark.usefixtures("_go")
def test_the_tests_of_the_module_pass() -> None:
    """Their servers start from this interpreter, so that they are those of this environment."""
    said = ran(
        "go",
        "test",
        "-count=1",
        "-v",
        "./...",
        PENSTOCK_COMMAND=f"{sys.executable} -m penstock.cli",
        PENSTOCK_TEST_CACHE=str(TEST_CACHE),
        PYTHONPATH=os.pathsep.join(filter(None, sys.path)),
    )
    assert "--- PASS: " in said
    assert "--- SKIP: " not in said, said


def test_every_reason_of_the_contract_has_a_name() -> None:
    documented = re.findall(
        r"^\| ([A-Z_]+) \| [A-Z_]+ \|", (ROOT / "docs/reference/errors.md").read_text(), re.M
    )
    named = re.findall(r"\t(Err\w+) +Reason = \"([A-Z_]+)\"", (MODULE / "reasons.go").read_text())
    assert sorted(reason for _, reason in named) == sorted(documented)
    assert [name.upper() for name, _ in named] == [f"ERR{reason.replace('_', '')}" for _, reason in named]


def test_programs_of_the_readme_are_those_that_the_module_tests() -> None:
    tested = (MODULE / "example_test.go").read_text()
    shown = [block for block in blocks() if block.page == MODULE / "README.md" and block.language == "go"]
    imports, *programs = [block.source for block in shown]
    for line in imports.splitlines():
        assert line in tested
    parts = [textwrap.dedent(part).strip() for part in re.findall(r"// ---\n(.*?)\t*// ---\n", tested, re.S)]
    assert sorted(parts) == sorted(program.strip() for program in programs)


@pytest.mark.sweep("Go")
@pytest.mark.usefixtures("_go")
def test_commands_of_the_readme_run(tmp_path: Path) -> None:
    said = run_readme(MODULE, tmp_path, left_out=["go test"])
    assert said.count("Once upon a time") == 3
    assert "DeadlineExceeded" in said
    assert "the deadline has passed" in said
    assert 'UPDATE_OUTCOME_COMMITTED: "again" serves as generation 2; 46 tensors' in said
