"""Finds the merges of a SentencePiece vocabulary in native code (`src/vocabulary/`). Gemma's has half a
million, for which a loop in Python takes a second of a server's start.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.runtime.ops.native import library


def find_merges(pieces: Sequence[str], scores: npt.NDArray[np.float64]) -> npt.NDArray[np.int32] | None:
    """Return which two pieces, one behind the other, are a piece: their places in `pieces`, [merges, 2]. The
    piece of the highest score comes first; of equal ones that with the longer left part, and then by the
    texts. The pieces must differ, and none may be empty.

    Returns None where the process has no native code, or if a score is not a number.
    """
    native = library.loaded()
    if native is None or not len(pieces) or np.isnan(scores).any():
        return None
    texts = [piece.encode() for piece in pieces]
    joined = b"".join(texts)
    ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
    found = np.empty((sum(map(len, pieces)) - len(pieces), 2), np.int32)
    scores = np.ascontiguousarray(scores)
    call = native.penstock_find_merges
    call.restype = ctypes.c_int64
    count = call(
        ctypes.c_char_p(joined),
        ctypes.c_void_p(ends.ctypes.data),
        ctypes.c_void_p(scores.ctypes.data),
        ctypes.c_int64(len(pieces)),
        ctypes.c_void_p(found.ctypes.data),
    )
    if count < 0:
        raise MemoryError("for the merges of a vocabulary")
    return found[:count]
