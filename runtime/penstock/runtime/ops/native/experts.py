"""Mixtures of experts over packed weights: the Python side of src/experts.

`route` says which experts each row goes to, `experts` computes them, and `batched` computes a product of its
own for each head. Products are those of `linear`: bfloat16 activations, float32 sums, int8 weights likewise.
A row of results depends on its own row of inputs alone, bit for bit; a NaN in that row makes all of its
results NaN.

The choices of all rows are sorted by expert, and the products of all chosen experts are one list of units of
weights that the threads share (`src/experts/products.h`). So an expert's weights are read once a step for all
of its rows, and those of experts that nobody chose never. A row's sum over its experts is in the order of its
choices. Latent attention's products for each head go the same way (`batched`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from penstock.runtime.ops.adapters import ExpertAdapters
from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.activations import ACTIVATIONS, Activation
from penstock.runtime.ops.native.linear import BLOCK_OUT

NO_EXPERT = -1
"""As the id of a choice: nothing is computed for it, and nothing added. On a mesh another device does it."""


Score = Literal["softmax", "sigmoid", "sparsemixer"]
"""What makes the weights of experts of their logits, see `route`."""
_SCORES: Mapping[Score, int] = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}


class PackedExperts(NamedTuple):
    """Weights [N, K] of G experts (or heads) as the kernels read them.

    The tiles of each are those of `Packed`. Scale and bias are G * N values, an expert's N behind those of
    the expert before it, from `scale_at` and `bias_at` on, of arrays that may hold those of other layers too.
    """

    tiles: Array  # [G, N / 16, any], as in `Packed`
    scale: Array | None = None  # float32 [any] with int8, as in `Packed`
    bias: Array | None = None  # bfloat16 [any]
    scale_at: int = 0
    bias_at: int = 0

    @property
    def operands(self) -> tuple[Array, Array, Array]:
        """Tiles, scale and bias, the latter two empty if there are none."""
        scale = library.absent(jnp.float32) if self.scale is None else self.scale
        return self.tiles, scale, library.absent(jnp.bfloat16) if self.bias is None else self.bias


def route(
    logits: Array,
    *,
    num_rows: Array,
    per_token: int,
    score: Score,
    normalize: bool,
    scale: float = 1.0,
    jitter: float = 0.0,
    correction: Array | None = None,
    correction_at: int = 0,
    expert_scale: Array | None = None,
    expert_scale_at: int = 0,
    num_groups: int = 1,
    top_groups: int = 1,
    in_group: int = 2,
) -> tuple[Array, Array]:
    """Choose from logits float32 [T, E] the experts of each row, int32 [T, per_token], and their weights,
    float32, the first choice first.

    An expert's score is the softmax or the sigmoid of its logit. The per_token experts with the highest score
    are chosen, of equals the one with the lower number. correction float32 [any], of which the E values from
    `correction_at` on count, is added to the scores for the choice only. If num_groups is not 1, experts are
    divided into as many groups of neighbours; only the experts of the top_groups groups can be chosen whose
    two highest (corrected) scores have the largest sums, or with in_group 1 whose highest one is largest.

    A weight is the score, divided by the sum of the chosen ones' scores if `normalize`, times `scale`, times
    the expert's value of expert_scale, which is given like correction. With softmax and `normalize` this is
    also the softmax over the chosen logits (gpt-oss, Granite).

    "sparsemixer" (Liu et al. 2024, arXiv 2409.12136) gives each choice, with logit l, the softmax over the
    experts that are not chosen yet and whose logit m is not far below: (l - m) / max(|m|, l) is not above
    twice the `jitter`. Only `scale` is used besides.

    num_rows int32 []: rows from this one on are padding, whose results are undefined. NaN counts as the
    highest score, so a row of logits with a NaN has a weight that is NaN.

    Raises ValueError if there are fewer experts to choose from than per_token, or groups of unequal size.
    """
    count = logits.shape[1]
    if num_groups < 1 or count % num_groups:
        raise ValueError(f"num_groups: {count} experts cannot be divided into {num_groups} equal groups")
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"top_groups: {top_groups} is not between 1 and the {num_groups} groups")
    if in_group not in (1, 2):
        raise ValueError(f"in_group: must be 1 or 2, not {in_group}")
    eligible = count // num_groups * top_groups
    if not 1 <= per_token <= eligible:
        raise ValueError(f"per_token: {per_token} is not between 1 and the {eligible} eligible experts")
    library.load()
    none = library.absent(jnp.float32)
    shape = (logits.shape[0], per_token)
    call = jax.ffi.ffi_call(
        "penstock_route", (jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32))
    )
    ids, weights = call(
        logits,
        num_rows,
        none if correction is None else correction,
        none if expert_scale is None else expert_scale,
        score=np.int32(_SCORES[score]),
        jitter=np.float32(jitter),
        normalize=normalize,
        scale=np.float32(scale),
        num_groups=num_groups,
        top_groups=top_groups,
        in_group=in_group,
        at=np.array([correction_at, expert_scale_at], np.int64),
    )
    return ids, weights


def experts(
    x: Array,
    ids: Array,
    weights: Array,
    gate_up: PackedExperts,
    down: PackedExperts,
    *,
    num_rows: Array,
    activation: Activation,
    limit: float = 0.0,
    weigh_input: bool = False,
    adapters: ExpertAdapters | None = None,
) -> Array:
    """Compute x bfloat16 [T, K] -> bfloat16 [T, N]: for each row the sum of weight * down(act(gate_up(x)))
    over the experts that it chose, with ids int32 [T, k] and weights float32 [T, k].

    The sum is in the order of the choices and in float32, and is rounded once. gate_up has 2 I outputs, those
    of the gate first, and down has I inputs. limit: that of the activation "gpt_oss". weigh_input: x * weight
    goes into the expert, whose result is then added as it is (Llama 4). num_rows int32 []: rows from this one
    on are padding, which costs nothing, and whose results are undefined. adapters: what is added to the
    products of rows that have one; the others have the very same bits as without it. Only the weights of
    experts that a row chose are read. The program fails if a row chose an expert that does not exist and is
    not NO_EXPERT.
    """
    library.load()
    width = down.tiles.shape[1] * BLOCK_OUT
    call = jax.ffi.ffi_call("penstock_experts", jax.ShapeDtypeStruct((x.shape[0], width), jnp.bfloat16))
    places = [gate_up.scale_at, gate_up.bias_at, down.scale_at, down.bias_at]
    slots, pool = library.absent(jnp.int32), library.absent(jnp.bfloat16, (0, 0))
    of_adapters = [0, 0, 0]
    if adapters is not None:
        rows = adapters.rows
        slots, pool = rows.slots, rows.pool
        of_adapters = [rows.rank, adapters.gate_up.begin * rows.rank, adapters.down.begin * rows.rank]
    out: Array = call(
        x,
        num_rows,
        ids,
        weights,
        *gate_up.operands,
        *down.operands,
        slots,
        pool,
        activation=ACTIVATIONS[activation],
        limit=np.float32(limit),
        weigh_input=weigh_input,
        at=np.array(places, np.int64),
        adapters=np.array(of_adapters, np.int64),
    )
    return out


def batched(x: Array, weight: PackedExperts, *, num_rows: Array) -> Array:
    """Compute x bfloat16 [T, G, K] times G weights [N, K] transposed, each head by its own: bfloat16
    [T, G, N].

    num_rows int32 []: rows from this one on are padding, which costs nothing, and whose results are
    undefined.
    """
    library.load()
    rows, heads, _ = x.shape
    width = weight.tiles.shape[1] * BLOCK_OUT
    call = jax.ffi.ffi_call("penstock_batched", jax.ShapeDtypeStruct((rows, heads, width), jnp.bfloat16))
    out: Array = call(x, num_rows, *weight.operands, scale_at=weight.scale_at, bias_at=weight.bias_at)
    return out
