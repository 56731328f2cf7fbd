"""Memory of the host for weights, taken from and given back to the operating system in whole arrays.

What malloc gives would be of small pages until Linux is asked to collapse them (a quarter of a second a GiB),
and would mostly stay with the process when it is freed.
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
    """Like numpy's, but the memory goes back to the system with the last view of it. Where it is large it
    begins at a huge page, and Linux is asked for huge pages before the first is touched.
    """
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _HUGE or not sys.platform.startswith("linux"):
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, num_bytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    data = np.frombuffer(memory, np.uint8)
    begin = -data.ctypes.data % _HUGE
    with contextlib.suppress(OSError):  # a kernel without them: small pages serve as well
        # Whole ones only: the rest of the last would be memory that holds nothing.
        memory.madvise(mmap.MADV_HUGEPAGE, begin, num_bytes // _HUGE * _HUGE)
    return data[begin : begin + num_bytes].view(dtype).reshape(shape)


def let_go() -> None:
    """Free what arrays that are gone were made of: JAX lets go of host memory that it took as it was only in
    a collection of garbage, and one of the youngest objects, some microseconds, will do.
    """
    gc.collect(0)


def give_back() -> None:
    """Have malloc return what it holds and nobody uses to the system. Never fails: without glibc it does
    nothing.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
