"""MXFP4 (OCP Microscaling Formats, version 1.0): values of 4 bits in blocks of 32 that share a power of two.

Values are E2M1 floats, two in a byte, of which the lower half is the first. A block's scale is a byte s and
means 2 ** (s - 127).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 32
"""Values that share a scale."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
_PAIRS = np.stack([_VALUES[np.arange(256) & 15], _VALUES[np.arange(256) >> 4]], axis=1)
"""Both values of each byte, [256, 2]."""


def decode(rows: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
    """(blocks uint8 [rows, n, 16], scales uint8 [rows, n]) -> float32 [rows, n * 32]. Values are exact."""
    blocks, scales = rows
    values: npt.NDArray[np.float32] = _PAIRS[blocks].reshape(*blocks.shape[:2], BLOCK)
    exponents = scales.astype(np.int32) - 127
    np.ldexp(values, exponents[:, :, None], out=values)
    return values.reshape(len(blocks), -1)
