"""Measures what this machine can do at most: how fast all threads read memory, and how fast they multiply
with each instruction set, out of registers.

    python -m bench.measures.limits

A small C program does both (limits.c). It is built here, once per process; without a C compiler numpy reads
the memory, and nothing is known of multiplying.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from bench.measures import caches
from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.library import Isa

_SOURCE = Path(__file__).with_name("limits.c")
_MOST_BUFFER_BYTES, _CACHES = 1 << 29, 4
"""A thread reads as many bytes as so many of the largest caches have, but not more."""
_ROUNDS = 3
_SWEEPS, _LOOPS = 4, 10_000_000
"""Of a round, which so takes some 20 ms or more: in a tenth of that the system may not have spread the
threads over the processors yet, and both together are then as fast as one.
"""

Format = Literal["bfloat16", "int8", "int4", "q4_k", "q6_k", "mxfp4", "fp8"]
"""Of weights; the first two also of keys and values."""
Multiplied = Literal["bfloat16", "int8", "int16"]
"""What is multiplied by its like. Numbers of int8 may be widened to int16."""


@dataclass(frozen=True, slots=True)
class Peak:
    """A way to multiply: a function of limits.c, and the first instruction set that has it."""

    function: str
    isa: Isa
    format: Multiplied
    instruction: str


PEAKS = (
    Peak("fma_256", Isa.AVX2, "bfloat16", "float32 FMA, 256 bits"),
    Peak("madd_256", Isa.AVX2, "int16", "VPMADDWD and VPADDD, 256 bits"),
    Peak("fma_512", Isa.AVX512, "bfloat16", "float32 FMA, 512 bits"),
    Peak("dpwssd_512", Isa.AVX512, "int16", "VPDPWSSD, 512 bits"),
    Peak("dpbusd_512", Isa.AVX512, "int8", "VPDPBUSD, 512 bits"),
    Peak("dpbf16_512", Isa.AVX512_BF16, "bfloat16", "VDPBF16PS, 512 bits"),
    Peak("tile_bf16", Isa.AMX, "bfloat16", "TDPBF16PS"),
    Peak("tile_int8", Isa.AMX, "int8", "TDPBSSD"),
)
"""AVX2 has no product of bytes that cannot overflow, and a sum of products takes a second instruction."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What all threads of a machine reach together."""

    bytes_per_s: float
    """Read from memory."""
    operations_per_s: Mapping[Peak, float]
    """Only of what the processor has."""

    def peak(self, isa: Isa, of: Multiplied) -> float:
        """Return the most operations per second of kernels for `isa`, which may use lower sets too. Raises
        ValueError if nothing is known.
        """
        formats = (of, "int16") if of == "int8" else (of,)
        found = [
            rate for peak, rate in self.operations_per_s.items() if peak.isa <= isa and peak.format in formats
        ]
        if not found:
            raise ValueError(f"nothing is known of multiplying {of} with {isa.name}; is there a C compiler?")
        return max(found)


@functools.cache
def build() -> ctypes.CDLL | None:
    """Build the C program; None without a C compiler."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "limits.so"
        command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", str(built), str(_SOURCE)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        loaded = ctypes.CDLL(str(built))
    loaded.read_memory.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    for peak in PEAKS:
        if hasattr(loaded, peak.function):  # only on x86-64
            function = getattr(loaded, peak.function)
            function.argtypes, function.restype = [ctypes.c_uint64], ctypes.c_double
    return loaded


def in_threads(work: Callable[[int], object], threads: int) -> float:
    """Measure the seconds for work(0) ... work(threads - 1) at once; the best of some rounds. Each thread has
    a processor of its own, as far as there are enough: left to itself, the system now and then runs two on
    one.
    """
    processors = itertools.cycle(sorted(os.sched_getaffinity(0)))
    times = []
    with ThreadPoolExecutor(threads, initializer=lambda: os.sched_setaffinity(0, {next(processors)})) as pool:
        for _ in range(_ROUNDS + 1):
            began = time.perf_counter()
            list(pool.map(work, range(threads)))
            times.append(time.perf_counter() - began)
    return min(times[1:])


def buffer_bytes_for(cache_bytes: int) -> int:
    """Return the size of each thread's buffer, where the largest cache has so many bytes, or 0 if that is not
    known. It is no larger than needed, because to fill it takes longer than to read it.
    """
    return min(_MOST_BUFFER_BYTES, _CACHES * cache_bytes) or _MOST_BUFFER_BYTES


def read_bytes_per_s(threads: int, buffer_bytes: int | None = None) -> float:
    """Measure the bytes per second that all threads together read, each from a buffer that no cache holds."""
    buffer_bytes = buffer_bytes or buffer_bytes_for(caches.largest_bytes())
    program = build()
    buffers = [np.ones(buffer_bytes // 8, np.uint64) for _ in range(threads)]

    def read(thread: int) -> None:
        for _ in range(_SWEEPS):
            if program is None:
                np.bitwise_xor.reduce(buffers[thread])
            else:
                program.read_memory(buffers[thread].ctypes.data, buffers[thread].size)

    return threads * _SWEEPS * buffer_bytes / in_threads(read, threads)


def operations_per_s(threads: int, loops: int = _LOOPS) -> dict[Peak, float]:
    """Measure the operations per second of each way to multiply that this processor has; empty without a C
    compiler, or where there are no native kernels.
    """
    program = build()
    if program is None or not library.available():
        return {}
    best = library.load().penstock_best_isa()
    found = {}
    for peak in PEAKS:
        if peak.isa <= best:
            multiply = getattr(program, peak.function)
            seconds = in_threads(functools.partial(_multiply, multiply, loops), threads)
            found[peak] = threads * float(multiply(1)) * loops / seconds
    return found


def _multiply(multiply: Callable[[int], float], loops: int, _thread: int) -> float:
    return multiply(loops)


def measure(threads: int | None = None) -> Limits:
    """Measure the limits of all threads that this process may use, or of so many."""
    threads = threads or len(os.sched_getaffinity(0))
    return Limits(read_bytes_per_s(threads), operations_per_s(threads))


def told(measured: Sequence[Limits]) -> str:
    """Put the limits in words, of one measurement or from the least to the most of several (at least one)."""
    read = _range([each.bytes_per_s for each in measured])
    lines = [f"memory is read at {read} GB/s; multiplying, in GFLOP/s:"]
    for peak in measured[0].operations_per_s:
        rates = _range([each.operations_per_s[peak] for each in measured])
        lines.append(f"- {peak.isa.name}, {peak.format}: {rates} ({peak.instruction})")
    return "\n".join(lines)


def _range(values: Sequence[float]) -> str:
    """Write the least and the most of values per second, in thousands of millions."""
    low, high = (f"{value / 1e9:.3g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def main() -> int:
    """Print the limits."""
    print(told([measure()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
