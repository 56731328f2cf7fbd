"""Runs one product of a layer, over enough layers that no cache holds their weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from bench.kernels.lines import CODES, Product
from bench.kernels.stacks import calls_per_run, layers_kept, windows
from bench.measures.limits import Format
from penstock.runtime.ops.codes import pack_codes, pack_floats
from penstock.runtime.ops.native import huge_pages
from penstock.runtime.ops.native.linear import NormOptions, Packed, linear, packed_shape

Weights = tuple[jax.Array, jax.Array | None]
"""Packed tiles, and the scale if they are int8."""


_DRAWN = 1 << 20
"""Weights are so many random numbers again and again: to draw them all would take longer than to measure."""


class Layers:
    """The weights of one product of several layers. Their values are alike, because they do not change how
    long a product takes.
    """

    def __init__(self, product: Product, format: Format, least_bytes: int) -> None:
        self._product = product
        sizes = (product.outputs, product.inputs)
        rng = np.random.default_rng(0)
        drawn: NDArray[np.generic] = (rng.standard_normal(_DRAWN, np.float32) * 0.02).astype(
            ml_dtypes.bfloat16
        )
        if format == "int8":
            drawn = rng.integers(-127, 128, _DRAWN, np.int8)
        tiles: NDArray[np.generic]
        if format in CODES:
            form = CODES[format]
            tiles = leaf = np.empty(form.shape(*sizes), np.uint8)
            codes = np.resize(rng.integers(0, 1 << form.bits, _DRAWN, np.uint8), sizes)
            scales = np.full((product.outputs, product.inputs // (form.group or product.inputs)), 2.0**-10)
            if form.nested:  # any bytes are numbers, if their float16 are below 1
                leaf[...] = np.resize(rng.integers(0, 0x3C, _DRAWN, np.uint8), leaf.shape)
            elif form.floats:
                # The bytes 0x7f and 0xff of E4M3 are no numbers.
                pack_floats(leaf, codes & np.uint8(~8 & 0xFF), scales.astype(np.float32))
            else:
                pack_codes(leaf, codes, scales.astype(np.float32), None)
        else:
            tiles = np.resize(drawn, packed_shape(*sizes, int8=format == "int8"))
        kept = layers_kept(tiles.nbytes, least_bytes)
        self._layers: list[Weights] = []
        for _ in range(kept):
            scale = jnp.full(product.outputs, 1e-3, jnp.float32) if format == "int8" else None
            self._layers.append((jnp.array(tiles, copy=True), scale))
        huge_pages.advise(tiles for tiles, _ in self._layers)

    def runner(self, rows: int, operations: float) -> Callable[[], float]:
        """Make a function that runs some of the layers and returns the seconds of one. `operations` are those
        of one.
        """
        product = self._product
        calls = calls_per_run(len(self._layers), operations)
        draw = np.random.default_rng(rows).standard_normal
        x = _bfloat16(draw((rows, product.inputs), np.float32))
        norm = _bfloat16(np.ones(product.inputs)) if product.norm else None
        residual = _bfloat16(np.zeros((rows, product.outputs))) if product.residual else None
        turns = windows(self._layers, calls)
        run = jax.jit(partial(_run, product))

        def seconds(num_rows: int = rows) -> float:
            chosen = [self._layers[number] for number in next(turns)]
            count = jnp.int32(num_rows)
            began = time.perf_counter()
            jax.block_until_ready(run(chosen, x, norm, residual, count))
            return (time.perf_counter() - began) / calls

        seconds(1)  # compiles
        return seconds


def _bfloat16(values: NDArray[np.floating]) -> jax.Array:
    return jnp.asarray(values.astype(ml_dtypes.bfloat16))


def _run(
    product: Product,
    layers: Sequence[Weights],
    x: jax.Array,
    norm: jax.Array | None,
    residual: jax.Array | None,
    count: jax.Array,
) -> list[jax.Array]:
    """Run one product after the other: each takes its number of rows from the result before it, which no real
    value changes, because XLA may run what does not depend on each other at once.
    """
    outputs = []
    for tiles, scale in layers:
        options = NormOptions() if norm is None else NormOptions(norm=norm, eps=1e-6)
        y = linear(
            x,
            (Packed(tiles, scale),),
            num_rows=count,
            residual=residual,
            gate="silu" if product.gated else None,
            **options,
        )
        count = count + (y[0, 0] > 1e30).astype(jnp.int32)
        outputs.append(y[0, 0])
    return outputs
