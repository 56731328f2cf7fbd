"""The client for Java: Maven builds it, and its own tests start servers of the demo model."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.docs.pages import blocks
from tests.docs.readmes import run_readme
from tests.support.models.compilation_cache import TEST_CACHE
from tests.support.toolchains import require

ROOT = Path(__file__).parents[3]
MODULE = ROOT / "clients" / "java"
TESTS_S = 1100
POM = "{http://maven.apache.org/POM/4.0.0}"


def ran(*command: str, environment: Mapping[str, str]) -> str:
    """Run a command, and return what it printed. Fails with that unless its exit code is 0."""
    done = subprocess.run(
        command,
        cwd=MODULE,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TESTS_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_module_has_the_version_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = ET.parse(MODULE / "pom.xml").getroot().findtext(f"{POM}version")
    assert version == project["version"]


@pytest.mark.sweep("Java")
@pytest.mark.timeout(1200)  # Maven alone takes minutes on a busy machine
def test_the_module_builds_without_warnings_and_its_tests_pass() -> None:
    """Its servers start from this interpreter, so that they are those of this environment."""
    require("java", "mvn")
    said = ran(
        "mvn",
        "--batch-mode",
        "verify",
        environment={
            "PENSTOCK_COMMAND": f"{sys.executable} -u -m penstock.cli",
            "PENSTOCK_TEST_CACHE": str(TEST_CACHE),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
    )
    assert "Failures: 0, Errors: 0, Skipped: 0" in said, said


@pytest.mark.sweep("Java")
@pytest.mark.timeout(1200)  # Maven alone takes minutes on a busy machine
def test_commands_of_the_readme_run(tmp_path: Path) -> None:
    require("java", "mvn")
    said = run_readme(MODULE, tmp_path, left_out=["mvn -B verify"], ignored=["target"])
    assert said.count("Once upon a time") == 3, said
    assert said.count("draw the same tokens at every run") == 1, "--help tells of the options"
    assert "DeadlineExceededException" in said
    assert "the deadline has passed" in said
    assert 'UPDATE_OUTCOME_COMMITTED: "again" serves as generation 2; 46 tensors' in said


def test_the_example_of_a_project_depends_on_the_client() -> None:
    """The README shows the same lines as the example's pom.xml, and they name this version."""
    (shown,) = [block for block in blocks() if block.page == MODULE / "README.md" and block.language == "xml"]
    example = (MODULE / "examples" / "pom.xml").read_text()
    assert " ".join(shown.source.split()) in " ".join(example.split())
    version = ET.parse(MODULE / "pom.xml").getroot().findtext(f"{POM}version")
    assert f"<version>{version}</version>" in shown.source
