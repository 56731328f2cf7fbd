"""How many threads of XLA's CPU pool compute, which the native kernels share."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import jax

log = logging.getLogger(__name__)

_SIZE = "PJRT_NPROC"
"""XLA reads it from the environment as a backend starts, and can be told in no other way. Without it the pool
has a thread for each processor of the affinity mask, whatever the quota of CPU time (xla/pjrt/utils.cc,
DefaultThreadPoolSize)."""
_NAME = "tf_XLAEigen"
"""What XLA calls the pool's threads."""


def start_backends(threads: int) -> list[jax.Device]:
    """Start JAX's backends, that of the CPU with so many threads, and return the default one's devices.

    Backends that run already keep what they have; see `check_pool`.
    """
    before = os.environ.get(_SIZE)
    os.environ[_SIZE] = str(threads)
    try:
        return jax.devices()
    finally:  # child processes are not to have it
        if before is None:
            del os.environ[_SIZE]
        else:
            os.environ[_SIZE] = before


def check_pool(threads: int) -> None:
    """Log a warning if XLA's pool has not so many threads."""
    size = pool_size()
    if size and size != threads:
        log.warning(
            "XLA's CPU pool has %d threads, where the engine was to have %d: JAX's CPU backend had started "
            "before it. Native kernels use no more than %d of them",
            size,
            threads,
            min(size, threads),
        )


def pool_size() -> int:
    """Threads of XLA's CPU pool in this process; 0 where it has not started, or it cannot be told."""
    names = []
    for comm in Path("/proc/self/task").glob("*/comm"):
        try:
            names.append(comm.read_text().strip())
        except OSError:  # a thread that has ended meanwhile
            continue
    return names.count(_NAME)
