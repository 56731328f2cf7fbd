"""Measures the native linear layers for several numbers of rows, on each instruction set of this machine.

    python -m bench.probes.kernels [--quantization int8]

It runs two products of a layer of Qwen3-0.6B (gate and up, then down), over so many layers that no cache
holds them. With few rows reading the weights is the limit (GB/s; compare with `bench.roofline`), with many
rows multiplying is (GFLOP/s). The instruction sets take turns in every round, because the speed of such
machines drifts.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.library import Isa
from penstock.runtime.ops.native.linear import Packed, linear, pack, quantize

HIDDEN, INNER, LAYERS = 1024, 3072, 16
ROWS = (1, 4, 16, 17, 32, 64, 512)
_ROUNDS = 9


Weight = tuple[jax.Array, jax.Array | None]
"""Packed tiles, and the scale if they are int8."""


def _weight(rng: np.random.Generator, out: int, inner: int, int8: bool) -> Weight:
    weight = (rng.standard_normal((out, inner), np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    if not int8:
        return jnp.asarray(pack(weight)), None
    values, scale = quantize(weight)
    return jnp.asarray(pack(values)), jnp.asarray(scale)


def _layers(x: jax.Array, layers: list[tuple[Weight, ...]], num_rows: jax.Array) -> jax.Array:
    for layer in layers:
        gate, up, down = (Packed(*weight) for weight in layer)
        inner = linear(x, (gate, up), num_rows=num_rows, gate="silu")
        x = linear(inner, (down,), num_rows=num_rows, residual=x)
    return x


def measure(int8: bool) -> dict[tuple[Isa, int], float]:
    """Median seconds for all layers, by instruction set and number of rows."""
    rng = np.random.default_rng(0)
    sizes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    layers = [tuple(_weight(rng, *size, int8) for size in sizes) for _ in range(LAYERS)]
    run = jax.jit(_layers)
    best = library.limit_isa(Isa.AMX)
    times: dict[tuple[Isa, int], list[float]] = {}
    for rows in ROWS:
        x = jnp.asarray(rng.standard_normal((rows, HIDDEN), np.float32).astype(ml_dtypes.bfloat16))
        count = jnp.int32(rows)
        for turn in range(_ROUNDS + 1):  # the first round compiles and warms up
            for isa in range(Isa.AVX2, best + 1):
                library.limit_isa(Isa(isa))
                begin = time.perf_counter()
                jax.block_until_ready(run(x, layers, count))
                if turn:
                    times.setdefault((Isa(isa), rows), []).append(time.perf_counter() - begin)
    library.limit_isa(Isa.AMX)
    return {key: median(taken) for key, taken in times.items()}


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quantization", choices=("none", "int8"), default="none")
    int8 = parser.parse_args().quantization == "int8"
    if not library.available():
        print("no native kernels on this machine", file=sys.stderr)
        return 1
    values = 3 * HIDDEN * INNER * LAYERS
    print(f"{'rows':>5} {'kernels':<12} {'ms':>8} {'GB/s':>7} {'GFLOP/s':>8}")
    for (isa, rows), taken in measure(int8).items():
        read, done = values * (1 if int8 else 2) / taken / 1e9, 2 * values * rows / taken / 1e9
        print(f"{rows:5} {isa.name:<12} {taken * 1e3:8.2f} {read:7.1f} {done:8.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
