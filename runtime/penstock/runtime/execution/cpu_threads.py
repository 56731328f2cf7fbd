"""How many threads XLA's CPU pool has; the native kernels share it.

The number is one for the whole engine, by default what affinity mask and CPU quota leave
(`machine.processors`). The kernels' loops keep to it even in a pool that was there before and is larger.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import jax

from penstock.runtime.machine.processors import allowed_processors

log = logging.getLogger(__name__)

_SIZE = "PJRT_NPROC"
"""XLA reads this environment variable when a backend starts; there is no other way to set the size. Without
it the pool has a thread for each processor of the affinity mask, whatever the quota of CPU time
(xla/pjrt/utils.cc, DefaultThreadPoolSize)."""
_NAME = "tf_XLAEigen"
"""XLA's name for the pool's threads."""


def start_backends(threads: int, num_cpu_devices: int = 1) -> list[jax.Device]:
    """Start JAX's backends, the CPU's with this many threads and devices, and return the devices of the
    default one.

    Backends that run already keep the threads and devices they have; see `check_pool`.
    """
    if num_cpu_devices > 1:
        with contextlib.suppress(RuntimeError):  # the backends run already
            jax.config.update("jax_num_cpu_devices", num_cpu_devices)
    before = os.environ.get(_SIZE)
    os.environ[_SIZE] = str(threads)
    try:
        return jax.devices()
    finally:  # child processes must not inherit it
        if before is None:
            del os.environ[_SIZE]
        else:
            os.environ[_SIZE] = before


def check_pool(threads: int) -> None:
    """Log a warning if XLA's pool does not have this many threads."""
    size = pool_size()
    if size and size != threads:
        log.warning(
            "XLA's CPU pool has %d threads, where the engine was to have %d: JAX's CPU backend had started "
            "before it. Native kernels use no more than %d of them",
            size,
            threads,
            min(size, threads),
        )


def parts_of_loops() -> str:
    """Tell what XLA cuts the loops of a CPU's programs into parts for."""
    return f"{pool_size()} threads, {allowed_processors()} processors"


def pool_size() -> int:
    """Tell how many threads XLA's CPU pool has in this process; 0 if it has not started, or if that cannot be
    found out.
    """
    names = []
    for comm in Path("/proc/self/task").glob("*/comm"):
        try:
            names.append(comm.read_text().strip())
        except OSError:  # a thread that has ended meanwhile
            continue
    return names.count(_NAME)
