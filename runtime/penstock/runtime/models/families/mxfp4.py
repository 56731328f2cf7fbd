"""MXFP4 (OCP Microscaling Formats, version 1.0): values of 4 bits in blocks of 32 that share a power of two.

Values are E2M1 floats, two in a byte, of which the lower half is the first. A block's scale is a byte s and
means 2 ** (s - 127).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.runtime.models.quantised import FloatCodes

BLOCK = 32
"""Values that share a scale."""


def decode(rows: Sequence[npt.NDArray[Any]]) -> FloatCodes:
    """Decode (blocks uint8 [rows, n, 16], scales uint8 [rows, n]) -> codes [rows, n * 32]. Values are
    exact.
    """
    blocks, scales = rows
    codes = np.stack([blocks & np.uint8(15), blocks >> np.uint8(4)], axis=-1).reshape(len(blocks), -1)
    with np.errstate(over="ignore"):  # 255 is no number
        powers = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    return FloatCodes(codes, 4, powers, BLOCK)
