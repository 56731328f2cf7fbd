"""Cuts images into patches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def cut_into_patches(pixels: NDArray[np.float32], patch: int, merge: int) -> NDArray[np.float32]:
    """Cut pixels [channels, height, width] -> patches [N, channels * patch^2], those of a square of merge x
    merge patches side by side, and squares row by row.
    """
    channels, height, width = pixels.shape
    tiled = pixels.reshape(
        channels, height // (patch * merge), merge, patch, width // (patch * merge), merge, patch
    )
    return np.ascontiguousarray(tiled.transpose(1, 4, 2, 5, 0, 3, 6)).reshape(-1, channels * patch**2)
