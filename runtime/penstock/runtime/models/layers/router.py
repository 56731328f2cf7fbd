"""Which experts each token goes to: a product with a weight for each expert, and the choice by it.

The product and all that follows is float32 in a model of any dtype, as in transformers' routers, because a
small error may make another choice. The weight of the gate of a shared expert is part of the same product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.runtime.models.config import ExpertsConfig, ModelConfig
from penstock.runtime.models.layers.inputs import LayerInputs
from penstock.runtime.models.linear import PUTS, LinearFormat
from penstock.runtime.models.load_rules import LoadRule, ParamPath, Rows, Stored, StoredAt, Target
from penstock.runtime.models.norms import Vector, vector_rule
from penstock.runtime.models.pools import Place, PoolPlanners
from penstock.runtime.ops import experts as xla
from penstock.runtime.ops.native import experts as native
from penstock.runtime.ops.native import linear as native_linear
from penstock.runtime.ops.products import matmul_transposed


class Choice(NamedTuple):
    """What each token goes to."""

    ids: jax.Array
    """The experts, int32 [T, per_token]."""
    weights: jax.Array
    """Their weights, float32 [T, per_token]."""
    shared: jax.Array
    """The weight of the shared expert, float32 [T, 1]."""


class Router(nnx.Module):
    """x [T, E] -> `Choice`."""

    def __init__(
        self,
        model: ModelConfig,
        config: ExpertsConfig,
        dtype: jnp.dtype,
        linear: LinearFormat,
        planners: PoolPlanners,
    ) -> None:
        hidden = model.hidden_size
        self.packed = linear.packed and native_linear.can_pack(native_linear.BLOCK_OUT, hidden)
        self.config, self.in_size = config, hidden
        self.gate_at = self._filled(config.num_experts)
        out_size = self.gate_at + (self._filled(1) if config.shared_gate else 0)
        shape = (
            native_linear.packed_shape(out_size, hidden, int8=False) if self.packed else (out_size, hidden)
        )
        self.weight = nnx.Param(jnp.zeros(shape, dtype))
        router = config.router
        self.bias_at = planners.vectors.take(out_size) if router.bias else None
        size = config.num_experts
        self.correction = Vector("correction", size, planners, float32=True) if router.correction else None
        self.expert_scale = (
            Vector("expert_scale", size, planners, float32=True) if router.expert_scale else None
        )

    def _filled(self, size: int) -> int:
        """Count the outputs that `size` outputs take: in tiles these are whole blocks."""
        return -(-size // native_linear.BLOCK_OUT) * native_linear.BLOCK_OUT if self.packed else size

    def load_rules(
        self, path: ParamPath, dtype: np.dtype[np.generic], stored: StoredAt
    ) -> Iterator[tuple[ParamPath, LoadRule]]:
        """See `HasLoadRules`. Where outputs are filled up to whole blocks, the others are copies of them."""
        size, block = self.config.num_experts, native_linear.BLOCK_OUT if self.packed else 1
        parts = [(path, size, 0)]
        if self.config.shared_gate:
            parts.append(((*path[:-1], "shared_expert_gate"), 1, self.gate_at))
        for layer, count, begin in parts:
            tensor: ParamPath = (*layer, "weight")
            there = _repeated(stored(tensor, (count, self.in_size)), count, self._filled(count))
            yield (
                tensor,
                LoadRule(
                    sources=there.sources,
                    targets=(Target((*path, "weight"), begin=begin // block, rows_per_entry=block),),
                    num_rows=self._filled(count),
                    dtype=dtype,
                    decode=there.decode,
                    put=PUTS[self.packed, False],
                ),
            )
        if self.bias_at is not None:
            filled = self._filled(size)

            def repeated(tensor: ParamPath, shape: tuple[int, ...]) -> Stored:
                return _repeated(stored(tensor, (size,)), size, filled)

            yield vector_rule((*path, "bias"), Place(self.bias_at.begin, filled), dtype, repeated)

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> Choice:
        """Choose the experts of x [T, E], normalised."""
        config, router, rows = self.config, self.config.router, inputs.num_tokens
        logits = self._logits(x, inputs)
        chosen, gate = logits[:, : config.num_experts], logits[:, self.gate_at : self.gate_at + 1]
        if not self.packed:
            ids, weights = xla.route(
                chosen,
                per_token=config.per_token,
                score=router.score,
                normalize=router.normalize,
                scale=router.scale,
                jitter=router.jitter,
                correction=None if self.correction is None else self.correction(inputs.pools),
                expert_scale=None if self.expert_scale is None else self.expert_scale(inputs.pools),
                num_groups=router.num_groups,
                top_groups=router.top_groups,
                in_group=router.in_group,
            )
        else:
            ids, weights = native.route(
                chosen,
                num_rows=rows,
                per_token=config.per_token,
                score=router.score,
                normalize=router.normalize,
                scale=router.scale,
                jitter=router.jitter,
                correction=None if self.correction is None else inputs.pools.floats,
                correction_at=0 if self.correction is None else self.correction.at.begin,
                expert_scale=None if self.expert_scale is None else inputs.pools.floats,
                expert_scale_at=0 if self.expert_scale is None else self.expert_scale.at.begin,
                num_groups=router.num_groups,
                top_groups=router.top_groups,
                in_group=router.in_group,
            )
        if not config.shared_gate:
            shared = jnp.ones((x.shape[0], 1), jnp.float32)
        elif self.packed:  # the weight of the only expert to choose is the sigmoid of its logit
            shared = native.route(gate, num_rows=rows, per_token=1, score="sigmoid", normalize=False)[1]
        else:
            shared = jax.nn.sigmoid(gate)
        return Choice(ids, weights, shared)

    def _logits(self, x: jax.Array, inputs: LayerInputs) -> jax.Array:
        """Compute float32 [T, outputs]."""
        weight, pools = self.weight[...], inputs.pools
        if self.packed:
            bias = None if self.bias_at is None else pools.vectors
            bias_at = 0 if self.bias_at is None else self.bias_at.begin
            packed = native_linear.Packed(weight, bias=bias, bias_at=bias_at)
            return native_linear.linear(x, (packed,), num_rows=inputs.num_tokens, out_dtype=np.float32)
        logits = matmul_transposed(x, weight)
        if self.bias_at is None:
            return logits
        return logits + pools.vectors[self.bias_at.columns].astype(jnp.float32)[None, :]


def _repeated(there: Stored, size: int, filled: int) -> Stored:
    """Return `filled` rows of a parameter that has `size`: after the last one comes the first again."""
    if filled == size:
        return there

    def order(own: Rows | None) -> Rows:
        rows = range(size) if own is None else own
        return tuple(rows[row % size] for row in range(filled))

    sources = tuple(dataclasses.replace(source, order=order(source.order)) for source in there.sources)
    return dataclasses.replace(there, sources=sources)
