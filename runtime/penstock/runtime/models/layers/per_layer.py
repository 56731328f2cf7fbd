"""Per-layer embeddings (Gemma 3n and 4): each layer adds a small vector that depends on the token and on its
embedding, through a gate that the residual stream opens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.runtime.models.config import ModelConfig, PerLayerConfig
from penstock.runtime.models.layers.inputs import LayerInputs, Residual
from penstock.runtime.models.linear import PLAIN, Embedding, Linear, LinearFormat, project, project_gate
from penstock.runtime.models.norms import RMSNorm
from penstock.runtime.models.pools import PoolPlanners
from penstock.runtime.ops.native.linear import linear as packed_product
from penstock.runtime.ops.native.norm import can_normalize, normalize


class PerLayerInputs(nnx.Module):
    """Makes the vectors of all layers: (norm(projection(x) / sqrt(E)) + table[token] * sqrt(size)) / sqrt(2),
    with one table for all layers, and the norm over each layer's part.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: PerLayerConfig,
        dtype: jnp.dtype,
        linear: LinearFormat,
        planners: PoolPlanners,
    ) -> None:
        self.size, self.hidden = config.size, model.hidden_size
        self.pad_token_id, self.padded_tokens = config.pad_token_id, config.padded_tokens
        width = model.num_layers * config.size
        self.table = Embedding(
            config.vocab_size // config.pieces,
            width,
            dtype,
            planners,
            PLAIN,
            name="embed_tokens_per_layer",
            pieces=config.pieces,
        )
        parts = {"per_layer_model_projection": width}
        self.projection = Linear(model.hidden_size, parts, dtype, planners, linear=linear)
        self.per_layer_projection_norm = RMSNorm(config.size, model.rms_norm_eps, planners)
        self.is_native = self.projection.packed and can_normalize(config.size)
        """Whether native kernels compute all but the lookup and its product with a constant."""

    def __call__(self, token_ids: jax.Array, x: jax.Array, inputs: LayerInputs) -> jax.Array:
        """Look up token_ids int32 [T], x [T, E]: their embeddings -> [T, layers, size]."""
        pools = inputs.pools
        for token in self.padded_tokens:
            token_ids = jnp.where(token_ids == token, self.pad_token_id, token_ids)
        of_token = self.table(token_ids, pools) * _constant(self.size**0.5, x)
        if self.is_native:
            return self._summed(x, of_token, inputs).reshape(x.shape[0], -1, self.size)
        projected = project(self.projection, x, inputs.num_tokens, pools) * _constant(self.hidden**-0.5, x)
        projected = projected.reshape(x.shape[0], -1, self.size)
        projected = self.per_layer_projection_norm(projected, pools)
        return (projected + of_token.reshape(projected.shape)) * _constant(2**-0.5, x)

    def _summed(self, x: jax.Array, of_token: jax.Array, inputs: LayerInputs) -> jax.Array:
        """Compute x [T, E], of_token [T, layers * size] -> the latter's shape, by the native kernels."""
        norm, pools, rows = self.per_layer_projection_norm, inputs.pools, inputs.num_tokens
        weights = self.projection.operands(pools)
        return normalize(
            packed_product(x, weights, num_rows=rows, scale=self.hidden**-0.5),
            num_rows=rows,
            eps=norm.eps,
            norm=pools.vectors,
            norm_at=norm.weight_at.begin,
            size=self.size,
            residual=of_token,
            factor=jnp.full((1,), 2**-0.5, jnp.float32),
        )


class PerLayerAddition(nnx.Module):
    """x + norm(projection(activation(gate(x)) * the layer's vector))."""

    def __init__(
        self,
        model: ModelConfig,
        config: PerLayerConfig,
        dtype: jnp.dtype,
        linear: LinearFormat,
        planners: PoolPlanners,
    ) -> None:
        hidden = model.hidden_size
        gate, back = {"per_layer_input_gate": config.size}, {"per_layer_projection": hidden}
        self.gate = Linear(hidden, gate, dtype, planners, linear=linear)
        self.projection = Linear(config.size, back, dtype, planners, linear=linear)
        self.post_per_layer_input_norm = RMSNorm(hidden, model.rms_norm_eps, planners)
        self.activation = config.activation
        self.is_native = self.gate.packed and self.projection.packed
        """Whether native kernels compute it."""

    def __call__(self, x: jax.Array, of_layer: jax.Array, inputs: LayerInputs) -> jax.Array:
        """Compute x [T, E], of_layer [T, size] -> [T, E]."""
        pools, rows = inputs.pools, inputs.num_tokens
        inner = project_gate(self.gate, x, of_layer, rows, pools, activation=self.activation)
        joined = Residual(self.post_per_layer_input_norm, natively=self.is_native)
        return joined.add_projected(self.projection, inner, x, inputs)


def _constant(value: float, x: jax.Array) -> jax.Array:
    """Return a number as transformers has it: rounded to the model's dtype before it multiplies."""
    return jnp.asarray(np.asarray(value, x.dtype))
