"""How many processors this process may use: its affinity mask and the CPU quotas of its cgroups. No jax."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def available_processors(root: Path = Path("/")) -> int:
    """Tell how many processors this process may use, at least 1: those of its affinity mask, or fewer if a
    quota of CPU time allows less.

    A quota of 1.5 processors counts as 2. `root` is the directory in which /proc and the cgroups' mount
    points are looked up.
    """
    return max(1, math.ceil(min((allowed_processors(), *_quotas(root)))))


def allowed_processors() -> int:
    """Tell how many processors this process's affinity mask has, whatever its quota of CPU time."""
    # macOS has no affinity masks.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[float]:
    """Read CPU quotas, in processors: those of the process's cgroups and of all cgroups above them, as far as
    they can be seen.
    """
    for folder in _cgroups(root):
        try:
            if (folder / "cpu.max").exists():  # version 2: "max 100000" or "150000 100000"
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text()  # -1: none
                period = (folder / "cpu.cfs_period_us").read_text()
            if quota != "max" and int(quota) > 0:
                yield int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            continue  # the root of version 2 has no such file


def _cgroups(root: Path) -> Iterator[Path]:
    """Yield the folders of the process's cgroups that control CPU time, from its own to the root of each
    mount.
    """
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    own = {}  # kind of file system to the path of the process's cgroup in its hierarchy
    for line in memberships:  # "4:cpu,cpuacct:/docker/12ab", or "0::/user.slice" for version 2
        number, controllers, path = line.split(":", 2)
        if number == "0":
            own["cgroup2"] = path
        elif "cpu" in controllers.split(","):
            own["cgroup"] = path
    for line in mounts:  # "32 31 0:29 /docker/12ab /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct"
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        if kind not in own or (kind == "cgroup" and "cpu" not in options.split(",")):
            continue
        mounted, point = fields.split()[3:5]
        try:
            # A mount may show a part of the hierarchy only: in a container that is often its own cgroup.
            inside = PurePosixPath(own[kind]).relative_to(mounted)
        except ValueError:
            inside = PurePosixPath()
        folder = root / point.lstrip("/")
        for part in (inside, *inside.parents):
            yield folder / part
