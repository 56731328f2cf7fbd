"""The file of keys on disk: changed as a whole or not at all, and by one process at a time."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.runtime.errors import ConfigError
from penstock.service.access.key_file import KeyEntry
from penstock.service.access.key_store import change_keys, digest_of, exposed, new_secret, read_keys


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


@pytest.mark.parametrize("given", [0o600, 0o640, 0o644, 0o604, 0o660, 0o666])
def test_the_mode_stays(file, given):
    """A server that runs as another user can still read it, as a member of the group or as any user."""
    add(file, "a")
    file.chmod(given)
    before = os.umask(0o077)
    try:
        add(file, "b")
    finally:
        os.umask(before)
    assert mode(file) == given
    assert [entry.id for entry in read_keys(file)] == ["a", "b"]


@contextlib.contextmanager
def as_user(uid: int, gid: int) -> Iterator[None]:
    """Run as another user, which only root can."""
    os.setegid(gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be several users")


@pytest.fixture
def shared() -> Iterator[Path]:
    """Yield a file of keys of user 1001 that group 1002 may read, in a folder where everybody may write."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        path = folder / "keys.json"
        add(path, "a")
        path.with_name("keys.json.lock").unlink()
        path.chmod(0o640)
        os.chown(path, 1001, 1002)
        yield path


def access(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)


@root_only
@pytest.mark.parametrize(
    ("uid", "gid", "mode", "way"),
    [
        (65534, 65534, 0o644, "belongs to user 1001, .* do it as user 1001 or as root"),
        (65534, 1002, 0o640, "belongs to user 1001, .* do it as user 1001 or as root"),
        (1001, 1001, 0o640, "group 1002 may use it, .* do it as root or as a member of the group"),
    ],
)
def test_a_change_after_which_the_server_could_not_read_is_refused(shared, uid, gid, mode, way):
    """Otherwise a server would keep a key that the command reported as revoked."""
    shared.chmod(mode)
    before, number = shared.read_bytes(), shared.stat().st_ino
    with as_user(uid, gid), pytest.raises(ConfigError, match=f"was not changed: .*{way}"):
        add(shared, "b")
    assert shared.read_bytes() == before
    assert shared.stat().st_ino == number
    assert access(shared) == (1001, 1002, mode)
    left = {path.name for path in shared.parent.iterdir()}
    assert left <= {"keys.json", "keys.json.lock"}
    with as_user(1001, 1002):
        add(shared, "b")  # as the message says
    assert access(shared) == (1001, 1002, mode)
    assert [entry.id for entry in read_keys(shared)] == ["a", "b"]


@root_only
def test_a_server_that_reads_as_anybody_goes_on_reading(shared):
    shared.chmod(0o644)
    with as_user(1001, 1002):
        add(shared, "b")
    with as_user(65534, 65534):
        assert [entry.id for entry in read_keys(shared)] == ["a", "b"]


@root_only
def test_who_is_no_member_of_a_group_that_cannot_read_may_change(shared):
    shared.chmod(0o600)
    with as_user(1001, 1001):
        add(shared, "b")
    assert access(shared) == (1001, 1001, 0o600)


@root_only
def test_after_root_the_owner_may_still_change(shared):
    add(shared, "b")
    assert access(shared) == (1001, 1002, 0o640)
    with as_user(1001, 1002):
        add(shared, "c")
    assert [entry.id for entry in read_keys(shared)] == ["a", "b", "c"]


@pytest.mark.parametrize(("way", "kept"), [("owner", False), ("group", False), ("neither", True)])
def test_what_cannot_be_kept_is_told_by_any_user(file, monkeypatch, way, kept):
    """As above, for a user who cannot become others: the old file is made to look like another user's."""
    add(file, "a")
    file.chmod(0o640)
    before, stat_of, own = file.read_bytes(), Path.stat, os.getuid()

    def other(self, **more):
        found = list(stat_of(self, **more))
        if self.name == "keys.json" and way != "neither":
            found[4 if way == "owner" else 5] += 4321
        return os.stat_result(found)

    def forbidden(handle, uid, gid):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", forbidden)
    monkeypatch.setattr(Path, "stat", other)
    if kept:
        add(file, "b")
        assert mode(file) == 0o640
    else:
        with pytest.raises(ConfigError, match=r"keys\.json was not changed"):
            add(file, "b")
        assert file.read_bytes() == before
    assert os.stat(file).st_uid == own


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
    """Each reads, waits until the other has begun, and writes. Without a lock one of the two changes would be
    lost.
    """
    both_inside = threading.Barrier(2)

    def slow(name: str):
        def change(entries):
            with contextlib.suppress(threading.BrokenBarrierError):
                both_inside.wait(0.5)  # in vain, because the lock keeps the other out
            return [*entries, key(name)]

        return change

    threads = [threading.Thread(target=change_keys, args=(file, slow(name))) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {entry.id for entry in read_keys(file)} == {"a", "b"}


def test_readers_never_see_half_a_file(file):
    """A reader that opened the old file reads it to its end, because the new one is another file."""
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


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, kind):
    """Opening a FIFO would wait for a writer for ever, and a device may have no end."""
    path = tmp_path / "keys.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path = Path("/dev/zero")
    caught: list[ConfigError] = []

    def read() -> None:
        try:
            read_keys(path)
        except ConfigError as error:
            caught.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(20)
    assert len(caught) == 1, "it waits"
    assert str(path) in str(caught[0])
    assert "no regular file" in str(caught[0]) or kind == "folder"


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
