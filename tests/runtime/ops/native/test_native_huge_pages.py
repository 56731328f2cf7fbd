"""Huge pages are requested only for whole pages within the arrays' memory, and the request changes no
value.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from penstock.runtime.ops.native import huge_pages

MIB = 2**20


class Memory:
    """Stands for an array at a given address."""

    def __init__(self, begin: int, size: int) -> None:
        self.begin, self.nbytes = begin, size

    def unsafe_buffer_pointer(self) -> int:
        return self.begin


def spans(*arrays: tuple[int, int]) -> list[tuple[int, int]]:
    made: Any = [Memory(begin, size) for begin, size in arrays]
    return huge_pages._spans(made)


def test_only_whole_huge_pages() -> None:
    assert spans((2 * MIB, 4 * MIB)) == [(2 * MIB, 6 * MIB)]
    assert spans((2 * MIB + 1, 4 * MIB)) == [(4 * MIB, 6 * MIB)]
    assert spans((3 * MIB, 2 * MIB)) == []
    assert spans((0, 0)) == []


def test_adjacent_arrays_are_one_span() -> None:
    assert spans((3 * MIB + 64, 2 * MIB), (2 * MIB, MIB)) == [(2 * MIB, 4 * MIB)]
    assert spans((2 * MIB, MIB), (4 * MIB, 2 * MIB)) == [(4 * MIB, 6 * MIB)]


def test_values_survive() -> None:
    array = jnp.arange(4 * MIB, dtype=jnp.int32)
    before = np.array(array)
    collapsed = huge_pages.advise([array])
    assert 0 <= collapsed <= array.nbytes
    np.testing.assert_array_equal(np.asarray(array), before)
