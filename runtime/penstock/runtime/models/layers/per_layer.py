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
from penstock.runtime.models.linear import PLAIN, Embedding, Linear, LinearFormat, project
from penstock.runtime.models.norms import RMSNorm
from penstock.runtime.models.pools import PoolPlanners
from penstock.runtime.ops.products import gated


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
        width = model.num_layers * config.size
        self.table = Embedding(
            config.vocab_size, width, dtype, planners, PLAIN, name="embed_tokens_per_layer"
        )
        parts = {"per_layer_model_projection": width}
        self.projection = Linear(model.hidden_size, parts, dtype, planners, linear=linear)
        self.per_layer_projection_norm = RMSNorm(config.size, model.rms_norm_eps, planners)

    def __call__(self, token_ids: jax.Array, x: jax.Array, inputs: LayerInputs) -> jax.Array:
        """token_ids int32 [T], x [T, E]: their embeddings -> [T, layers, size]."""
        pools = inputs.pools
        projected = project(self.projection, x, inputs.num_tokens, pools) * _constant(self.hidden**-0.5, x)
        projected = projected.reshape(x.shape[0], -1, self.size)
        projected = self.per_layer_projection_norm(projected, pools)
        of_token = self.table(token_ids, pools) * _constant(self.size**0.5, x)
        return (projected + of_token.reshape(projected.shape)) * _constant(2**-0.5, x)


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

    def __call__(self, x: jax.Array, of_layer: jax.Array, inputs: LayerInputs) -> jax.Array:
        """x [T, E], of_layer [T, size] -> [T, E]."""
        opened = project(self.gate, x, inputs.num_tokens, inputs.pools)
        both = jnp.concatenate([opened, of_layer], axis=1).astype(jnp.float32)
        inner = gated(self.activation, both).astype(x.dtype)
        return Residual(self.post_per_layer_input_norm).add_projected(self.projection, inner, x, inputs)


def _constant(value: float, x: jax.Array) -> jax.Array:
    """A number as transformers has it: rounded to the model's dtype before it multiplies."""
    return jnp.asarray(np.asarray(value, x.dtype))
