"""Loads the native library and registers its operations with XLA, once per process."""

from __future__ import annotations

import ctypes
import enum
import logging
import threading
from pathlib import Path
from typing import cast

import jax.ffi
import numpy as np
import numpy.typing as npt
from jax import Array

from penstock.runtime.ops.native.build import BuildFailed, build

log = logging.getLogger(__name__)

TARGETS = (
    "penstock_linear",
    "penstock_float32",
    "penstock_norm",
    "penstock_rotate",
    "penstock_attention_plan",
    "penstock_attention",
    "penstock_sample",
    "penstock_route",
    "penstock_experts",
    "penstock_batched",
    "penstock_conv",
    "penstock_recurrence",
    "penstock_zeros",
    "penstock_row",
)
"""Handler symbols of the library; each is an FFI target of the same name on the CPU platform."""
_NO_LIMIT = 2**63 - 1


class Isa(enum.IntEnum):
    """Instruction sets in ascending order, as in src/common/cpu.h."""

    NONE = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3
    AMX = 4


class NotAvailable(Exception):
    """The native kernels cannot be used in this process; the message says why."""


_lock = threading.Lock()
_tried: dict[Path | None, ctypes.CDLL | NotAvailable] = {}
"""Folder, or None for where `build` looks without one, to what came of it. At most one entry is a
library, because XLA takes an operation's name once per process."""


def load(folder: Path | None = None) -> ctypes.CDLL:
    """Load the library, with its operations registered: the one that this process has already, else the one
    in `folder` (None: the one that came with the wheel, or in the default folder), compiled now if it is not
    there. This costs nothing once it is loaded.

    Raises NotAvailable; the first time it also logs the reason.
    """
    with _lock:
        if (known := loaded()) is not None:
            return known
        if folder not in _tried:
            try:
                _tried[folder] = _open(folder)
            except NotAvailable as error:
                log.warning("no native kernels, and CPU serving on XLA alone is slower: %s", error)
                _tried[folder] = error
        found = _tried[folder]
    if isinstance(found, NotAvailable):
        raise found
    return found


def loaded() -> ctypes.CDLL | None:
    """Return the library if this process has it, as where an engine uses the kernels. This never compiles
    it, and waits for nobody who does.
    """
    return next((tried for tried in tuple(_tried.values()) if not isinstance(tried, NotAvailable)), None)


def _open(folder: Path | None) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(build(folder)))
    except (BuildFailed, OSError) as error:
        raise NotAvailable(str(error)) from error
    best = Isa(library.penstock_best_isa())
    if best is Isa.NONE:
        raise NotAvailable("they need AVX2, which this processor lacks")
    library.penstock_limit_threads.argtypes = library.penstock_limit_scratch.argtypes = [ctypes.c_int64]
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    log.info("native kernels: %s", best.name)
    return library


def available(folder: Path | None = None) -> bool:
    """Say whether programs for CPU can use the native operations; see `load`."""
    try:
        load(folder)
    except NotAvailable:
        return False
    return True


def absent(dtype: npt.DTypeLike, shape: tuple[int, ...] = (0,)) -> Array:
    """Return what an operation gets for an operand that it does without. It is numpy's, because `jnp.zeros`
    for all of them takes a third of the time in which a model is traced.
    """
    return cast("Array", np.zeros(shape, dtype))


def limit_threads(threads: int) -> None:
    """Let a kernel's loop use at most this many threads from now on, its caller's included, in the whole
    process.
    """
    load().penstock_limit_threads(threads)


def limit_isa(isa: Isa) -> Isa:
    """Forbid instruction sets above `isa` from now on, in the whole process, for tests. Return the one in
    use.
    """
    return Isa(load().penstock_limit_isa(int(isa))) if available() else Isa.NONE


def use_pairs(pairs: bool | None) -> None:
    """Set whether kernels for AVX512_BF16 multiply pairs of bfloat16, or values widened to float32; None:
    what this processor does faster. It holds for the whole process, and is for tests.
    """
    if available():
        load().penstock_use_pairs(-1 if pairs is None else int(pairs))


def limit_scratch(num_bytes: int | None) -> None:
    """Make kernels fail that need more than this much scratch memory, as if there were no more; None: no
    limit. It holds for the whole process, and is for tests.
    """
    load().penstock_limit_scratch(_NO_LIMIT if num_bytes is None else num_bytes)
