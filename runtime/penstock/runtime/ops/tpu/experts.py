"""Mixtures of experts on TPUs: products of rows with the weights of their own expert only, by a kernel in
Pallas.

The rows of a step's choices are sorted by expert, and cut into tiles. A program of the grid takes a tile, an
expert that has rows in it, and some of the outputs. It multiplies the whole tile, and leaves the results of
rows before the expert's as they are. Programs that follow each other share a tile, or an expert's weights,
which are copied once then. So the weights of experts that no row chose are not read, and those of the others
once, whatever their rows are. Between the two products of an expert XLA computes the activation. Weights in
int8 become bfloat16 in the chip's own memory, and XLA multiplies what comes of them with their scales.

The order of the programs is that of megablox (Gale et al. 2022, arXiv 2211.15841), which JAX has for TPUs
(`jax.experimental.pallas.ops.tpu.megablox`). It reads the same bytes, but before each product it plans them
in a loop over all experts, one by one. `jax.lax.ragged_dot` takes weights as [experts, in, out] alone, so
XLA would copy those of all experts.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.tpu as pltpu
import jax.numpy as jnp
from jax import Array, lax

from penstock.runtime.ops.adapters import ExpertAdapters
from penstock.runtime.ops.cache_spec import TPU_LANES
from penstock.runtime.ops.experts import StackedExperts, grouped_experts
from penstock.runtime.ops.native.activations import Activation
from penstock.runtime.ops.products import has_outputs_last

SUBLANES = 8
"""Inputs and outputs of weights come in whole multiples of so many, as memory's tiles have them."""
LEAST_TILE = 16
MOST_TILE = 256
"""Rows of a tile of the choices, a power of two."""
PIECE_BYTES = 4 * 2**20
"""What the weights of one program may take of the chip's memory in bfloat16. Those of the next one come
meanwhile."""
_CHIP_BYTES = 32 * 2**20
"""What the kernel may have of it: XLA gives a kernel 16 MiB unless it asks, and the chips have 64 or more."""


def takes(gate_up: StackedExperts, down: StackedExperts) -> bool:
    """Say whether the kernel can compute with such weights."""
    return all(
        each.weight.dtype in (jnp.bfloat16, jnp.int8)
        and all(size % SUBLANES == 0 for size in each.weight.shape[1:])
        and _bytes_on_chip(*each.weight.shape[1:]) <= _CHIP_BYTES
        for each in (gate_up, down)
    )


def tpu_experts(
    x: Array,
    ids: Array,
    weights: Array,
    gate_up: StackedExperts,
    down: StackedExperts,
    *,
    activation: Activation,
    limit: float = 0.0,
    weigh_input: bool = False,
    adapters: ExpertAdapters | None = None,
    interpret: Any = False,
) -> Array:
    """Compute `ops.experts.experts` by the kernel for weights that `takes` accepts and without adapters, else
    in XLA. The sums of a product are in another order than XLA's. `interpret`: as `pallas_call` takes it, for
    tests.
    """
    fits = x.dtype == jnp.bfloat16 and takes(gate_up, down)
    return grouped_experts(
        x,
        ids,
        weights,
        gate_up,
        down,
        activation=activation,
        limit=limit,
        weigh_input=weigh_input,
        adapters=adapters,
        product=functools.partial(grouped_product, interpret=interpret) if fits else None,
    )


@functools.partial(jax.jit, static_argnames="interpret")
def grouped_product(x: Array, weight: Array, sizes: Array, *, interpret: Any = False) -> Array:
    """Multiply each row with the weights of its group: x bfloat16 [N, in], weight bfloat16 or int8
    [groups, out, in] -> float32 [N, out]. The first sizes[0] rows are those of the first group, and so on,
    int32 [groups]; what comes behind them is undefined. Where no group has rows, the weights of one are read
    all the same. `interpret`: as `pallas_call` takes it.
    """
    num_rows, in_size = x.shape
    num_groups, out_size, _ = weight.shape
    tile, piece = _tile_for(num_rows, num_groups), _piece_for(out_size, in_size)
    ends = jnp.cumsum(sizes)
    firsts = ends - sizes
    # A group visits each tile in which it has rows. One visit is of one program for each piece of outputs.
    first_tiles = firsts // tile
    of_group = jnp.where(sizes > 0, (ends - 1) // tile - first_tiles + 1, 0)
    last_visits = jnp.cumsum(of_group)
    number = jnp.arange(pl.cdiv(num_rows, tile) + num_groups - 1, dtype=jnp.int32)
    groups = (number[:, None] >= last_visits[None, :]).sum(axis=1, dtype=jnp.int32)
    groups = jnp.minimum(groups, num_groups - 1)
    tiles = first_tiles[groups] + number - (last_visits - of_group)[groups]
    tiles = jnp.minimum(tiles, pl.cdiv(num_rows, tile) - 1)
    # XLA stores such weights with the outputs last. Seen so, they need not be copied for the kernel.
    outputs_last = has_outputs_last(weight)

    def kernel(
        groups_ref: Any, tiles_ref: Any, firsts_ref: Any, x_ref: Any, weight_ref: Any, out_ref: Any
    ) -> None:
        visit = pl.program_id(1)
        product = lax.dot_general(
            x_ref[...],
            weight_ref[...].astype(x_ref.dtype),  # int8 is exact in bfloat16
            (((1,), (0 if outputs_last else 1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        row = tiles_ref[visit] * tile + lax.broadcasted_iota(jnp.int32, product.shape, 0)
        # Rows before the group's have their results. Those behind it get theirs in later visits.
        is_new = row >= firsts_ref[groups_ref[visit]]
        out_ref[...] = jnp.where(is_new, product, out_ref[...])

    def weight_at(number: Any, visit: Any, groups_ref: Any, *_: Any) -> tuple[Any, ...]:
        return (groups_ref[visit], 0, number) if outputs_last else (groups_ref[visit], number, 0)

    sides = (in_size, piece) if outputs_last else (piece, in_size)
    out: Array = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((num_rows, out_size), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(out_size, piece), jnp.maximum(last_visits[-1], 1)),
            in_specs=[
                pl.BlockSpec((tile, in_size), lambda number, visit, groups, tiles, *_: (tiles[visit], 0)),
                pl.BlockSpec((None, *sides), weight_at),
            ],
            out_specs=pl.BlockSpec(
                (tile, piece), lambda number, visit, groups, tiles, *_: (tiles[visit], number)
            ),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_CHIP_BYTES
        ),
        name="grouped_product",
        interpret=interpret,
    )(groups, tiles, firsts, x, jnp.swapaxes(weight, 1, 2) if outputs_last else weight)
    return out


def _tile_for(num_rows: int, num_groups: int) -> int:
    """Return the rows of a tile: about twice as many as a group has on average. With smaller ones, weights
    would be brought to the multipliers more often, and with larger ones more products would be of no use.
    """
    tile = LEAST_TILE
    while tile < MOST_TILE and tile * num_groups < 2 * num_rows:
        tile *= 2
    return min(tile, num_rows)


def _piece_for(out_size: int, in_size: int) -> int:
    """Return how many outputs a program computes: all, or a multiple of the lanes."""
    most = max(1, PIECE_BYTES // (2 * in_size * TPU_LANES)) * TPU_LANES
    pieces = pl.cdiv(out_size, most)
    return out_size if pieces == 1 else pl.cdiv(pl.cdiv(out_size, pieces), TPU_LANES) * TPU_LANES


def _bytes_on_chip(out_size: int, in_size: int) -> int:
    """Tell what the largest programs need: rows, weights and results twice, and a product. Weights in int8
    need as much, twice and once more in bfloat16.
    """
    piece = _piece_for(out_size, in_size)
    wide = pl.cdiv(in_size, TPU_LANES) * TPU_LANES
    return 2 * 2 * wide * (MOST_TILE + piece) + 3 * 4 * MOST_TILE * piece
