"""Frees the disk of what tests have made. A run once needed more than the 8 GB that a machine had.

pytest itself removes the folder `tmp_path` of a test that has passed: pyproject.toml asks for that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

MOST_CACHE_BYTES = 1 << 30
"""Compiled programs that are kept for later runs. One run makes about half of it."""
UNUSED_S = 2 * 86_400
"""What is kept for later runs may be unused for so long. Each kind of it is drawn once in seven runs."""


class FixtureFolders:
    """A plugin of pytest that removes the folders of a fixture after it. pytest would keep them until the run
    ends. If a test has failed meanwhile they stay, because they may tell why.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, Any, Any]:
        if "tmp_path_factory" not in fixturedef.argnames or fixturedef.argname == "tmp_path":
            return (yield)
        root = request.getfixturevalue("tmp_path_factory").getbasetemp()
        before, failed_before = set(root.iterdir()), request.session.testsfailed
        made: list[Path] = []

        def remove() -> None:
            if request.session.testsfailed == failed_before:
                for folder in made:
                    shutil.rmtree(folder, ignore_errors=True)

        fixturedef.addfinalizer(remove)  # before the fixture's own, so that it runs after that
        try:
            return (yield)
        finally:
            made += [folder for folder in root.iterdir() if folder not in before and not folder.is_symlink()]


def remove_unused(paths: Iterable[Path], unused_s: float = UNUSED_S) -> None:
    """Remove the files and folders that were used last before so many seconds, as their modification times
    say. Those of other users stay.
    """
    oldest = time.time() - unused_s
    for path in paths:
        with contextlib.suppress(OSError):  # another process may have removed it, or it is another user's
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def keep_newest(folder: Path, most_bytes: int = MOST_CACHE_BYTES) -> None:
    """Remove those of the folder's files that were used longest ago, as their modification times say, until
    the rest has at most so many bytes. Those of other users stay.
    """
    found = []
    for entry in _files_below(folder):
        with contextlib.suppress(OSError):  # another process may have removed it
            status = entry.stat()
            found.append((status.st_mtime, status.st_size, entry.path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most_bytes:
            return
        with contextlib.suppress(OSError):  # another process may have removed it, or it is another user's
            Path(path).unlink()
        total -= size


def _files_below(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError):  # it may be gone, or another user's
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(entry.path)
            else:
                yield entry
