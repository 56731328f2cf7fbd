"""Huge pages are asked for before memory is touched, or for memory that is in use; only whole pages within
the arrays' memory, and no value depends on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime.ops.device_arrays import zeros_maker
from penstock.runtime.ops.native import huge_pages, library, linear

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


def wants_huge_pages(array: jax.Array) -> bool:
    """Say whether Linux has been asked for huge pages in the middle of an array's memory."""
    middle = array.unsafe_buffer_pointer() + array.nbytes // 2
    is_here = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            begin, end = (int(number, 16) for number in first.split("-"))
            is_here = begin <= middle < end
        elif is_here and first == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError("the array lies nowhere")


needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages"
)
needs_kernels = pytest.mark.skipif(not library.available(), reason="no native library on this machine")


@needs_kernels
def test_fresh_zeros_on_memory_that_held_something_else() -> None:
    """Arrays of no bytes, of less than a huge page, of one and of several are all zero."""
    one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = [(0,), (1,), (2 * MIB,), (3, MIB + 7), (20 * MIB,)]
    kinds = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes for dtype in (np.int8, np.float32)]
    make = zeros_maker(kinds, one_device, huge_pages.zeros)
    for _ in range(3):
        made = make()
        assert [(array.shape, array.dtype) for array in made] == [(kind.shape, kind.dtype) for kind in kinds]
        assert not any(np.asarray(array).any() for array in made)
        del made
        ones = [jnp.ones(kind.shape, kind.dtype).block_until_ready() for kind in kinds]
        del ones  # their memory is what malloc gives next


@needs_kernels
@needs_huge_pages
def test_zeros_ask_for_huge_pages() -> None:
    one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shape = jax.ShapeDtypeStruct((64 * MIB,), np.uint8)
    assert wants_huge_pages(zeros_maker(shape, one_device, huge_pages.zeros)().block_until_ready())
    assert not wants_huge_pages(zeros_maker(shape, one_device)().block_until_ready())


@needs_kernels
@needs_huge_pages
def test_products_ask_for_huge_pages() -> None:
    """Those of 32 MiB and more, whose memory the system has to clear in each step: such as the logits of many
    rows.
    """
    weight = np.zeros((2**18, 64), jnp.bfloat16)
    tiles = linear.Packed(jnp.asarray(linear.pack(weight)))
    x = jnp.zeros((64, 64), jnp.bfloat16)
    logits = jax.jit(lambda x: linear.linear(x, (tiles,), num_rows=jnp.int32(64), out_dtype=np.float32))(x)
    assert logits.nbytes == 64 * MIB
    assert wants_huge_pages(logits.block_until_ready())
