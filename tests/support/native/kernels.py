"""Selects the native kernels that a test runs: those of each instruction set that this machine has, and on
every machine the kernels for AMX and for AVX-512 with plain C++ in place of the instructions that it may lack
(tests/support/native/emulated).
"""

from __future__ import annotations

import ctypes
import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
EMULATED_AMX = "amx_emulated"
"""CI runs it on machines without AMX. Where the real instructions are, it would say again what they say, and
only the sweep has it, because it takes a minute to compile.
"""
EMULATED_AVX512: dict[str, tuple[Isa, bool]] = {
    "avx512_emulated": (Isa.AVX512, False),
    "avx512_bf16_emulated": (Isa.AVX512_BF16, False),
    "avx512_bf16_pairs_emulated": (Isa.AVX512_BF16, True),
}
"""As NATIVE. These take as long to compile as all kernels, and are slow: only sweeps run them, and not on
machines that have the instruction set.
"""

ATTENTION_KERNELS = tuple(
    name
    for name in (*NATIVE, EMULATED_AMX, *EMULATED_AVX512)
    if name not in ("avx512_bf16", "avx512_bf16_emulated")
)
"""Attention in AVX512_BF16 without pairs is that in AVX512."""

TEST_KERNELS = Path(tempfile.gettempdir()) / "penstock-tests-native"
"""Where the emulated libraries are compiled, once for the suite and its later runs; no server looks there."""


def kernel_params(*names: str) -> list[Any]:
    """Parameters of a fixture that takes the names of kernels: these, or all if there are none. `make test`
    runs those of this machine's best instruction set, CI also the other real ones, and what is emulated is
    marked as EMULATED_AMX and EMULATED_AVX512 say.
    """
    chosen = names or (*NATIVE, EMULATED_AMX, *EMULATED_AVX512)
    best = max((name for name in chosen if is_here(name)), key=list(NATIVE).index, default="")
    return [pytest.param(name, marks=[] if name == best else mark_of(name)) for name in chosen]


def mark_of(name: str) -> pytest.MarkDecorator:
    """Say which runs have kernels that are not this machine's best."""
    if name in EMULATED_AVX512:
        return pytest.mark.sweep
    if name == EMULATED_AMX and is_here("amx"):
        return pytest.mark.sweep("emulated AMX")
    return pytest.mark.ci


def is_here(name: str) -> bool:
    """Say whether the system says that the processor has the kernels' instruction set. Nothing is compiled
    for the answer, so it can be asked when the files of tests are read.
    """
    return name in NATIVE and _CPU_FLAGS[NATIVE[name][0]] in _cpu_flags()


_CPU_FLAGS = {
    Isa.AVX2: "avx2",
    Isa.AVX512: "avx512_vnni",
    Isa.AVX512_BF16: "avx512_bf16",
    Isa.AMX: "amx_bf16",
}
"""The newest of the instructions that a set needs, as /proc/cpuinfo calls them."""


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


@dataclass(frozen=True, eq=False)
class _Library:
    """A library with emulated instructions, and what its operations are called in this process."""

    recipe: build.Recipe
    targets: tuple[str, ...]
    suffix: str


EMULATED_SOURCES = Path(__file__).parent / "emulated"
_AVX512, _AVX512_BF16 = (
    (*build.FLAGS["_avx2"], "-O1", "-Wno-psabi", "-include", str(EMULATED_SOURCES / name))
    for name in ("avx512.h", "avx512_bf16.h")
)
EMULATED_FLAGS = {  # longest suffix first
    "_avx512_bf16": _AVX512_BF16,
    "_avx512": _AVX512,
    "_avx2": build.FLAGS["_avx2"],
    "_amx": (*_AVX512_BF16, f'-DPENSTOCK_TILES="{EMULATED_SOURCES / "tiles.h"}"'),
}
"""As build.FLAGS, with AVX-512 and AMX emulated. With -O1 they compile in two thirds of the time."""
_AMX_PARTS = (
    "common/limits",
    "adapters/adapters",
    "adapters/adapters_avx512",
    "linear/linear",
    "linear/linear_amx",
    "linear/linear_avx512",
    "float32/float32",
    "float32/float32_amx",
    "experts/plan",
    "experts/products",
    "experts/experts",
    "experts/batched",
    "attention/attention",
    "attention/attention_plan",
    "attention/attention_amx",
)
_AMX = _Library(
    build.Recipe(
        "emulated-amx",
        (
            EMULATED_SOURCES / "cpu.cc",
            EMULATED_SOURCES / "amx_alone.cc",
            *(build.SOURCES / f"{part}.cc" for part in _AMX_PARTS),
        ),
        EMULATED_FLAGS,
    ),
    (
        "penstock_linear",
        "penstock_float32",
        "penstock_experts",
        "penstock_batched",
        "penstock_attention_plan",
        "penstock_attention",
    ),
    "emulated_amx",
)
_ALL = _Library(
    build.Recipe(
        "emulated",
        (
            EMULATED_SOURCES / "cpu.cc",
            *(file for file in build.KERNELS.sources if file != build.SOURCES / "common" / "cpu.cc"),
        ),
        EMULATED_FLAGS,
    ),
    library.TARGETS,
    "emulated",
)
"""All kernels. It takes a minute to compile."""


@contextmanager
def running(name: str) -> Iterator[None]:
    """Within the block, programs that are traced run the kernels of this name, and so do those that were
    traced before for the same library. The test is skipped if this machine lacks these kernels.
    """
    if not library.available():
        pytest.skip("no native library on this machine")
    if name == EMULATED_AMX:
        with _emulated(_AMX, Isa.AMX, pairs=False):
            yield
        return
    if name in EMULATED_AVX512:
        isa, in_pairs = EMULATED_AVX512[name]
        if library.load().penstock_best_isa() >= isa:
            pytest.skip(f"this processor has {isa.name}, and its own kernels are tested")
        with _emulated(_ALL, isa, pairs=in_pairs):
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
def _register(emulated: _Library) -> ctypes.CDLL:
    opened = ctypes.CDLL(str(build.build(TEST_KERNELS, emulated.recipe)))
    for target in emulated.targets:
        handler = jax.ffi.pycapsule(getattr(opened, target))
        jax.ffi.register_ffi_target(f"{target}_{emulated.suffix}", handler, platform="cpu")
    return opened


def threads_with_tiles() -> int:
    """How many threads have emulated tiles that they have not released."""
    count: int = _register(_AMX).penstock_threads_with_tiles()
    return count


@contextmanager
def _emulated(emulated: _Library, isa: Isa, *, pairs: bool) -> Iterator[None]:
    _register(emulated).penstock_emulate(int(isa), int(pairs))
    call = jax.ffi.ffi_call

    def replaced(target: str, *args: Any, **kwargs: Any) -> Any:
        return call(f"{target}_{emulated.suffix}" if target in emulated.targets else target, *args, **kwargs)

    with mock.patch.object(jax.ffi, "ffi_call", replaced):
        yield
