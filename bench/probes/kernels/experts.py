"""Measures the native mixtures of experts for several numbers of rows.

    python -m bench.probes.kernels.experts [--quantization int8]

Layers have the shape of Qwen3-30B-A3B: each row goes to 8 of 128 experts, drawn anew in every round, so that
the caches hold none of them. What counts is how much longer a layer takes than one reading of the weights of
the experts that some row goes to, at the rate at which all threads read memory. Both are the best of
many rounds and take turns, because the speed of such machines drifts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from bench.measures import limits
from penstock.runtime.ops.native import huge_pages, library
from penstock.runtime.ops.native.experts import PackedExperts, experts, route
from penstock.runtime.ops.native.linear import packed_shape

HIDDEN, INNER, EXPERTS, CHOSEN = 2048, 768, 128, 8
ROWS = (1, 4, 16, 512)


@dataclass
class Measured:
    """The best of the rounds for one number of rows. Seconds and bytes are those of one layer."""

    rows: int
    seconds: float = float("inf")
    """Of the round in which seconds per byte were least."""
    bytes_read: float = 0.0
    ratio: float = float("inf")
    """The least of seconds to the seconds that reading takes."""


Weight = tuple[jax.Array, jax.Array | None]
"""Packed tiles, and the scale if they are int8."""


def _weight(rng: np.random.Generator, out: int, inner: int, int8: bool) -> Weight:
    """Make random weights: one expert's, copied, because their values cannot change how long a product
    takes.
    """
    shape = packed_shape(out, inner, int8=int8)
    if not int8:
        tiles = (rng.standard_normal(shape, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
        return jnp.asarray(np.broadcast_to(tiles, (EXPERTS, *shape))), None
    values = rng.integers(-127, 128, shape, np.int8)
    scale = jnp.full(EXPERTS * out, 1e-3, jnp.float32)
    return jnp.asarray(np.broadcast_to(values, (EXPERTS, *shape))), scale


@jax.jit
def _layers(
    x: jax.Array, logits: jax.Array, layers: Sequence[tuple[Weight, Weight]], num_rows: jax.Array
) -> jax.Array:
    for number, (gate_up, down) in enumerate(layers):
        ids, weights = route(
            logits[number], num_rows=num_rows, per_token=CHOSEN, score="softmax", normalize=True
        )
        packed = PackedExperts(*gate_up), PackedExperts(*down)
        x = experts(x, ids, weights, *packed, num_rows=num_rows, activation="silu")
    return x


def measure(rows: Sequence[int], *, int8: bool, layers: int, rounds: int) -> tuple[float, list[Measured]]:
    """Measure the rate at which memory is read, in bytes per second, and return it with what came out for
    each number of rows.
    """
    rng = np.random.default_rng(0)
    stack = [
        (_weight(rng, 2 * INNER, HIDDEN, int8), _weight(rng, HIDDEN, INNER, int8)) for _ in range(layers)
    ]
    tiles = [weight[0] for layer in stack for weight in layer]
    huge_pages.advise(tiles)
    expert_bytes = sum(array.nbytes for array in tiles) / layers / EXPERTS
    threads = len(os.sched_getaffinity(0))
    rate, found = 0.0, [Measured(count) for count in rows]
    for turn in range(rounds + 1):  # the first one compiles and warms up
        rate = max(rate, limits.read_bytes_per_s(threads))
        for figure in found:
            x = jnp.asarray(rng.standard_normal((figure.rows, HIDDEN), np.float32).astype(ml_dtypes.bfloat16))
            logits = rng.standard_normal((layers, figure.rows, EXPERTS), np.float32)
            chosen = np.argsort(-logits, axis=-1)[..., :CHOSEN]
            active = sum(len(np.unique(layer)) for layer in chosen)
            given = jnp.asarray(logits)
            begin = time.perf_counter()
            jax.block_until_ready(_layers(x, given, stack, jnp.int32(figure.rows)))
            seconds, size = (time.perf_counter() - begin) / layers, active * expert_bytes / layers
            if turn and seconds / size < figure.ratio:
                figure.ratio, figure.seconds, figure.bytes_read = seconds / size, seconds, size
    for figure in found:
        figure.ratio *= rate
    return rate, found


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quantization", choices=("none", "int8"), default="none")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, metavar="N")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="1.2 GB each; default: 2")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="default: 20")
    args = parser.parse_args()
    if not library.available():
        print("no native kernels on this machine", file=sys.stderr)
        return 1
    int8 = args.quantization == "int8"
    rate, found = measure(args.rows, int8=int8, layers=args.layers, rounds=args.rounds)
    print(f"memory is read at {rate / 1e9:.1f} GB/s; figures of one layer\n")
    print("| rows | experts' weights, MB | ms | GB/s | GFLOP/s | against reading once |")
    print("|---:|---:|---:|---:|---:|---:|")
    for figure in found:
        done = 2 * 3 * HIDDEN * INNER * CHOSEN * figure.rows
        print(
            f"| {figure.rows} | {figure.bytes_read / 1e6:.0f} | {figure.seconds * 1e3:.2f} "
            f"| {figure.bytes_read / figure.seconds / 1e9:.1f} | {done / figure.seconds / 1e9:.0f} "
            f"| {figure.ratio:.2f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
