"""An adapter's weights, as a request has them. No jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.machine import host_memory


def integers_like(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return integers of a dtype's size. numpy moves them several times as fast as the bfloat16 of
    ml_dtypes.
    """
    return np.dtype(f"u{dtype.itemsize}")


_ALIGNMENT = 64
"""In bytes. XLA takes a host array that begins at such a place as it is, and copies others."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterBlock:
    """One matrix of an adapter, and where it lies on the device."""

    device: int
    begin: int
    """Where its first row begins."""
    width: int
    """How far the rows are from each other. Behind a row's own numbers there are zeros."""
    matrix: NDArray[Any]
    """[rows, at most width]"""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterValues:
    """The numbers of an adapter on the host: blocks, without the zeros that fill up the place on the device,
    or `placed`. Zeros are most of the place where the rank is a small one, or where few layers are changed.
    """

    devices: int
    """Over how many devices the model is cut."""
    size: int
    """How many numbers a place on a device has."""
    dtype: np.dtype[Any]
    """That of the model."""
    blocks: tuple[AdapterBlock, ...] = ()
    placed: NDArray[Any] | None = None
    """What `whole` returns, if that is kept, and not blocks."""

    def whole(self) -> NDArray[Any]:
        """Return the numbers as they go to the device, [units * rank], see `ops.adapters`; for a model that
        is cut over devices [devices, units * rank]. They must not be written.
        """
        if self.placed is not None:
            return self.placed
        integers = integers_like(self.dtype)
        values = zeros((self.devices, self.size), integers)
        for block in self.blocks:
            rows, columns = block.matrix.shape
            end = block.begin + rows * block.width
            place = values[block.device, block.begin : end].reshape(rows, block.width)
            place[:, :columns] = block.matrix.view(integers)
        whole = values.view(self.dtype)
        return whole if self.devices > 1 else whole[0]

    @property
    def num_bytes(self) -> int:
        """The memory that they take on the host."""
        if self.placed is not None:
            return self.placed.nbytes
        return sum(block.matrix.nbytes for block in self.blocks)


def zeros(shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Make an array of zeros that is aligned for XLA."""
    size = shape[0] * shape[1] * dtype.itemsize
    memory = host_memory.zeros((size + _ALIGNMENT,), np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """A LoRA adapter on the host. Adapters of one content have one digest."""

    values: AdapterValues
    digest: str
    """SHA-256 of the values as they go to the device, piece by piece; see `ops.native.hashing`."""
    rank: int
    """The largest rank of its matrices."""
    scaling: float
    """The largest factor of its products."""
    targets: tuple[str, ...]
    """The last parts of the names of the layers that it changes, sorted."""
