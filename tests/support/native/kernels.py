"""Selects the native kernels that a test runs: those of each instruction set that this machine has, and on
every machine the kernels for AMX with emulated tiles (tests/support/native/amx), which differ only in the
tile instructions.
"""

from __future__ import annotations

import ctypes
import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax.ffi
import pytest

from penstock.runtime.ops.native import build, library
from penstock.runtime.ops.native.library import Isa

NATIVE: dict[str, tuple[Isa, bool | None]] = {
    "avx2": (Isa.AVX2, None),
    "avx512": (Isa.AVX512, None),
    "avx512_bf16": (Isa.AVX512_BF16, False),
    "avx512_bf16_pairs": (Isa.AVX512_BF16, True),
    "amx": (Isa.AMX, None),
}
"""For each name the instruction set and the argument of `library.use_pairs`."""
EMULATED = "amx_emulated"
KERNELS = (*NATIVE, EMULATED)

TEST_KERNELS = Path(tempfile.gettempdir()) / "penstock-tests-native"
"""Where the emulated library is compiled, once for the suite and its later runs; no server looks there."""

_TILES = Path(__file__).parent / "amx" / "tiles.h"
_PARTS = (
    "common/limits",
    "linear/linear",
    "linear/linear_amx",
    "experts/plan",
    "experts/products",
    "experts/experts",
    "experts/batched",
    "attention/attention",
    "attention/attention_plan",
    "attention/attention_amx",
)
_RECIPE = build.Recipe(
    "emulated-amx",
    (
        _TILES.with_name("cpu.cc"),
        *(build.SOURCES / f"{part}.cc" for part in _PARTS),
    ),
    {"_amx": (*build.FLAGS["_avx2"], f'-DPENSTOCK_TILES="{_TILES}"')},
)
_TARGETS = (
    "penstock_linear",
    "penstock_experts",
    "penstock_batched",
    "penstock_attention_plan",
    "penstock_attention",
)


@contextmanager
def running(name: str) -> Iterator[None]:
    """Within the block, programs that are traced run the kernels of this name; programs that were traced
    before run those of its instruction set. The test is skipped if this machine lacks these kernels.
    """
    if not library.available():
        pytest.skip("no native library on this machine")
    if name == EMULATED:
        with _emulated():
            yield
        return
    wanted, pairs = NATIVE[name]
    try:
        if library.limit_isa(wanted) is not wanted:
            pytest.skip(f"this processor has no {wanted.name}")
        library.use_pairs(pairs)
        yield
    finally:
        library.use_pairs(None)
        library.limit_isa(Isa.AMX)


@functools.cache
def _register() -> ctypes.CDLL:
    emulated = ctypes.CDLL(str(build.build(TEST_KERNELS, _RECIPE)))
    for target in _TARGETS:
        handler = jax.ffi.pycapsule(getattr(emulated, target))
        jax.ffi.register_ffi_target(f"{target}_emulated", handler, platform="cpu")
    return emulated


def threads_with_tiles() -> int:
    """How many threads have emulated tiles that they have not released."""
    count: int = _register().penstock_threads_with_tiles()
    return count


@contextmanager
def _emulated() -> Iterator[None]:
    _register()
    call = jax.ffi.ffi_call

    def emulated(target: str, *args: Any, **kwargs: Any) -> Any:
        return call(f"{target}_emulated" if target in _TARGETS else target, *args, **kwargs)

    with mock.patch.object(jax.ffi, "ffi_call", emulated):
        yield


def limited_to(isa: Isa) -> Iterator[Isa]:
    """For fixtures, by `yield from`: runs the kernels of this instruction set, and skips the test where the
    processor has none.
    """
    if library.limit_isa(isa) is not isa:
        library.limit_isa(Isa.AMX)
        pytest.skip(f"this processor has no {isa.name}")
    yield isa
    library.limit_isa(Isa.AMX)
