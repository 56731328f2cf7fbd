"""The digest of the values of an adapter. They are hashed in pieces, because native code hashes 16 of these
at once (`src/hashing/`), which takes less than half of the time. Where the process has no native code the
digest is the same.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.ops.native import library

PIECE_BYTES: Final = 16384
_HASH_BYTES: Final = 32


def digest_of_values(values: NDArray[Any]) -> str:
    """Compute the SHA-256 of the SHA-256s of the pieces of an array, one behind the other, in hexadecimal. A
    piece has PIECE_BYTES bytes, and the last one what is left.
    """
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    native = library.loaded()
    hashes = b"" if native is None else _natively(native, data)
    whole = hashlib.sha256(hashes)
    for begin in range(len(hashes) // _HASH_BYTES * PIECE_BYTES, len(data), PIECE_BYTES):
        whole.update(hashlib.sha256(data[begin : begin + PIECE_BYTES].data).digest())
    return whole.hexdigest()


def _natively(native: ctypes.CDLL, data: NDArray[np.uint8]) -> bytes:
    """Return the hashes of the first pieces, of as many as native code hashes."""
    count = len(data) // PIECE_BYTES
    hashes = np.empty(count * _HASH_BYTES, np.uint8)
    call = native.penstock_hash_pieces
    call.restype = ctypes.c_int64
    size, of_all = ctypes.c_int64(PIECE_BYTES), ctypes.c_int64(count)
    done = call(ctypes.c_void_p(data.ctypes.data), size, of_all, ctypes.c_void_p(hashes.ctypes.data))
    return hashes[: done * _HASH_BYTES].tobytes()
