"""The file of keys on disk: reads it, checks who else may read it, and changes it as a whole or
not at all.
"""

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
    """Make a key of 256 random bits. Its prefix lets people, and scanners for leaked secrets,
    recognize it.
    """
    return f"psk_{key_id}_{secrets.token_urlsafe(SECRET_BYTES)}"


def digest_of(secret: str) -> str:
    """Compute the digest of a secret, which is all that the file keeps; `key_file` says why that is
    enough.
    """
    return hashlib.sha256(secret.encode()).hexdigest()


def read_keys(path: Path) -> tuple[KeyEntry, ...]:
    """Read the file's entries. Raises ConfigError, which names the file, if it cannot be read or is not
    right.
    """
    try:
        # Without O_NONBLOCK opening a FIFO would wait for a writer, maybe for ever.
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
    """Say what is wrong with who may read or write the file; return an empty text if nothing is.

    A group may read it, because that is how containers are given secrets.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:  # the file is gone
        return ""
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} can be written by others (mode {mode:04o}), who can let themselves in: chmod 600"
    if mode & stat.S_IROTH:
        return f"{path} can be read by everybody (mode {mode:04o}): chmod 600"
    return ""


def change_keys(path: Path, change: Change) -> None:
    """Replace the file's entries by what `change` returns for them; a missing file has none.

    Readers see the old file or the new one, never a part, even after a crash. Two changes at once are made
    one after the other. Raises ConfigError if the file is not right or cannot be written, or if somebody who
    may read it now, such as the server, could not read the new one.
    """
    path = path.resolve()  # a symbolic link is kept
    try:
        # Checked before the lock is made: a lock that belongs to another user would keep the owner out.
        if path.exists() and os.geteuid() not in (0, owner := path.stat().st_uid):
            raise _strangers(path, owner)
        # The lock is a separate file, because the file of keys is a new file after each change.
        with path.with_name(path.name + ".lock").open("a") as lock:
            os.chmod(lock.fileno(), 0o600)
            if path.exists():
                with contextlib.suppress(OSError):  # this only saves the owner a refusal
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
    except BaseException:  # whatever it is, no half-written file stays
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too, must survive a crash
    finally:
        os.close(folder)


def _keep_access(path: Path, handle: int) -> None:
    """Give the new file the owner, group and mode of the old one: the server may run as another user than the
    person who adds keys, and then reads the file as a member of its group or as anybody. `exposed` warns of a
    mode that is too open.

    Raises ConfigError if that is not possible. A server that cannot read the file keeps the keys it has, so a
    revoked key would still work.
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
