"""Loads the native library and registers its operations with XLA, once per process."""

from __future__ import annotations

import ctypes
import enum
import functools
import logging

import jax.ffi

from penstock.runtime.native.build import BuildFailed, build

log = logging.getLogger(__name__)

TARGETS = ("penstock_linear", "penstock_rotate", "penstock_attention", "penstock_sample")
"""Handler symbols of the library; each is an FFI target of the same name on the CPU platform."""


class Isa(enum.IntEnum):
    """Instruction sets in ascending order, as in src/cpu.h."""

    NONE = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3
    AMX = 4


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library with its targets registered, or None (with one log line that says why)."""
    try:
        path = build()
        library = ctypes.CDLL(str(path))
    except (BuildFailed, OSError) as error:
        log.warning("native kernels are not available, XLA is used and CPU serving is slower: %s", error)
        return None
    best = Isa(library.penstock_best_isa())
    if best is Isa.NONE:
        log.warning("native kernels need AVX2, which this processor lacks: XLA is used")
        return None
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    log.info("native kernels: %s", best.name)
    return library


def available() -> bool:
    """Whether the native operations can be used in programs for CPU."""
    return load() is not None


def limit_isa(isa: Isa) -> Isa:
    """Use no instruction set above `isa` from now on, process-wide: for tests. Returns the one in use."""
    library = load()
    return Isa.NONE if library is None else Isa(library.penstock_limit_isa(int(isa)))


def use_pairs(pairs: bool | None) -> None:
    """Whether kernels for AVX512_BF16 multiply pairs of bfloat16, or float32; None: what this processor is
    faster at. Process-wide: for tests.
    """
    library = load()
    if library is not None:
        library.penstock_use_pairs(-1 if pairs is None else int(pairs))
