"""Mixtures of experts on GPUs of Hopper and Blackwell: products of rows with the weights of their own expert
only, by a kernel in Pallas' Mosaic GPU.

The rows of a step's choices are sorted by expert. A block of threads takes up to 64 rows of one expert and
some of its outputs: one warpgroup brings channels of rows and weights to shared memory, a few pieces ahead,
and the other multiplies. So the weights of experts that no row chose are not read, and those of the others
once for 64 rows. Between the two products of an expert XLA computes the activation.

Weights in int8 are made bfloat16 by the warpgroup that brings them (`int8_pages`). Their scales multiply what
comes of them, in XLA.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from penstock.runtime.ops.adapters import ExpertAdapters
from penstock.runtime.ops.experts import StackedExperts, grouped_experts
from penstock.runtime.ops.gpu.forms import ON_HOPPER, GpuForm
from penstock.runtime.ops.gpu.int8_pages import TILED_COLUMNS, widen, widen_ahead
from penstock.runtime.ops.gpu.tiles import (
    ACC,
    BARRIER_BYTES,
    LINES,
    SWIZZLE,
    TILE,
    TILED,
    aligned_blocks,
    copy_rows,
    fetch_ahead,
    launched,
    product_by_warps,
    zeros,
)
from penstock.runtime.ops.native.activations import Activation

_OUTPUTS = (128, 64)
"""How many outputs a block may have: the first that divides their number."""
_MOST_STAGES = 3
"""Pieces of rows and weights in shared memory at a time. With 3, or 2 in int8, a multiprocessor of Hopper or
of a B200 has room for two blocks."""
_MOST_STAGES_OF_INT8 = 2
_LEAST_STAGES = 2
"""So that one piece can come while another is multiplied."""


def takes(gate_up: StackedExperts, down: StackedExperts) -> bool:
    """Say whether the kernel can compute with such weights."""
    return all(
        each.weight.dtype in (jnp.bfloat16, jnp.int8)
        and all(size % SWIZZLE == 0 for size in each.weight.shape[1:])
        for each in (gate_up, down)
    )


def gpu_experts(
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
    form: GpuForm = ON_HOPPER,
    interpreted: bool = False,
) -> Array:
    """Compute `ops.experts.experts` by the kernel for weights that `takes` accepts and without adapters, else
    in XLA. The sums of a product are in another order than XLA's. `form` and `interpreted`: as
    `grouped_product` takes them.
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
        product=functools.partial(grouped_product, form=form, interpreted=interpreted) if fits else None,
    )


@functools.partial(jax.jit, static_argnames=("form", "interpreted"))
def grouped_product(
    x: Array, weight: Array, sizes: Array, *, form: GpuForm = ON_HOPPER, interpreted: bool = False
) -> Array:
    """Multiply each row with the weights of its group: x bfloat16 [N, in], weight bfloat16 or int8
    [groups, out, in] -> float32 [N, out]. The first sizes[0] rows are those of the first group, and so on,
    int32 [groups]; what comes behind them is undefined. `form` and `interpreted`: as `decode_attention` takes
    them.
    """
    num_rows, in_size = x.shape
    out_size = weight.shape[1]
    is_int8 = weight.dtype == jnp.int8
    blocks = aligned_blocks(jnp.cumsum(sizes) - sizes, sizes, num_rows, TILE)
    pieces = in_size // SWIZZLE
    outputs, stages = _tiles_for(out_size, form=form, is_int8=is_int8)
    stages = min(stages, pieces)
    # Rows of as many pieces as there are operands may still be read, while as many have been sent for.
    places = 2 * stages if is_int8 else stages

    def kernel(
        x_ref: Any,
        weight_ref: Any,
        groups_ref: Any,
        eighths_ref: Any,
        before_ref: Any,
        ends_ref: Any,
        out_ref: Any,
    ) -> None:
        number, begin = lax.axis_index("block"), lax.axis_index("outputs") * outputs
        first, before, end = eighths_ref[number] * LINES, before_ref[number], ends_ref[number]
        steps = jnp.where(end > 0, jnp.int32(pieces), 0)

        def scoped(
            x_smem: Any,
            weight_smem: Any,
            numbers: Any,
            out_smem: Any,
            full: Any,
            arrived: Any,
            made: Any,
            free: Any,
        ) -> None:
            warpgroup = lax.axis_index("warpgroup")

            def take(i: Any) -> tuple[Any, Any]:
                """Wait for a piece, and return the references of its rows and weights."""
                place, stage = lax.rem(i, jnp.int32(places)), lax.rem(i, jnp.int32(stages))
                plgpu.barrier_wait(full.at[place])
                if is_int8:
                    plgpu.barrier_wait(made.at[stage])
                return x_smem.at[place], weight_smem.at[stage].transpose((1, 0))

            @pl.when(warpgroup == 0)
            def _compute() -> None:
                def multiply(acc_ref: Any) -> Any:
                    @pl.loop(0, steps)
                    def _(i: Any) -> None:
                        plgpu.wgmma(acc_ref, *take(i))
                        plgpu.wgmma_wait(1)  # for the product before this one

                        @pl.when((i > 0) & (i - 1 + stages < steps))
                        def _() -> None:
                            plgpu.barrier_arrive(free.at[lax.rem(i - 1, jnp.int32(stages))])

                    return acc_ref[...]

                def step(i: Any, acc: Any) -> Any:
                    acc = product_by_warps(acc, *take(i), interpreted=interpreted)
                    plgpu.commit_smem()  # else the next copy may overwrite what is still read

                    @pl.when(i + stages < steps)
                    def _() -> None:
                        plgpu.barrier_arrive(free.at[lax.rem(i, jnp.int32(stages))])

                    return acc

                if form.by_warps:
                    out_smem[...] = lax.fori_loop(0, steps, step, zeros(outputs))
                else:
                    out_smem[...] = pl.run_scoped(multiply, ACC((TILE, outputs), jnp.float32))
                plgpu.commit_smem()
                mine = out_ref.at[:, pl.ds(begin, outputs)]
                copy_rows(out_smem, mine, before, first + before, end - before)

            @pl.when(warpgroup == 1)
            def _fetch() -> None:
                group = groups_ref[number]

                def fetch(i: Any, _: Any) -> None:
                    place, stage = lax.rem(i, jnp.int32(places)), lax.rem(i, jnp.int32(stages))
                    channels = pl.ds(i * SWIZZLE, SWIZZLE)
                    plgpu.copy_gmem_to_smem(
                        x_ref.at[pl.ds(first, TILE), channels], x_smem.at[place], full.at[place]
                    )
                    plgpu.copy_gmem_to_smem(
                        weight_ref.at[group, pl.ds(begin, outputs), channels],
                        numbers.at[stage, 0] if is_int8 else weight_smem.at[stage],
                        (arrived if is_int8 else full).at[stage],
                    )

                def make(i: Any) -> None:
                    stage = lax.rem(i, jnp.int32(stages))
                    plgpu.barrier_wait(arrived.at[stage])
                    widen(numbers.at[stage], weight_smem.at[stage])
                    plgpu.commit_smem()

                if is_int8:
                    widen_ahead(steps, stages, fetch, [(make, made, free)])
                else:
                    fetch_ahead(steps, stages, fetch, free)

        pl.run_scoped(
            scoped,
            plgpu.SMEM((places, TILE, SWIZZLE), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((stages, outputs, SWIZZLE), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((stages, 1, outputs, SWIZZLE), jnp.int8, transforms=TILED_COLUMNS)
            if is_int8
            else None,
            plgpu.SMEM((TILE, outputs), jnp.float32),
            plgpu.Barrier(num_arrivals=1 if is_int8 else 2, num_barriers=places),
            plgpu.Barrier(num_barriers=stages) if is_int8 else None,
            plgpu.Barrier(num_barriers=stages) if is_int8 else None,
            plgpu.Barrier(num_barriers=stages),
            collective_axes="warpgroup",
        )

    # A tile is copied whole, also the last one.
    padded = jnp.pad(x, ((0, TILE), (0, 0)))
    out: Array = launched(
        kernel,
        jax.ShapeDtypeStruct((num_rows, out_size), jnp.float32),
        grid=(out_size // outputs, len(blocks.owners)),
        grid_names=("outputs", "block"),
        num_threads=2,
        thread_name="warpgroup",
    )(padded, weight, blocks.owners, blocks.eighths, blocks.before, blocks.ends)
    return out


def _tiles_for(out_size: int, *, form: GpuForm, is_int8: bool) -> tuple[int, int]:
    """Tell how many outputs a block has, and how many pieces shared memory holds at a time."""
    most = _MOST_STAGES_OF_INT8 if is_int8 else _MOST_STAGES
    for outputs in _OUTPUTS:
        beside = TILE * outputs * 4 + BARRIER_BYTES
        of_stage = (TILE + outputs) * SWIZZLE * 2
        if is_int8:
            of_stage += (TILE * 2 + outputs) * SWIZZLE
        stages = min(most, (form.shared_bytes - beside) // of_stage)
        if out_size % outputs == 0 and stages >= _LEAST_STAGES:
            break
    return outputs, stages
