"""Processes that the server starts for what callers write: templates and grammars.

Such a process sees neither the server's environment nor the directory in which the server was started, and it
ends when the server ends, in whatever way that happens. `confined` is what the process itself does for this.
"""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

_SOURCES = Path(__file__).parents[3]
"""The directory from which `penstock.runtime` was imported."""


class Child:
    """A process that runs one of our modules, and a connection to it.

    It is killed when this object is closed or dropped, and when the interpreter exits. If the server itself
    is killed, the kernel kills the child: the child has one end of a pipe, the `lifeline`, of which only the
    server has the other end.
    """

    def __init__(self, module: str) -> None:
        """Start `module` with the arguments that `confined.connect` reads. Raises OSError."""
        ours, theirs = Pipe()
        ends, lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                # -P: neither the working directory nor any script's goes on the import path.
                [sys.executable, "-P", "-X", "utf8", "-m", module, str(theirs.fileno()), str(ends)],
                pass_fds=[theirs.fileno(), ends],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # such as Rust's report of a panic, which is answered anyway
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the server alone
            )
        except BaseException:  # whatever kept the process from starting, nobody else would close these
            ours.close()
            os.close(lifeline)
            raise
        finally:
            theirs.close()
            os.close(ends)
        self.connection = ours
        self.close = weakref.finalize(self, _end, self._process, ours, lifeline)
        """Kills the process and all that it started, and waits for its end."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs. It may have ended by itself, or the kernel may have killed it for lack of
        memory.
        """
        return self._process.poll() is None


def import_path(entries: Sequence[str], working_directory: Path, sources: Path = _SOURCES) -> list[str]:
    """Return the directories in `entries`, a list like `sys.path`, from which a child may import.

    `python -m` puts the working directory there, in which anybody may put files: a numpy.py in it would run
    in the child. It stays in the list only if Penstock itself lies in it.
    """
    return [entry for entry in entries if entry and _is_ours(Path(entry), working_directory, sources)]


def _is_ours(entry: Path, working_directory: Path, sources: Path) -> bool:
    return entry.resolve() != working_directory.resolve() or entry.resolve() == sources.resolve()


def _environment() -> dict[str, str]:
    """Return the variables that importing the modules needs. The server's other variables may hold secrets,
    so they are left out.
    """
    linking = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    path = os.pathsep.join(import_path(sys.path, Path.cwd()))
    return {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | linking


def _end(process: subprocess.Popen[bytes], connection: Connection, lifeline: int) -> None:
    connection.close()
    os.close(lifeline)  # this also kills what the process started
    process.kill()
    process.wait()
