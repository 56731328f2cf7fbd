"""`make breaking`, which CI runs too, refuses a contract that breaks clients of an earlier commit."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.contract.test_protos import REPOSITORY, TOOLS

FIELD = "  uint32 token_id = 1;\n"
TYPES = Path("protos/penstock/v1/types.proto")


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}"}
    names = {f"GIT_{who}_{what}": "test" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    return subprocess.run(
        command, cwd=folder, env=os.environ | own | names, capture_output=True, text=True, check=False
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Make a repository with the contract as its second commit."""
    folder = tmp_path / "clone"
    folder.mkdir()

    def commit() -> None:
        done = run(folder, "git", "commit", "--quiet", "--allow-empty", "--message", "a commit")
        assert done.returncode == 0, done.stderr

    run(folder, "git", "init", "--quiet")
    commit()
    shutil.copy(REPOSITORY / "buf.yaml", folder)
    for file in (REPOSITORY / TYPES.parent).glob("*.proto"):
        target = folder / file.relative_to(REPOSITORY)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    run(folder, "git", "add", ".")
    commit()
    return folder


def breaking(clone: Path, *against: str) -> subprocess.CompletedProcess[str]:
    return run(clone, str(REPOSITORY / "tools" / "breaking.sh"), *against)


def test_a_field_that_is_gone_breaks_and_a_new_one_does_not(clone: Path) -> None:
    text = (clone / TYPES).read_text()
    assert FIELD in text
    (clone / TYPES).write_text(text.replace(FIELD, f"{FIELD}  // New.\n  bool new = 99;\n"))
    grown = breaking(clone, "HEAD")
    assert (grown.returncode, grown.stdout) == (0, "nothing in the contract breaks since HEAD\n"), (
        grown.stderr
    )
    (clone / TYPES).write_text(text.replace(FIELD, ""))
    broken = breaking(clone, "HEAD")
    assert broken.returncode != 0
    assert 'field "1" with name "token_id"' in broken.stdout


def test_where_there_is_nothing_to_compare_with_it_says_so(clone: Path, tmp_path: Path) -> None:
    before = breaking(clone)
    assert (before.returncode, before.stderr) == (0, "the commit HEAD~1 has no contract to compare with\n")
    shallow = tmp_path / "shallow"
    run(tmp_path, "git", "clone", "--quiet", "--depth", "1", clone.as_uri(), str(shallow))
    missing = breaking(shallow)
    assert missing.returncode == 0
    assert missing.stderr.startswith("no commit HEAD~1 to compare the contract with; if the clone is shallow")
