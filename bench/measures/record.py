"""Records of runs: one JSON object per line, with everything that is needed to judge or repeat a run.

It needs only the standard library, because the runners of other engines use it in their own environments.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Describe the processor, the relevant parts of its instruction set, the cores that this process may use,
    and the memory in bytes.
    """
    info = _lines(Path("/proc/cpuinfo"))
    flags = set(info.get("flags", "").split())
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")
    return {
        "cpu": info.get("model name", platform.processor()),
        "cpu_flags": [flag for flag in wanted if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the git commit of the sources, with "+" if they differ from it; empty without git."""
    here = Path(__file__).parent
    try:
        head = _git(here, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(folder: Path, *args: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *args], check=True, capture_output=True, text=True
    ).stdout.strip()


def own_peak_rss_bytes() -> int:
    """Return the most memory that this process, or any single child that has ended, ever held."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(kind).ru_maxrss for kind in kinds) * 1024


def peak_rss_bytes(pid: int) -> int:
    """Return the peak memory of a running process and of its children, each at its own peak, added up; 0 if
    it is gone.
    """
    return sum(_peak(each) for each in [pid, *children(pid)])


def _peak(pid: int) -> int:
    return int(_lines(Path(f"/proc/{pid}/status")).get("VmHWM", "0 kB").split()[0]) * 1024


def children(pid: int) -> list[int]:
    """List the ids of all descendants of a process."""
    parents: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        fields = _lines(status)
        if "PPid" in fields:
            parents.setdefault(int(fields["PPid"]), []).append(int(status.parent.name))
    found, queue = [], [pid]
    while queue:
        below = parents.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _lines(file: Path) -> dict[str, str]:
    """Read the `name: value` lines of a file, the first of each name; empty if the file is gone."""
    found: dict[str, str] = {}
    try:
        text = file.read_text()
    except OSError:  # a process may end at any moment
        return found
    for line in text.splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found


def write_line(file: Path, record: dict[str, Any]) -> None:
    """Append one record. The folder is created if needed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(record, default=str) + "\n")


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Read all records of a file."""
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)
