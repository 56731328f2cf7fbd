"""Computes the least time that each workload can take on this machine, and how near a measured run comes.

    python -m bench.roofline --checkpoint DIR --results bench/out/penstock.jsonl

Memory is read by one thread per core, in a small C program that is built here (or by numpy if there is no C
compiler). The peak of bf16 products is that of the processor's matrix unit if it has one that the program can
use, else what XLA reaches; both are printed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.measures import record
from bench.measures.cost import Machine, Work, decode_spans, one_pass, prefill_spans
from bench.workloads import MAIN, TABLE, Workload, waves
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.models.config import ModelConfig

_SOURCE = Path(__file__).with_name("roofline.c")
_BUFFER_BYTES = 1 << 29
_ROUNDS = 3


def build() -> ctypes.CDLL | None:
    """Build the C program; None without a C compiler."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "roofline.so"
        command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        loaded = ctypes.CDLL(str(library))
    loaded.read_memory.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    loaded.matmul_prepare.restype = ctypes.c_int64
    loaded.matmul.argtypes, loaded.matmul.restype = [ctypes.c_uint64], ctypes.c_double
    return loaded


def in_threads(work: Callable[[int], object], threads: int) -> float:
    """Seconds for work(0) ... work(threads - 1) at once; the best of some rounds."""
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_ROUNDS + 1):
            began = time.perf_counter()
            list(pool.map(work, range(threads)))
            times.append(time.perf_counter() - began)
    return min(times[1:])


def read_bytes_per_s(library: ctypes.CDLL | None, threads: int) -> float:
    """Bytes per second that all threads together read from buffers that no cache holds."""
    buffers = [np.ones(_BUFFER_BYTES // 8, np.uint64) for _ in range(threads)]
    if library is None:
        seconds = in_threads(lambda i: np.bitwise_xor.reduce(buffers[i]), threads)
    else:
        seconds = in_threads(lambda i: library.read_memory(buffers[i].ctypes.data, buffers[i].size), threads)
    return threads * _BUFFER_BYTES / seconds


def matrix_unit_operations_per_s(library: ctypes.CDLL | None, threads: int) -> float | None:
    """The peak of bf16 products from registers; None without a matrix unit."""
    if library is None or library.matmul_prepare() != 0:
        return None
    rounds = 5_000_000
    seconds = in_threads(lambda _: library.matmul(rounds), threads)
    return threads * rounds * float(library.matmul(1)) / seconds


def xla_operations_per_s(
    tokens: int = 512, outputs: int = 3072, inputs: int = 1024, layers: int = 28
) -> float:
    """Operations per second that XLA reaches on the products of a prefill step of a 0.6B model: bf16, weights
    [out, in], float32 sums.
    """
    weights = [jnp.full((outputs, inputs), 0.01, jnp.bfloat16) for _ in range(layers)]
    x = jnp.full((tokens, inputs), 0.01, jnp.bfloat16)

    @jax.jit
    def products(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
        return [jnp.einsum("ti,oi->to", x, w, preferred_element_type=jnp.float32) for w in weights]

    seconds = in_threads(lambda _: jax.block_until_ready(products(x, weights)), 1)
    return 2.0 * tokens * outputs * inputs * layers / seconds


def floors(
    config: ModelConfig, workload: Workload, machine: Machine, weight_bytes: float
) -> dict[str, tuple[Work, float]]:
    """The work and the least seconds of each part of a workload, by the name of the figure that it is
    compared with.
    """
    found: dict[str, tuple[Work, float]] = {}
    known: list[tuple[int, ...]] = []
    planned = waves(workload, 0, config.vocab_size)
    for number, jobs in enumerate(planned, 1):
        passes = [one_pass(config, prefill_spans(jobs, known), weight_bytes=weight_bytes)]
        passes += [one_pass(config, spans, weight_bytes=weight_bytes) for spans in decode_spans(jobs)]
        seconds = [machine.seconds(work) for work in passes]
        known += [job.token_ids for job in jobs]
        if len(jobs) == 1:
            found["ttft_s"] = (passes[0], seconds[0])
            found["decode_s"] = (sum(passes[1:], Work(0, 0)), sum(seconds[1:]))
        else:
            name = f"wave{number}_s" if len(planned) > 1 else "wall_s"
            found[name] = (sum(passes, Work(0, 0)), sum(seconds))
    return found


def measured(records: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, float]]:
    """The median of every figure, by (engine, workload)."""
    grouped: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    for line in records:
        grouped.setdefault((line["engine"], line["workload"]), []).append(line["figures"])
    return {
        key: {name: median(repeat[name] for repeat in repeats) for name in repeats[0]}
        for key, repeats in grouped.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.roofline", description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--results", type=Path, nargs="*", default=[], metavar="FILE", help="records of bench.run"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--weight-bytes", type=float, default=2, metavar="N", help="1 for int8; default: 2")
    parser.add_argument("--bytes-per-s", type=float, metavar="N", help="instead of measuring it")
    parser.add_argument("--operations-per-s", type=float, metavar="N", help="instead of measuring it")
    args = parser.parse_args()
    machine = _machine(args)
    results = measured(line for file in args.results for line in record.read_lines(file))
    engines = list(dict.fromkeys(engine for engine, _ in results))
    config = load_config(args.checkpoint)
    print("| workload | part | Gop | GB | least s |" + "".join(f" {e}, s | share |" for e in engines))
    print("|---|---|---:|---:|---:|" + "---:|---:|" * len(engines))
    for name in MAIN:
        if any(group.after_tokens for group in TABLE[name].groups):
            continue  # these workloads are about latency, not about work
        for figure, (work, least) in floors(config, TABLE[name], machine, args.weight_bytes).items():
            if not least:
                continue
            row = f"| {name} | {figure} | {work.operations / 1e9:.0f} | {work.bytes_read / 1e9:.1f} |"
            row += f" {least:.3f} |"
            for engine in engines:
                value = results.get((engine, name), {}).get(figure)
                row += f" {value:.3f} | {least / value:.0%} |" if value else " | |"
            print(row)
    return 0


def _machine(args: argparse.Namespace) -> Machine:
    library = build()
    read = args.bytes_per_s or read_bytes_per_s(library, args.threads)
    unit = args.operations_per_s or matrix_unit_operations_per_s(library, args.threads)
    xla = xla_operations_per_s()
    how = "C" if library is not None else "numpy"
    print(f"memory: {read / 1e9:.1f} GB/s read by {args.threads} threads ({how})")
    print(f"bf16 products: {unit / 1e12:.2f} Top/s" if unit else "bf16 products: no matrix unit", end="; ")
    print(f"XLA reaches {xla / 1e12:.2f}\n")
    return Machine(unit or xla, read)


if __name__ == "__main__":
    sys.exit(main())
