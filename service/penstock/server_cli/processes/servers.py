"""Finds the servers on this machine that read a file of keys, to tell the user how to make them read it
again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_PROCESSES = Path("/proc")


def reload_hint(file: Path, processes: Path = _PROCESSES) -> str:
    """Say what to type so that a running server reads this file again."""
    found = serving_with(file, processes)
    if found:
        return f"the running server reads the file again after: kill -HUP {' '.join(map(str, found))}"
    return "a running server reads the file again on SIGHUP: kill -HUP PID"


def serving_with(file: Path, processes: Path = _PROCESSES) -> list[int]:
    """List the ids of the processes that were started with `serve ... --keys FILE`, as far as this user can
    see them; none if there is no /proc.
    """
    wanted = os.path.realpath(file)
    found = []
    for folder in processes.glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            given = _keys_of(arguments)
            if given and os.path.realpath(os.path.join(os.readlink(folder / "cwd"), given)) == wanted:
                found.append(int(folder.name))
        except OSError:  # it has ended, or belongs to another user
            continue
    return sorted(found)


def _keys_of(arguments: Sequence[str]) -> str:
    """Return the value of --keys in the command line of `penstock serve`; empty for any other command line.

    A program that only starts it, such as `timeout` or `sudo`, has the same words in its command line, and
    SIGHUP would end that program.
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
