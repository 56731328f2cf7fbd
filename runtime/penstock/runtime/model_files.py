"""Reads the files of a checkpoint that are JSON, and tells what a file is that is not what its name says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.runtime.errors import ConfigError

_LOOKED_AT = 512  # bytes
_LFS = b"version https://git-lfs.github.com/spec/"
_PAGES = (b"<!doctype html", b"<html")


def check_downloaded(file: Path, begin: bytes | None = None) -> None:
    """Raise ConfigError if the file was not downloaded, but something that stands for it: a pointer of Git
    LFS, as a clone without `git lfs` has it, or a web page. `begin`: the file's first bytes, if they are
    known. A file that is not there, or cannot be read, is not told here.
    """
    if begin is None:
        try:
            with file.open("rb") as stream:
                begin = stream.read(_LOOKED_AT)
        except OSError:
            return
    if begin.startswith(_LFS):
        raise ConfigError(f"{file} is a Git LFS pointer; run git lfs pull in its folder")
    if begin[:_LOOKED_AT].removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith(_PAGES):
        raise ConfigError(f"{file} is a web page; download the file itself, if need be with a token")


def read_json(file: Path) -> Any:
    """Read the JSON of a file. Raises ConfigError, which says what to do, if it cannot be read."""
    try:
        data = file.read_bytes()
        check_downloaded(file, data)
        return json.loads(data.decode())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error}); download it again") from error


def read_json_object(file: Path) -> dict[str, Any]:
    """Do the same as `read_json`, of a file that must hold an object."""
    data = read_json(file)
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must hold a JSON object, not {type(data).__name__}")
    return data
