"""Which servers of this machine read a file of keys: who changes the file is told whom to tell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_PROCESSES = Path("/proc")


def reload_hint(file: Path, processes: Path = _PROCESSES) -> str:
    """What to type for a running server to read this file again."""
    found = serving_with(file, processes)
    if found:
        return f"the running server reads the file again after: kill -HUP {' '.join(map(str, found))}"
    return "a running server reads the file again on SIGHUP: kill -HUP PID"


def serving_with(file: Path, processes: Path = _PROCESSES) -> list[int]:
    """The ids of those processes that were started with `serve ... --keys FILE`, as far as this user can see
    them; none where there is no /proc.
    """
    wanted = os.path.realpath(file)
    found = []
    for folder in processes.glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            given = _keys_of(arguments)
            if given and os.path.realpath(os.path.join(os.readlink(folder / "cwd"), given)) == wanted:
                found.append(int(folder.name))
        except OSError:  # it has ended, or is another user's
            continue
    return sorted(found)


def _keys_of(arguments: Sequence[str]) -> str:
    """The value of --keys of a `penstock serve`; empty for any other command line.

    That of a program which only starts it, such as `timeout` or `sudo`, ends with the same words, and a
    SIGHUP would end that.
    """
    program = os.path.basename(arguments[0])
    if not program.startswith(("python", "penstock")) or "serve" not in arguments:
        return ""
    before = arguments[: arguments.index("serve")]
    if not any(os.path.basename(part).startswith("penstock") for part in before):
        return ""
    for at, argument in enumerate(arguments):
        if argument == "--keys" and at + 1 < len(arguments):
            return arguments[at + 1]
        if argument.startswith("--keys="):
            return argument.removeprefix("--keys=")
    return ""
