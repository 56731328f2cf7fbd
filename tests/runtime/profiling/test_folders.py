"""The folders of profiles: their names, and which are kept."""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path

from penstock.runtime.profiling import folders

NOON = dt.datetime(2026, 11, 22, 12, 0, 0, tzinfo=dt.UTC)


def profile(parent: Path, now: dt.datetime = NOON) -> Path:
    unfinished = folders.new_folder(parent, now)
    (unfinished / "trace").write_bytes(b"12345")
    return folders.finished(unfinished)


def test_folders_of_one_second_do_not_collide(tmp_path: Path) -> None:
    parent = tmp_path / "made" / "here"
    begun = folders.new_folder(parent, NOON)  # another process's, say
    made = [profile(parent) for _ in range(3)]
    assert [folder.name for folder in made] == [f"profile-20261122T120000-00{i}" for i in (1, 2, 3)]
    assert folders.final_path(begun).name == "profile-20261122T120000-000"
    assert made[0].stat().st_mode & 0o077 == 0
    assert folders.size_of(parent) == 15


def test_only_the_newest_profiles_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    made = [profile(tmp_path, NOON + dt.timedelta(days=day)) for day in range(5)]
    outside = tmp_path.parent / "profile-20200101T000000-000"
    outside.mkdir(exist_ok=True)
    (tmp_path / "profile-20200101T000000-000").symlink_to(outside)
    (tmp_path / "profile-of-mine").mkdir()
    (tmp_path / "profile-20200101T000000-001").write_text("a file")
    folders.keep_newest(made[4], 2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(
        [
            made[3].name,
            made[4].name,
            "profile-20200101T000000-000",
            "profile-20200101T000000-001",
            "profile-of-mine",
        ]
    )
    assert outside.exists()


def test_what_a_dead_process_left_is_removed_and_what_another_writes_is_not(tmp_path: Path) -> None:
    left, written = folders.new_folder(tmp_path, NOON), folders.new_folder(tmp_path, NOON)
    os.utime(left, (0, 0))
    new = profile(tmp_path)
    folders.keep_newest(new, 10)
    assert sorted(tmp_path.iterdir()) == sorted([written, new])


def test_what_was_just_written_is_kept_also_if_the_clock_was_set_back(tmp_path: Path) -> None:
    made = [profile(tmp_path, NOON - dt.timedelta(days=day)) for day in range(3)]
    folders.keep_newest(made[2], 2)
    assert sorted(tmp_path.iterdir()) == sorted([made[0], made[2]])
    folders.keep_newest(made[2], 1)
    assert list(tmp_path.iterdir()) == [made[2]]
