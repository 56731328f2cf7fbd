"""The grid of values that the codes of a weight can stand for: scales and zeros, and rounding to it.

Weights are float32 [N, K], N outputs and K inputs; scales and zeros are float32 [N, K / group].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.models.quantised import Codes
from penstock.runtime.quantising.options import Scheme

Floats: TypeAlias = NDArray[np.float32]

_SHRINKS = tuple(1 - step / 20 for step in range(9))
"""The parts of a group's range that are tried: a smaller one cuts off the outermost weights, and rounds the
others less."""
_SEARCHED_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales and zeros of a weight."""

    scales: Floats
    zeros: Floats
    """In codes counted around 0; all 0 without zeros."""


def grid_of(weight: Floats, scheme: Scheme, importance: Floats | None = None) -> Grid:
    """Choose the grid that reaches from the least to the greatest weight of each group. importance [K]: how
    much an error of each input's weights matters, which is its mean square; then of several smaller ranges,
    too, the one with the least error is taken.

    Without importance no smaller range is tried: what it cuts off are a few large weights, and whether these
    matter cannot be known.
    """
    num_out, num_in = weight.shape
    groups = num_in // scheme.group
    if importance is None:
        return _range_grid(weight.reshape(num_out, groups, scheme.group), scheme, 1.0)
    weights = importance.reshape(groups, scheme.group).astype(np.float32)
    parts = []
    rows = max(1, _SEARCHED_AT_ONCE // num_in)
    for begin in range(0, num_out, rows):
        part = weight[begin : begin + rows].reshape(-1, groups, scheme.group)
        parts.append(_searched(part, scheme, weights))
    scales, zeros = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Grid(scales, zeros)


def _searched(groups: Floats, scheme: Scheme, importance: Floats) -> tuple[Floats, Floats]:
    """Find of all ranges of groups [N, K / group, group] the grid with the least weighted squared error."""
    best: tuple[Floats, Floats] | None = None
    least = np.full(groups.shape[:2], np.inf, np.float32)
    for shrink in _SHRINKS:
        grid = _range_grid(groups, scheme, shrink)
        scales, zeros = grid.scales[:, :, None], grid.zeros[:, :, None]
        codes = np.clip(np.rint(groups / scales) + zeros, scheme.lowest, scheme.highest)
        error = np.square((codes - zeros) * scales - groups)
        lost = np.einsum("ngi,gi->ng", error, importance)
        if best is None:
            best, least = (grid.scales, grid.zeros), lost
            continue
        better = lost < least
        least = np.where(better, lost, least)
        best = (np.where(better, grid.scales, best[0]), np.where(better, grid.zeros, best[1]))
    assert best is not None
    return best


def _range_grid(groups: Floats, scheme: Scheme, shrink: float) -> Grid:
    """Return the grid of `shrink` of the range of groups [N, K / group, group]; 0 is always a value of it."""
    if scheme.zeros:
        low = np.minimum(groups.min(axis=2), 0) * np.float32(shrink)
        high = np.maximum(groups.max(axis=2), 0) * np.float32(shrink)
        scales = _stored((high - low) / np.float32(scheme.highest - scheme.lowest), scheme)
        zeros = np.clip(np.rint(scheme.lowest - low / scales), scheme.lowest, scheme.highest)
        return Grid(scales, zeros.astype(np.float32))
    peak = np.abs(groups).max(axis=2) * np.float32(shrink)
    scales = _stored(peak / np.float32(scheme.highest), scheme)
    return Grid(scales, np.zeros_like(scales))


def _stored(scales: Floats, scheme: Scheme) -> Floats:
    """Return the scales as they will be read. Where all weights are 0, any scale does."""
    rounded = scales.astype(scheme.scale_dtype).astype(np.float32)
    return np.where(rounded == 0, np.float32(1), rounded)


def codes_of(numbers: NDArray[np.int8], grid: Grid, scheme: Scheme) -> Codes:
    """Return the weight with these codes [N, K]."""
    zeros = grid.zeros if scheme.zeros else None
    return Codes(codes=numbers, bits=scheme.bits, scales=grid.scales, zeros=zeros, group=scheme.group)


def rounded(weight: Floats, grid: Grid, scheme: Scheme) -> Codes:
    """Round each weight to the nearest value of the grid."""
    groups = weight.reshape(len(weight), -1, scheme.group)
    numbers = np.rint(groups / grid.scales[:, :, None]) + grid.zeros[:, :, None]
    np.clip(numbers, scheme.lowest, scheme.highest, out=numbers)
    return codes_of(numbers.astype(np.int8).reshape(weight.shape), grid, scheme)
