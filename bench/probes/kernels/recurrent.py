"""Measures the native operations of recurrent layers, and the same ones in XLA.

    python -m bench.probes.kernels.recurrent [--rows 1 4 16 64] [--xla]

Decode steps of several rows are compared with reading and writing the rows' state once, at the rate at which
all threads read memory: each call has entries of its own, so that no cache holds them. A prefill step
of 512 tokens is compared with the native products of the same layer. Times are the best of many rounds, in
turns with measuring the memory, because the speed of such machines drifts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from bench.measures import limits
from penstock.runtime.ops.attention import AttentionMeta, make_meta
from penstock.runtime.ops.native import huge_pages, library
from penstock.runtime.ops.native.linear import Packed, linear, packed_shape
from penstock.runtime.ops.recurrent.native import NATIVE_RECURRENT
from penstock.runtime.ops.recurrent.operations import XLA_RECURRENT, RecurrentOps

ROWS = (1, 4, 16, 64)
PREFILL = 512
_ROUND_BYTES = 128 << 20
"""Of state that the calls of a round read and write, which no cache holds."""
_MOST_CALLS = 64


@dataclass(frozen=True)
class Layer:
    """One layer's operation."""

    name: str
    operation: str
    """The field of `RecurrentOps`."""
    state: tuple[int, ...]
    """The shape of an entry."""
    inputs: tuple[int, ...]
    """Channels of the inputs."""
    options: dict[str, Any]
    parameters: dict[str, tuple[int, ...]]
    """Names and shapes of the parameters."""
    products: tuple[tuple[int, int], ...] = ()
    """(outputs, inputs) of the products of the layer around it."""


def _delta(name: str, hidden: int, heads: int, key_heads: int, dim: int = 128) -> Layer:
    mixed, inner = (2 * key_heads + heads) * dim, heads * dim
    return Layer(
        name,
        "delta",
        (heads, dim, dim),
        (mixed, inner, 2 * heads),
        {"eps": 1e-6, "num_key_heads": key_heads},
        {"a_log": (heads,), "dt_bias": (heads,), "norm": (dim,)},
        ((mixed + inner + 2 * heads, hidden), (hidden, inner)),
    )


def _mamba(name: str, hidden: int, heads: int, size: int, dim: int) -> Layer:
    inner = heads * size
    return Layer(
        name,
        "ssd",
        (heads, dim, size),
        (inner + 2 * dim, inner, heads),
        {"eps": 1e-5, "num_groups": 1, "dt_limit": (0.0, float("inf"))},
        {"a_log": (heads,), "dt_bias": (heads,), "skip": (heads,), "norm": (inner,)},
        ((2 * inner + 2 * dim + heads, hidden), (hidden, inner)),
    )


def _conv(name: str, channels: int, taps: int) -> Layer:
    return Layer(name, "conv", (taps - 1, channels), (channels,), {}, {"weight": (taps, channels)})


LAYERS = (
    _delta("delta rule, Qwen3.5-0.8B", 1024, 16, 16),
    _delta("delta rule, Qwen3-Next", 2048, 32, 16),
    _mamba("Mamba-2, Granite 4 tiny", 1536, 48, 64, 128),
    _conv("convolution, Qwen3.5-0.8B", 6144, 4),
    _conv("convolution, LFM2", 2048, 3),
)


def _random(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray((np.random.default_rng(0).standard_normal(shape, np.float32) * 0.5).astype(dtype))


def _program(layer: Layer, ops: RecurrentOps, tokens: int, rows: int) -> Callable[[], float]:
    """Make a function that returns the seconds of one call, for `rows` rows that have `tokens` tokens
    together.
    """
    calls = max(1, min(_MOST_CALLS, _ROUND_BYTES // _state_bytes(layer, rows)))
    run: Any = getattr(ops, layer.operation)
    mixed, *others = layer.inputs
    inputs = [_random(tokens, mixed, dtype=ml_dtypes.bfloat16)]
    if others:
        gate, logits = others
        inputs += [_random(tokens, gate, dtype=ml_dtypes.bfloat16), _random(tokens, logits)]
    parameters = {name: _random(*shape) for name, shape in layer.parameters.items()}

    def meta(call: int) -> AttentionMeta:
        entries = 2 * rows * call + jnp.arange(rows, dtype=jnp.int32)
        return make_meta(
            starts=jnp.ones(rows, jnp.int32),
            q_lens=jnp.full(rows, tokens // rows, jnp.int32),
            page_table=jnp.zeros((rows, 1), jnp.int32),
            num_tokens=tokens,
            decode_only=tokens == rows,
            page_size=2 * tokens,
            num_pages=1,
            state_from=entries,
            state_to=entries + rows,
        )

    @partial(jax.jit, donate_argnums=0)
    def steps(state: jax.Array, inputs: Any, parameters: Any) -> Any:
        outputs = []
        for call in range(calls):
            if layer.operation == "conv":
                out, state = run(*inputs, parameters["weight"], None, state, meta(call), "silu")
            else:
                out, state = run(*inputs, state, meta(call), **parameters, **layer.options)
            outputs.append(out[0, 0])
        return outputs, state

    kept = [jnp.full((2 * rows * calls, *layer.state), 0.1, jnp.float32)]
    huge_pages.advise(kept)

    def seconds() -> float:
        begin = time.perf_counter()
        _, kept[0] = jax.block_until_ready(steps(kept[0], inputs, parameters))
        return (time.perf_counter() - begin) / calls

    return seconds


def _state_bytes(layer: Layer, rows: int) -> int:
    """Count the bytes of the rows' state, read and written."""
    return 2 * 4 * rows * int(np.prod(layer.state))


def _products(layer: Layer) -> Callable[[], float]:
    """Make a function that returns the seconds of the layer's native products for a prefill step."""
    tiles = [_random(*packed_shape(*size, int8=False), dtype=ml_dtypes.bfloat16) for size in layer.products]
    inputs = [_random(PREFILL, size, dtype=ml_dtypes.bfloat16) for _, size in layer.products]

    @jax.jit
    def run(inputs: Any, tiles: Any) -> Any:
        count = jnp.int32(PREFILL)
        return [linear(x, (Packed(one),), num_rows=count) for x, one in zip(inputs, tiles, strict=True)]

    def seconds() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(run(inputs, tiles))
        return time.perf_counter() - begin

    return seconds


def main() -> int:
    """Print two tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, metavar="N")
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="default: 30")
    parser.add_argument("--xla", action="store_true", help="measure XLA too")
    args = parser.parse_args()
    if not library.available():
        print("no native kernels on this machine", file=sys.stderr)
        return 1
    threads = len(os.sched_getaffinity(0))
    kinds = {"native": NATIVE_RECURRENT} | ({"XLA": XLA_RECURRENT} if args.xla else {})

    def best(measure: Callable[[], float]) -> float:
        measure()  # compiles and warms up
        return min(measure() for _ in range(args.rounds))

    rate, lines = 0.0, []
    for layer in LAYERS:
        rate = max(rate, limits.read_bytes_per_s(threads))
        for rows in args.rows:
            for kind, ops in kinds.items():
                lines.append((layer, rows, kind, best(_program(layer, ops, rows, rows))))
    print(
        f"memory is read at {rate / 1e9:.1f} GB/s; load {os.getloadavg()[0]:.1f}; decode steps of one layer\n"
    )
    print("| operation | rows | by | us | state, GB/s | against reading and writing the state once |")
    print("|---|---:|---|---:|---:|---:|")
    for layer, rows, kind, taken in lines:
        speed = _state_bytes(layer, rows) / taken
        print(
            f"| {layer.name} | {rows} | {kind} | {taken * 1e6:.0f} | {speed / 1e9:.1f} | {rate / speed:.2f} |"
        )
    print(f"\na prefill step of {PREFILL} tokens of one row\n")
    print("| operation | by | ms | products of the layer, ms |\n|---|---|---:|---:|")
    for layer in LAYERS:
        products = f"{best(_products(layer)) * 1e3:.1f}" if layer.products else ""
        for kind, ops in kinds.items():
            print(
                f"| {layer.name} | {kind} | {best(_program(layer, ops, PREFILL, 1)) * 1e3:.2f} | {products} |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
