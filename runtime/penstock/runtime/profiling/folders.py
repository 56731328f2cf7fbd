"""The folders in which profiles are kept: one for each, named by time, of which only the newest are kept."""

from __future__ import annotations

import datetime as dt
import os
import re
import shutil
import time
from pathlib import Path

_NAME = re.compile(r"profile-\d{8}T\d{6}-\d{3,}(\.part)?")
_UNFINISHED = ".part"
_STALE_S = 3600.0
"""Whatever is unfinished for so long was left by a process that has died."""


def new_folder(parent: Path, now: dt.datetime) -> Path:
    """Make a folder of a name that is not taken in `parent`, which is made too; it is unfinished until
    `finished`. Its owner alone may read it, because a profile shows what the server does. OSError.
    """
    parent.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        folder = parent / f"profile-{now:%Y%m%dT%H%M%S}-{number:03d}"
        unfinished = folder.with_name(folder.name + _UNFINISHED)
        if not folder.exists():
            try:
                unfinished.mkdir(mode=0o700)
                return unfinished
            except FileExistsError:
                pass
        number += 1


def final_path(unfinished: Path) -> Path:
    """Tell where an unfinished folder will be."""
    return unfinished.with_name(unfinished.name.removesuffix(_UNFINISHED))


def finished(unfinished: Path) -> Path:
    """Give a folder its final name, which is returned. OSError."""
    final = final_path(unfinished)
    os.rename(unfinished, final)
    return final


def keep_newest(written: Path, number: int) -> None:
    """Remove all profiles beside `written` but that and the newest others, so that `number` are left, and
    what a process that has died left unfinished. Nothing else is touched there.

    `written` stays even if its name is not the newest, as after the clock was set back.
    """
    folders = [entry for entry in os.scandir(written.parent) if entry.is_dir(follow_symlinks=False)]
    profiles = sorted(
        (entry for entry in folders if _NAME.fullmatch(entry.name)), key=lambda entry: entry.name
    )
    others = [e for e in profiles if not e.name.endswith(_UNFINISHED) and e.name != written.name]
    stale = [
        entry
        for entry in profiles
        if entry.name.endswith(_UNFINISHED) and time.time() - entry.stat().st_mtime > _STALE_S
    ]
    for entry in others[: max(0, len(others) + 1 - number)] + stale:
        shutil.rmtree(entry.path, ignore_errors=True)


def size_of(folder: Path) -> int:
    """Count the bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
