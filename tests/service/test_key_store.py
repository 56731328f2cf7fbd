"""The file of keys on disk: changed whole or not at all, by one at a time."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from pathlib import Path

import pytest

from penstock.runtime.errors import ConfigError
from penstock.service.key_file import KeyEntry
from penstock.service.key_store import change_keys, digest_of, exposed, new_secret, read_keys


def key(name: str) -> KeyEntry:
    return KeyEntry(name, digest_of(name))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def add(file: Path, name: str) -> None:
    change_keys(file, lambda entries: [*entries, key(name)])


def test_a_new_file_is_its_owners_only(file):
    before = os.umask(0)
    try:
        add(file, "a")
    finally:
        os.umask(before)
    assert mode(file) == 0o600
    assert mode(file.with_name("keys.json.lock")) == 0o600
    assert read_keys(file) == (key("a"),)
    assert exposed(file) == ""


@pytest.mark.parametrize(("given", "kept"), [(0o640, 0o640), (0o644, 0o640), (0o666, 0o640), (0o600, 0o600)])
def test_a_group_that_may_read_stays(file, given, kept):
    """A server of another user goes on reading; what was open to all is not any more."""
    add(file, "a")
    file.chmod(given)
    add(file, "b")
    assert mode(file) == kept
    assert [entry.id for entry in read_keys(file)] == ["a", "b"]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [(0o644, "can be read by everybody"), (0o660, "can be written"), (0o602, "can be written"), (0o640, "")],
)
def test_an_exposed_file_is_told(file, given, complaint):
    add(file, "a")
    file.chmod(given)
    assert complaint in exposed(file)
    assert bool(exposed(file)) == bool(complaint)


def test_a_change_that_is_refused_changes_nothing(file):
    add(file, "a")
    before = file.read_bytes()

    def refuse(entries):
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        change_keys(file, refuse)
    assert file.read_bytes() == before
    assert sorted(path.name for path in file.parent.iterdir()) == ["keys.json", "keys.json.lock"]


def test_what_breaks_before_the_end_leaves_the_old_file(file, monkeypatch):
    add(file, "a")
    before = file.read_bytes()

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"keys\.json cannot be written: No space left"):
        add(file, "b")
    assert file.read_bytes() == before
    assert sorted(path.name for path in file.parent.iterdir()) == ["keys.json", "keys.json.lock"]


def test_two_at_once_lose_nothing(file):
    """Each reads, waits for the other to have begun, and writes: without a lock one of the two would be
    lost.
    """
    both_inside = threading.Barrier(2)

    def slow(name: str):
        def change(entries):
            with contextlib.suppress(threading.BrokenBarrierError):
                both_inside.wait(0.5)  # in vain where the lock keeps the other out
            return [*entries, key(name)]

        return change

    threads = [threading.Thread(target=change_keys, args=(file, slow(name))) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {entry.id for entry in read_keys(file)} == {"a", "b"}


def test_readers_never_see_half_a_file(file):
    """Whoever opened the old file reads it to its end: the new one is another file."""
    add(file, "a")
    with file.open() as open_before:
        number = file.stat().st_ino
        add(file, "b")
        assert file.stat().st_ino != number
        assert '"b"' not in open_before.read()


def test_a_link_stays_a_link(file, tmp_path):
    add(file, "a")
    link = tmp_path / "link.json"
    link.symlink_to(file)
    add(link, "b")
    assert link.is_symlink()
    assert len(read_keys(file)) == 2


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"\xff", "not UTF-8"), (b"{", "not JSON"), (b" " * (16 * 1024 * 1024 + 1), "more than 16777216 bytes")],
)
def test_a_bad_file_is_named_and_left_alone(file, content, complaint):
    file.write_bytes(content)
    for action in (lambda: read_keys(file), lambda: add(file, "a")):
        with pytest.raises(ConfigError, match=complaint) as caught:
            action()
        assert str(file) in str(caught.value)
    assert file.read_bytes() == content


def test_a_missing_file_or_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json cannot be read: No such file"):
        read_keys(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        add(tmp_path / "none" / "keys.json", "a")


def test_secrets_are_long_random_and_tell_whose_they_are():
    one, two = new_secret("alice"), new_secret("alice")
    assert one != two
    assert one.startswith("psk_alice_")
    assert len(one.removeprefix("psk_alice_")) == 43  # 256 bits, six a character
    assert digest_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
