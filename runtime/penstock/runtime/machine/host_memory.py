"""Host memory for weights, which is taken from the operating system, and given back to it, in whole arrays.

Memory from malloc would consist of small pages until Linux is asked to collapse them (a quarter of a second
for each GiB), and would mostly stay with the process after it is freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import mmap
import sys

import numpy as np
import numpy.typing as npt

_HUGE = 2 * 2**20


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """Make zeros like numpy's `zeros`, but the memory goes back to the system with the last view of it. A
    large array begins at a huge page, and Linux is asked for huge pages before the first of them is touched.
    """
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _HUGE or not sys.platform.startswith("linux"):
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, num_bytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    data = np.frombuffer(memory, np.uint8)
    begin = -data.ctypes.data % _HUGE
    with contextlib.suppress(OSError):  # if the kernel has no huge pages, small ones serve too
        # Whole huge pages only, because the rest of the last one would be wasted.
        memory.madvise(mmap.MADV_HUGEPAGE, begin, num_bytes // _HUGE * _HUGE)
    return data[begin : begin + num_bytes].view(dtype).reshape(shape)


def let_go() -> None:
    """Free the host memory of arrays that are gone. JAX lets go of memory that it took in place only during a
    garbage collection; a collection of the youngest objects, which takes some microseconds, is enough.
    """
    gc.collect(0)


def give_back() -> None:
    """Make malloc return unused memory to the system. Never fails: without glibc it does nothing."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
