"""How many processors may be used, determined from made-up cgroup files of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.runtime.machine.processors import available_processors

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct"


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def machine(root: Path, cgroup: str, mounts: str, files: dict[str, str]) -> Path:
    """Make a root directory with these files; their paths are relative to it."""
    for name, text in {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def v1(folder: str, quota: int, period: int = 100_000) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": str(quota), f"{folder}/cpu.cfs_period_us": str(period)}


@pytest.mark.parametrize(
    ("limit", "count"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("1000 100000", 1),
        ("3200000 100000", 8),
        ("25000 10000", 3),
        ("nonsense", 8),
        ("100000 0", 8),
    ],
)
def test_version_2(tmp_path: Path, limit: str, count: int) -> None:
    files = {"sys/fs/cgroup/app.slice/cpu.max": limit}
    assert available_processors(machine(tmp_path, "0::/app.slice", V2_MOUNT, files)) == count


@pytest.mark.parametrize(("quota", "count"), [(-1, 8), (0, 8), (300_000, 3), (50_000, 1), (210_000, 3)])
def test_version_1(tmp_path: Path, quota: int, count: int) -> None:
    root = machine(
        tmp_path,
        "5:memory:/app\n4:cpuset,cpu,cpuacct:/app",
        V1_MOUNT,
        v1("sys/fs/cgroup/cpu,cpuacct/app", quota),
    )
    assert available_processors(root) == count


def test_the_least_quota_of_all_cgroups_above_counts(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/cpu.max": "600000 100000",
        "sys/fs/cgroup/a/cpu.max": "400000 100000",
        "sys/fs/cgroup/a/b/cpu.max": "max 100000",
        "sys/fs/cgroup/a/b/c/cpu.max": "700000 100000",
        "sys/fs/cgroup/other/cpu.max": "100000 100000",
    }
    assert available_processors(machine(tmp_path, "0::/a/b/c", V2_MOUNT, files)) == 4


def test_a_container_sees_its_own_cgroup_as_the_mount(tmp_path: Path) -> None:
    """Without a cgroup namespace, /proc names a path that the container cannot see."""
    mount = V1_MOUNT.replace(" / /sys", " /docker/12ab /sys")
    files = v1("sys/fs/cgroup/cpu,cpuacct", 500_000) | v1("sys/fs/cgroup/cpu,cpuacct/inner", 300_000)
    root = machine(tmp_path, "4:cpu,cpuacct:/docker/12ab", mount, files)
    assert available_processors(root) == 5
    (root / "proc/self/cgroup").write_text("4:cpu,cpuacct:/docker/12ab/inner\n")
    assert available_processors(root) == 3
    (root / "proc/self/cgroup").write_text("4:cpu,cpuacct:/elsewhere\n")
    assert available_processors(root) == 5


def test_both_versions_at_once(tmp_path: Path) -> None:
    """Systemd's hybrid layout has both."""
    mounts = V1_MOUNT + "\n" + V2_MOUNT.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")
    root = machine(tmp_path, "4:cpu:/app\n0::/app", mounts, v1("sys/fs/cgroup/cpu,cpuacct/app", 200_000))
    assert available_processors(root) == 2
    unified = root / "sys/fs/cgroup/unified/app"
    unified.mkdir(parents=True)
    (unified / "cpu.max").write_text("100000 100000\n")
    assert available_processors(root) == 1


def test_without_cgroups_the_affinity_mask_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_processors(tmp_path) == 8
    assert available_processors(machine(tmp_path, "0::/", V2_MOUNT, {})) == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})
    assert available_processors(tmp_path) == 1
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert available_processors(tmp_path) == 6
