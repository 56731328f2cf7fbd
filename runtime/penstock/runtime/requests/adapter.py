"""An adapter's weights, as a request has them. No jax."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


def digest_of_values(values: NDArray[Any]) -> str:
    """Compute the digest of an adapter with these values, which are whole."""
    return hashlib.sha256(np.ascontiguousarray(values).view(np.uint8).data).hexdigest()


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
    """The numbers of an adapter on the host, without the zeros that fill up its place on the device. These
    are most of the place where the rank is a small one, or where few layers are changed.
    """

    devices: int
    """Over how many devices the model is cut."""
    size: int
    """How many numbers a place on a device has."""
    dtype: np.dtype[Any]
    """That of the model."""
    blocks: tuple[AdapterBlock, ...] = ()

    def whole(self) -> NDArray[Any]:
        """Return the numbers as they go to the device, [units * rank], see `ops.adapters`; for a model that
        is cut over devices [devices, units * rank].
        """
        values = np.zeros((self.devices, self.size), self.dtype)
        for block in self.blocks:
            rows, columns = block.matrix.shape
            end = block.begin + rows * block.width
            place = values[block.device, block.begin : end].reshape(rows, block.width)
            place[:, :columns] = block.matrix
        return values if self.devices > 1 else values[0]

    @property
    def num_bytes(self) -> int:
        """The memory that they take on the host."""
        return sum(block.matrix.nbytes for block in self.blocks)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """A LoRA adapter on the host. Adapters of one content have one digest."""

    values: AdapterValues
    digest: str
    """SHA-256 of the values as they go to the device, in hexadecimal; see `digest_of_values`."""
    rank: int
    """The largest rank of its matrices."""
    scaling: float
    """The largest factor of its products."""
    targets: tuple[str, ...]
    """The last parts of the names of the layers that it changes, sorted."""
