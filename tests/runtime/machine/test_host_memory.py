"""Host memory for weights is zeroed, uses huge pages if it is large, and is given back with the last view of
it.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime.machine import host_memory

MIB = 2**20
STATUS = Path("/proc/self/status")


def resident() -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize("shape", [(3, 5), (0, 7), (1025, 1024), (4, MIB)])
@pytest.mark.parametrize("dtype", [np.int8, jnp.bfloat16, np.float32])
def test_arrays_are_zero_and_can_be_written(shape: tuple[int, ...], dtype: type) -> None:
    array = host_memory.zeros(shape, dtype)
    assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
    assert array.flags.c_contiguous
    assert not array.any()
    array[...] = 1
    assert (array == 1).all()


@pytest.mark.skipif(not STATUS.exists(), reason="needs Linux's /proc")
def test_jax_uses_the_memory_in_place_and_it_is_freed_with_the_array() -> None:
    array = host_memory.zeros((64, MIB), np.int8)
    array[...] = 3
    placed = jax.device_put(array, jax.devices("cpu")[0])
    addresses = (placed.unsafe_buffer_pointer(), array.ctypes.data)
    del array
    held, last = resident(), int(placed[63, MIB - 1])
    del placed
    host_memory.let_go()
    left = resident()
    assert addresses[0] == addresses[1]
    assert last == 3
    assert left < held - 32 * MIB


def test_giving_back_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    host_memory.give_back()

    def no_library(name: object) -> object:
        raise OSError

    monkeypatch.setattr("ctypes.CDLL", no_library)
    host_memory.give_back()
