"""Mixtures of experts in XLA: what `native.experts` is measured against, and what computes weights that are
not packed. Arguments and results are those of `native.experts`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from penstock.runtime.ops.adapters import ExpertAdapters, added, delta
from penstock.runtime.ops.codes import OUTPUTS, matmul_codes
from penstock.runtime.ops.native.activations import Activation
from penstock.runtime.ops.native.experts import NO_EXPERT, Score
from penstock.runtime.ops.products import as_stored, gated, matmul_int8, matmul_transposed

_TINY = np.float32(1e-20)
"""Added to a sum of scores, as transformers does, because sigmoids of large negative logits are zero."""


class StackedExperts(NamedTuple):
    """Weights of all experts, in the checkpoint's [out, in] layout."""

    weight: jax.Array
    """[experts, out, in], in the model's dtype or int8; or the bytes of `codes` [experts, out / 16, any]."""
    scale: jax.Array | None = None
    """Of each output, float32 [experts, out], with int8."""
    bias: jax.Array | None = None
    """[experts, out]."""


class ExpertsOp(Protocol):
    """`experts` as models call it, on any platform."""

    def __call__(
        self,
        x: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
        gate_up: StackedExperts,
        down: StackedExperts,
        *,
        activation: Activation,
        limit: float = ...,
        weigh_input: bool = ...,
        adapters: ExpertAdapters | None = ...,
    ) -> jax.Array: ...


def route(
    logits: jax.Array,
    *,
    per_token: int,
    score: Score,
    normalize: bool,
    scale: float = 1.0,
    jitter: float = 0.0,
    correction: jax.Array | None = None,
    expert_scale: jax.Array | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    in_group: int = 2,
) -> tuple[jax.Array, jax.Array]:
    """Choose from logits float32 [T, E] the experts of each row, int32 [T, per_token], and their weights,
    float32.

    It chooses as `native.experts.route` does. correction, expert_scale: float32 [E].
    """
    if score == "sparsemixer":
        return _mixed(logits, per_token, scale, jitter)
    scores = jax.nn.softmax(logits, axis=1) if score == "softmax" else jax.nn.sigmoid(logits)
    # Scores that only rounding makes equal must not be ties, so without a correction the logits decide.
    keys = logits if correction is None and num_groups == 1 else scores
    if correction is not None:
        keys = keys + correction[None, :]
    keys = jnp.where(jnp.isnan(keys), np.float32(np.inf), keys)
    if num_groups > 1:
        keys = _of_best_groups(keys, num_groups, top_groups, in_group)
    ids = jax.lax.top_k(keys, per_token)[1]
    weights = jnp.take_along_axis(scores, ids, axis=1)
    if normalize:
        weights = weights / (weights.sum(axis=1, keepdims=True) + _TINY)
    weights = weights * np.float32(scale)
    return ids, weights if expert_scale is None else weights * expert_scale[ids]


def _mixed(logits: jax.Array, per_token: int, scale: float, jitter: float) -> tuple[jax.Array, jax.Array]:
    """Compute `route` by "sparsemixer"."""
    left, ids, weights = logits, [], []
    for _ in range(per_token):
        chosen = jnp.argmax(left, axis=1)[:, None]
        peak = jnp.take_along_axis(left, chosen, axis=1)
        below = (peak - logits) / jnp.maximum(jnp.abs(logits), peak)
        near = jnp.where(below > np.float32(2 * jitter), np.float32(-np.inf), left)
        ids.append(chosen.astype(jnp.int32))
        weights.append(np.float32(scale) / jnp.exp(near - peak).sum(axis=1, keepdims=True))
        left = jnp.where(jnp.arange(logits.shape[1])[None] == chosen, np.float32(-np.inf), left)
    return jnp.concatenate(ids, axis=1), jnp.concatenate(weights, axis=1)


def _of_best_groups(keys: jax.Array, num_groups: int, top_groups: int, in_group: int) -> jax.Array:
    """Return keys [T, E], with -inf for all experts outside the groups whose `in_group` highest keys have the
    largest sums.
    """
    grouped = keys.reshape(keys.shape[0], num_groups, -1)
    sums = jax.lax.top_k(grouped, min(in_group, grouped.shape[2]))[0].sum(axis=2)
    best = jax.lax.top_k(sums, top_groups)[1]
    is_best = (best[:, :, None] == jnp.arange(num_groups)[None, None, :]).any(axis=1)
    return jnp.where(is_best[:, :, None], grouped, np.float32(-np.inf)).reshape(keys.shape)


def experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up: StackedExperts,
    down: StackedExperts,
    *,
    activation: Activation,
    limit: float = 0.0,
    weigh_input: bool = False,
    adapters: ExpertAdapters | None = None,
) -> jax.Array:
    """Compute x [T, K] -> [T, N] in x's dtype: for each row the sum of weight * down(act(gate_up(x))) over
    the experts that it chose, with ids int32 [T, k] and weights float32 [T, k]; see `native.experts.experts`.

    The experts are computed one after the other, each for all rows. `jax.lax.ragged_dot` would compute as
    much: except on a TPU it is a product of all rows with all experts, and its operand has the rows once for
    each expert, which no memory could hold in a long prompt. `ops.gpu.experts` and `ops.tpu.experts` compute
    only what was chosen.

    What adapters add is computed for the choices alone: to gate_up before the experts, and to down after
    them, of what stood between the two.
    """
    chosen_rows = more_up = None
    if adapters is not None:
        chosen_rows = adapters.rows.of_choices(ids)
        inputs = jnp.repeat(x, ids.shape[1], axis=0)
        if weigh_input:
            inputs = (inputs.astype(jnp.float32) * weights.reshape(-1, 1)).astype(x.dtype)
        more_up = delta(inputs, chosen_rows, adapters.gate_up).reshape(*ids.shape, -1)

    def add(
        found: tuple[jax.Array, jax.Array | None], one: tuple[jax.Array, StackedExperts, StackedExperts]
    ) -> tuple[tuple[jax.Array, jax.Array | None], None]:
        (chosen, between), (number, *both_stacks) = found, one
        # In a loop of steps XLA moves the constraints below to before that loop, where they are lost.
        gate_up_one, down_one = (each._replace(weight=as_stored(each.weight)) for each in both_stacks)
        is_mine = ids == number
        rows = x
        if weigh_input:
            share = jnp.where(is_mine, weights, np.float32(0)).sum(axis=1, keepdims=True)
            rows = (x.astype(jnp.float32) * share).astype(x.dtype)
        both = _product(rows, gate_up_one)
        if adapters is not None and more_up is not None:
            mine = jnp.where(is_mine[:, :, None], more_up, np.float32(0)).sum(axis=1)
            both = added(both, mine, adapters.rows)
        inner = gated(activation, both, limit).astype(x.dtype)
        if between is not None:
            between = jnp.where(is_mine[:, :, None], inner[:, None, :], between)
        out = _product(inner, down_one)
        return (jnp.where(is_mine[:, :, None], out[:, None, :], chosen), between), None

    count, width = len(down.weight), down.weight.shape[1]
    if down.weight.dtype == jnp.uint8:
        width *= OUTPUTS
    none = jnp.zeros((*ids.shape, width), jnp.float32)
    between = None if adapters is None else jnp.zeros((*ids.shape, adapters.down.in_size), x.dtype)
    gate_up, down = (stack._replace(weight=as_stored(stack.weight)) for stack in (gate_up, down))
    each = (jnp.arange(count, dtype=jnp.int32), gate_up, down)
    (chosen, between), _ = jax.lax.scan(add, (none, between), each)
    if adapters is not None and chosen_rows is not None and between is not None:
        more = delta(between.reshape(-1, between.shape[2]), chosen_rows, adapters.down)
        chosen = added(chosen, more.reshape(chosen.shape), adapters.rows)
    return weighed_sum(chosen, None if weigh_input else weights).astype(x.dtype)


def grouped_experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up: StackedExperts,
    down: StackedExperts,
    *,
    activation: Activation,
    limit: float,
    weigh_input: bool,
    adapters: ExpertAdapters | None,
    product: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None,
) -> jax.Array:
    """Compute `experts` by products of rows with the weights of their own expert. Where there are adapters,
    or no such product for these weights, it is `experts` that computes.

    product: is given rows [N, in], sorted by expert, the weights [E, out, in], in int8 without their scales,
    and how many rows each expert has, int32 [E], and returns float32 [N, out]. Rows without an expert come
    last, and what it returns for them is not read.
    """
    if product is None or adapters is not None:
        return experts(
            x,
            ids,
            weights,
            gate_up,
            down,
            activation=activation,
            limit=limit,
            weigh_input=weigh_input,
            adapters=adapters,
        )
    num_experts, per_token = gate_up.weight.shape[0], ids.shape[1]
    has_expert = ids != NO_EXPERT
    expert = jnp.where(has_expert, ids, num_experts).reshape(-1)
    order = jnp.argsort(expert, stable=True)
    numbers = jnp.arange(num_experts, dtype=jnp.int32)
    sizes = (expert[:, None] == numbers[None, :]).sum(axis=0, dtype=jnp.int32)
    sorted_expert = jnp.minimum(expert[order], num_experts - 1)
    rows = x[order // per_token]
    if weigh_input:
        rows = (rows.astype(jnp.float32) * weights.reshape(-1)[order, None]).astype(x.dtype)

    def of_rows(rows: jax.Array, stack: StackedExperts) -> jax.Array:
        y = product(rows, stack.weight, sizes)
        if stack.scale is not None:
            y = y * stack.scale[sorted_expert]
        return y if stack.bias is None else y + stack.bias.astype(jnp.float32)[sorted_expert]

    inner = gated(activation, of_rows(rows, gate_up), limit).astype(x.dtype)
    out = of_rows(inner, down)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))
    chosen = jnp.where(has_expert[:, :, None], out[places].reshape(*ids.shape, -1), np.float32(0))
    return weighed_sum(chosen, None if weigh_input else weights).astype(x.dtype)


def weighed_sum(chosen: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Add up what the choices of each row gave, float32 [T, k, N] -> [T, N], with weights float32 [T, k];
    None: all are 1.
    """
    total = jnp.zeros((chosen.shape[0], chosen.shape[2]), jnp.float32)
    for choice in range(chosen.shape[1]):  # in the order of the choices, as the kernels add them
        part = chosen[:, choice]
        total = total + (part if weights is None else part * weights[:, choice, None])
    return total


def _product(x: jax.Array, expert: StackedExperts) -> jax.Array:
    """Compute x [T, in] -> float32 [T, out], by one expert's [out, in]."""
    weight, scale, bias = expert
    if weight.dtype == jnp.uint8:
        y = matmul_codes(x, weight)
    else:
        y = matmul_transposed(x, weight) if scale is None else matmul_int8(x, weight, scale)
    return y if bias is None else y + bias.astype(jnp.float32)[None, :]
