"""The form on the host of a quantised weight, whatever checkpoint it came from.

Readers of checkpoints make it (`LoadRule.decode`), and packing for a device takes it. What it means is
`Codes.dequantised`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantised weight of a linear layer as its checkpoint has it: value = scale * (code - zero)."""

    codes: NDArray[np.uint8] | NDArray[np.int8]
    """[out, in], one code per element (not packed)."""
    bits: int
    """4 or 8: codes are from 0 to 2**bits - 1 in uint8, or from -2**(bits - 1) in int8."""
    scales: NDArray[np.float32]
    """[out, in // group]."""
    zeros: NDArray[np.float32] | None
    """[out, in // group]; None: 0."""
    group: int
    """How many inputs share a scale; all of them for one scale a row."""
    order: NDArray[np.intp] | None = None
    """Column i of the codes belongs to input order[i]; None: to input i."""

    def __post_init__(self) -> None:
        """Check that the arrays agree, because whoever packs them trusts their shapes."""
        if self.bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, not {self.bits}")
        if self.codes.ndim != 2 or self.codes.dtype not in (np.uint8, np.int8):
            raise ValueError(
                f"codes must be uint8 or int8 [out, in], not {self.codes.dtype} {list(self.codes.shape)}"
            )
        num_out, num_in = self.codes.shape
        if self.group < 1 or num_in % self.group:
            raise ValueError(f"group {self.group} does not divide the {num_in} inputs")
        expected = (num_out, num_in // self.group)
        for name, values in (("scales", self.scales), ("zeros", self.zeros)):
            if values is not None and (values.shape != expected or values.dtype != np.float32):
                raise ValueError(
                    f"{name} must be float32 {list(expected)}, not {values.dtype} {list(values.shape)}"
                )
        if self.order is not None and not np.array_equal(np.sort(self.order), np.arange(num_in)):
            raise ValueError(f"order must name each of the {num_in} inputs once")

    def dequantised(self) -> NDArray[np.float32]:
        """Compute the weight that the codes stand for, float32 [out, in], its columns in order of inputs."""
        num_out, num_in = self.codes.shape
        values = self.codes.astype(np.float32).reshape(num_out, -1, self.group)
        if self.zeros is not None:
            values -= self.zeros[:, :, None]
        values *= self.scales[:, :, None]
        columns = values.reshape(num_out, num_in)
        if self.order is None:
            return columns
        ordered = np.empty_like(columns)
        ordered[:, self.order] = columns
        return ordered
