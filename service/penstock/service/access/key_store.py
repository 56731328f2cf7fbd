"""The file of keys on disk: read with a look at who else may read it, changed whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.runtime.errors import ConfigError
from penstock.service.access.key_file import KeyEntry, format_keys, parse_keys

MAX_BYTES = 16 * 1024 * 1024
SECRET_BYTES = 32
Change = Callable[[tuple[KeyEntry, ...]], Sequence[KeyEntry]]


def new_secret(key_id: str) -> str:
    """256 random bits behind a prefix that scanners for leaked secrets, and people, can tell apart."""
    return f"psk_{key_id}_{secrets.token_urlsafe(SECRET_BYTES)}"


def digest_of(secret: str) -> str:
    """What the file keeps of a secret; `key_file` says why no more is needed."""
    return hashlib.sha256(secret.encode()).hexdigest()


def read_keys(path: Path) -> tuple[KeyEntry, ...]:
    """The file's entries. ConfigError, which names the file, where it cannot be read or is not right."""
    try:
        # Without O_NONBLOCK, to open a FIFO would wait for a writer, maybe for ever.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"keys: {path} is no regular file")
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"keys: {path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"keys: {path} has more than {MAX_BYTES} bytes")
    try:
        return parse_keys(data.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"keys: {path}: not UTF-8: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"keys: {path}: {error}") from error


def exposed(path: Path) -> str:
    """What is wrong with who may read or write the file, in words; empty if nothing is.

    A group that may read it is fine: that is how containers are given secrets.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:  # it is gone, and with it the question
        return ""
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} can be written by others (mode {mode:04o}), who can let themselves in: chmod 600"
    if mode & stat.S_IROTH:
        return f"{path} can be read by everybody (mode {mode:04o}): chmod 600"
    return ""


def change_keys(path: Path, change: Change) -> None:
    """Replace the file's entries by what `change` makes of them; a file that is missing has none.

    Readers find the old file or the new one, whole, also after a crash. Two changes at once are made one
    after the other. ConfigError where the file is not right or cannot be written, or where those who may read
    it now, such as the server, could not read the new one.
    """
    path = path.resolve()  # a link stays one
    try:
        # Before the lock is made: one of another user would keep the owner out.
        if path.exists() and os.geteuid() not in (0, owner := path.stat().st_uid):
            raise _strangers(path, owner)
        # The lock is a file of its own: the one with the keys is another one after each change.
        with path.with_name(path.name + ".lock").open("a") as lock:
            os.chmod(lock.fileno(), 0o600)
            if path.exists():
                with contextlib.suppress(OSError):  # it only spares the owner a refusal
                    os.fchown(lock.fileno(), path.stat().st_uid, -1)
            fcntl.flock(lock, fcntl.LOCK_EX)
            _replace(path, format_keys(change(read_keys(path) if path.exists() else ())))
    except OSError as error:
        raise ConfigError(f"keys: {path} cannot be written: {error.strerror}") from error


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            if path.exists():
                _keep_access(path, handle)
            os.fsync(handle)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too, must outlive a crash
    finally:
        os.close(folder)


def _keep_access(path: Path, handle: int) -> None:
    """Owner, group and mode stay: the server may run as another user than who adds keys, and then reads the
    file as a member of its group or as anybody. A mode that lets in too many is told by `exposed`.

    ConfigError where they cannot stay. A server that cannot read the file keeps the keys it has, so a key
    would be called revoked and be good all the same.
    """
    before = path.stat()
    mode = stat.S_IMODE(before.st_mode) & 0o777
    with contextlib.suppress(OSError):  # only root may give a file to a group of others
        os.fchown(handle, -1, before.st_gid)
    if mode & stat.S_IRWXG and os.fstat(handle).st_gid != before.st_gid:
        raise ConfigError(
            f"keys: {path} was not changed: group {before.st_gid} may use it, and user {os.geteuid()} "
            f"cannot give that group a new file; do it as root or as a member of the group"
        )
    os.fchmod(handle, mode)
    with contextlib.suppress(OSError):  # only root may give a file away
        os.fchown(handle, before.st_uid, -1)
    if os.fstat(handle).st_uid != before.st_uid:
        raise _strangers(path, before.st_uid)


def _strangers(path: Path, owner: int) -> ConfigError:
    return ConfigError(
        f"keys: {path} was not changed: it belongs to user {owner}, and a file that user {os.geteuid()} "
        f"writes might not be readable for the server any more; do it as user {owner} or as root"
    )
