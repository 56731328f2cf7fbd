"""Has adapters written to where native kernels read them. On the host, one pass reads each tensor, checks it
and writes it while it is in the processor's cache (`src/adapters/packing_avx2.cc`). It holds no lock of
Python's, so that the engine's thread goes on. On the device, an adapter is written to its slot.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Mapping
from typing import Any, Final

import jax
import ml_dtypes
import numpy as np
from jax import Array
from numpy.typing import NDArray

from penstock.runtime.ops.native import library

BLOCK: Final = np.dtype(
    [
        *((name, np.int64) for name in ("source", "num_bytes", "dtype", "line", "is_b", "rank", "first")),
        *((name, np.int64) for name in ("count", "target", "stride")),
        ("scaling", np.float32),
        ("is_first", np.int32),
    ]
)
"""`PackedBlock` of src/adapters/packing.h, which explains the fields."""
CODES: Final[Mapping[np.dtype[Any], int]] = {
    np.dtype(ml_dtypes.bfloat16): 0,
    np.dtype(np.float16): 1,
    np.dtype(np.float32): 2,
}
"""The dtypes of tensors, as `PackedBlock` has them."""
IN_MEMORY: Final = -1
"""In place of a file's descriptor: the sources are addresses."""


class Packing(enum.IntEnum):
    """What came of it, as in src/adapters/packing.h."""

    PACKED = 0
    NOT_READ = 1
    NOT_FINITE = 2
    TOO_LARGE = 3
    NO_MEMORY = 4


def pack(file: int, blocks: NDArray[np.void]) -> tuple[Packing, int, int]:
    """Pack blocks of BLOCK; those of one tensor follow each other. file: a descriptor, or IN_MEMORY.

    Returns what came of it; then the first block of the tensor that is to blame; and for NOT_READ the errno,
    which is 0 if the file ended before the tensor did.
    """
    call = library.load().penstock_pack_adapter
    call.restype = ctypes.c_int64
    bad, error = ctypes.c_int64(), ctypes.c_int64()
    rows = ctypes.c_void_p(blocks.ctypes.data)
    made = call(file, rows, ctypes.c_int64(len(blocks)), ctypes.byref(bad), ctypes.byref(error))
    return Packing(made), bad.value, error.value


def native_write_row(pool: Array, slot: Array, values: Array) -> Array:
    """Do what `penstock.runtime.ops.adapters.write_row` does, in the pool's own memory. XLA for CPUs converts
    the whole pool to float32 and back.
    """
    library.load()
    shape = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    call = jax.ffi.ffi_call("penstock_row", shape, input_output_aliases={0: 0})
    written: Array = call(pool, slot, values)
    return written
