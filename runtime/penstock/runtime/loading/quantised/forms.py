"""What quantised weights are on the host beside `models.quantised`: forms that no kernel multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.runtime.models.quantised import Codes, FloatCodes, OffsetCodes


@dataclass(frozen=True, slots=True)
class TableCodes:
    """A quantised weight whose codes are places in a table: value = scale * table[code]."""

    codes: npt.NDArray[np.uint8]
    """[out, in]."""
    table: npt.NDArray[np.float32]
    """The 16 values of codes of 4 bits."""
    scales: npt.NDArray[np.float32]
    """[out, in / group], rounded up: the last group may be shorter."""
    group: int
    """How many inputs share a scale."""

    def dequantised(self) -> npt.NDArray[np.float32]:
        """Compute the weight that the codes stand for, float32 [out, in]."""
        values: npt.NDArray[np.float32] = self.table[self.codes]
        values *= _spread(self.scales, self.group, self.codes.shape[1])
        return values


Rows: TypeAlias = Codes | FloatCodes | TableCodes | OffsetCodes
"""Rows of a quantised weight."""


def _spread(of_groups: npt.NDArray[np.float32], group: int, num_in: int) -> npt.NDArray[np.float32]:
    """Return the value of each input, [out, in], or [out, 1] if all share one."""
    if of_groups.shape[1] == 1:
        return of_groups
    return np.repeat(of_groups, group, axis=1)[:, :num_in]
