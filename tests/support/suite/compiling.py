"""How the suite's own processes compile: fewer programs for an engine, and each program once for all workers.

Who needs a program looks for its file, and writes that when the program is compiled: an engine in the files
of `program_store`, and JAX in its cache on disk. Two workers often start the same engine at the same time.
Both would find nothing, and each would compile everything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax._src import compiler
from jax._src.lru_cache import LRUCache

from penstock.runtime import building
from penstock.runtime.execution import program_store
from penstock.runtime.execution.buckets import NATIVE_TOKEN_GROWTH, Buckets
from tests.support.models.compilation_cache import TEST_CACHE
from tests.support.suite import disk, quick_xla

LOCKS = Path(tempfile.gettempdir()) / "penstock-tests-locks"
MOST_WAIT_S = 120.0
"""A worker that has waited so long compiles the program itself."""
FEWEST_TOKENS = 128
"""Of engines that are compiled quickly, steps with fewer tokens of prompts run in the program of so many."""


def compile_less() -> None:
    """From now on the engines of this process have few programs, and wait for those that others compile."""
    _ask_xla()
    mock.patch.object(building, "TOKEN_GROWTH", NATIVE_TOKEN_GROWTH).start()
    _make_fewer_buckets()
    LOCKS.mkdir(exist_ok=True)
    disk.remove_unused(LOCKS.iterdir())  # of processes that were killed
    disk.keep_newest(TEST_CACHE)
    held: dict[str, int] = {}
    _lock_jax(held)
    _lock_files(held)


def _release(held: dict[str, int], key: str) -> None:
    """Give up the lock. Whoever has waited for it, and whoever makes it anew, finds the program."""
    (LOCKS / key).unlink(missing_ok=True)
    os.close(held.pop(key))


def _lock_jax(held: dict[str, int]) -> None:
    """Lock what JAX looks for in its cache and does not find."""
    look_up = LRUCache.get

    def get(cache: Any, key: str) -> bytes | None:
        """Return the program, and note that it was used, so that `keep_newest` keeps it."""
        found: bytes | None = look_up(cache, key)
        if found is not None:
            with contextlib.suppress(OSError):  # it may be another user's
                os.utime(cache.path / f"{key}-cache")
        return found

    def locked_get(self: Any, key: str) -> bytes | None:
        """As `get`. After None, this process holds the lock of the key until `put`."""
        found = get(self, key)
        if found is None and key not in held:
            held[key] = _wait(LOCKS / key)
            found = get(self, key)
            if found is not None:
                _release(held, key)
        return found

    def unlocking_put(self: Any, key: str, value: bytes) -> None:
        half = self.path / f"{key}.{os.getpid()}"
        half.write_bytes(value)
        half.rename(self.path / f"{key}-cache")  # at once, because who reads does not hold the lock
        if key in held:
            _release(held, key)

    mock.patch.multiple(LRUCache, get=locked_get, put=unlocking_put).start()


def _lock_files(held: dict[str, int]) -> None:
    """Lock the files of programs that engines look for and do not find."""
    read, write, prune = program_store._read_program, program_store._write, program_store.prune

    def locked_read(file: Path, *others: Any) -> jax.stages.Compiled | None:
        """As `_read_program`. After None, this process holds the lock of the file until `_write`."""
        found = read(file, *others)
        if found is None and file.name not in held:
            held[file.name] = _wait(LOCKS / file.name)
            found = read(file, *others)
            if found is not None:
                _release(held, file.name)
        return found

    def unlocking_write(file: Path, data: bytes) -> None:
        try:
            write(file, data)
        finally:  # where the disk is full, the others compile it themselves at once
            if file.name in held:
                _release(held, file.name)

    def prune_others(folder: Path) -> None:
        """Leave the folder of the suite alone, which `keep_newest` has seen to."""
        if folder != TEST_CACHE:
            prune(folder)

    mock.patch.multiple(
        program_store, _read_program=locked_read, _write=unlocking_write, prune=prune_others
    ).start()


def _wait(path: Path) -> int:
    """Return a file descriptor that holds the lock, unless nobody gave it up in MOST_WAIT_S."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT)
    until = time.monotonic() + MOST_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(0.02)
                continue
        return lock


def _ask_xla() -> None:
    """From now on each program is compiled as `optimize` has said last. XLA itself reads XLA_FLAGS only once
    in a process, which is here.
    """
    os.environ.update(quick_xla.environment(users=False))
    make = compiler.get_compile_options
    make(num_replicas=1, num_partitions=1)

    def made(*arguments: Any, **named: Any) -> Any:
        options = make(*arguments, **named)
        on_cpu = getattr(named.get("backend"), "platform", "") == "cpu"
        if on_cpu and not is_quick():
            options.env_option_overrides = [*options.env_option_overrides, *quick_xla.USERS.items()]
        return options

    mock.patch.object(compiler, "get_compile_options", made).start()


def _make_fewer_buckets() -> None:
    """While programs are compiled quickly, small engines have one program of steps with prompts."""
    make = building._buckets

    def made(*arguments: Any) -> Buckets:
        buckets = make(*arguments)
        if not is_quick():
            return buckets
        *smaller, largest = buckets.token_buckets
        kept = [size for size in smaller if size >= FEWEST_TOKENS]
        return dataclasses.replace(buckets, token_buckets=(*kept, largest))

    mock.patch.object(building, "_buckets", made).start()


def is_quick() -> bool:
    """Say whether programs are compiled quickly now."""
    quick: bool = jax.config.read("jax_disable_most_optimizations")
    return quick


def optimize(wanted: bool) -> None:
    """Say whether XLA compiles as it does for users, in this process and in those that it starts.

    Without, XLA compiles in a third of the time. What was compiled otherwise is forgotten.
    """
    os.environ.update(quick_xla.environment(users=wanted))
    if is_quick() == wanted:
        jax.config.update("jax_disable_most_optimizations", not wanted)
        jax.clear_caches()
