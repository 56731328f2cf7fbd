"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): columns of a weight are rounded one after the other, and the
error of each is taken off by the columns that are not rounded yet.

What counts is the error of the layer's outputs on the inputs X [T, K] that were watched, |X (W - Q)^T|^2,
which depends on X by the matrix X^T X [K, K] alone. Columns with the largest inputs come first, because those
that come last have nobody to correct them. The grid is chosen before, so groups stay those of neighbouring
inputs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.models.quantised import Codes
from penstock.runtime.quantising.grids import Floats, codes_of, grid_of
from penstock.runtime.quantising.options import Scheme

_DAMPING = 0.01
"""Of the mean of the diagonal, which is added to it: inputs that depend on each other have no inverse."""
_BLOCK = 128
"""Columns that are corrected at once for all rounded before; within a block it is done column by column."""


def gptq(weight: Floats, gram: NDArray[np.float64], scheme: Scheme) -> Codes:
    """Choose the codes of a weight [N, K] for inputs X with X^T X = gram [K, K]."""
    num_in = weight.shape[1]
    diagonal = np.diag(gram)
    grid = grid_of(weight, scheme, diagonal.astype(np.float32))
    order = np.argsort(-diagonal, kind="stable")
    inverse = _factor(gram[np.ix_(order, order)]).astype(np.float32)
    of_column = order // scheme.group
    scales, zeros = (np.ascontiguousarray(values.T[of_column]) for values in (grid.scales, grid.zeros))
    left = np.ascontiguousarray(weight.T[order])  # [K, N]: what each column has to be after corrections
    numbers = np.empty(left.shape, np.int8)
    for begin in range(0, num_in, _BLOCK):
        end = min(begin + _BLOCK, num_in)
        errors = np.empty((end - begin, left.shape[1]), np.float32)
        for column in range(begin, end):
            codes = np.clip(
                np.rint(left[column] / scales[column]) + zeros[column], scheme.lowest, scheme.highest
            )
            numbers[column] = codes
            error = (left[column] - (codes - zeros[column]) * scales[column]) / inverse[column, column]
            errors[column - begin] = error
            left[column + 1 : end] -= np.outer(inverse[column, column + 1 : end], error)
        left[end:] -= inverse[begin:end, end:].T @ errors
    ordered = np.empty_like(numbers)
    ordered[order] = numbers
    return codes_of(np.ascontiguousarray(ordered.T), grid, scheme)


def _factor(gram: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the upper triangular U with U^T U = the inverse of the damped matrix.

    With its rows and columns reversed the matrix is L L^T; reversed again, L is an upper triangular R, and
    the inverse of R R^T is that of R, transposed, times itself.
    """
    size = len(gram)
    damped = gram + np.eye(size) * _DAMPING * np.mean(np.diag(gram))
    diagonal = np.diag(damped).copy()
    diagonal[diagonal == 0] = 1  # no input was ever anything but 0
    np.fill_diagonal(damped, diagonal)
    lower = np.linalg.cholesky(damped[::-1, ::-1])
    upper: NDArray[np.float64] = np.triu(np.linalg.inv(lower[::-1, ::-1]))
    return upper
