"""What makes classes of a text's hidden states, or an embedding of other numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.configs.encoder import Activation, ClassifierConfig, ProjectionConfig
from penstock.runtime.models.linear import Linear
from penstock.runtime.models.norms import LayerNorm
from penstock.runtime.models.pools import PoolPlanners, Pools


class Classifier(nnx.Module):
    """out(norm(activation(dense(x)))), of which all but `out` may be absent. Its weights are in the model's
    dtype, and its products in float32.
    """

    def __init__(
        self, model: ModelConfig, config: ClassifierConfig, dtype: jnp.dtype, planners: PoolPlanners
    ) -> None:
        hidden = model.hidden_size
        has_dense = config.activation is not None
        dense, out = {"dense": hidden}, {"out": len(config.classes.labels)}
        self.dense = Linear(hidden, dense, dtype, planners, bias=config.dense_bias) if has_dense else None
        self.norm = LayerNorm(hidden, model.rms_norm_eps, planners, bias=False) if config.norm else None
        self.out = Linear(hidden, out, dtype, planners, bias=config.bias)
        self.activation = config.activation

    def __call__(self, pooled: jax.Array, pools: Pools) -> jax.Array:
        """Compute pooled hidden states float32 [R, E] -> float32 [R, classes]."""
        x = pooled
        if self.dense is not None and self.activation is not None:
            x = _activated(_product(self.dense, x, pools), self.activation)
        if self.norm is not None:
            x = self.norm(x, pools)
        return _product(self.out, x, pools)


class Projection(nnx.Module):
    """activation(out(x)), a layer behind the pooling of an encoder. Its weights are in the model's dtype, and
    its product in float32.
    """

    def __init__(self, config: ProjectionConfig, dtype: jnp.dtype, planners: PoolPlanners) -> None:
        self.out = Linear(config.in_size, {"out": config.out_size}, dtype, planners, bias=config.bias)
        self.activation = config.activation

    def __call__(self, x: jax.Array, pools: Pools) -> jax.Array:
        """Compute pooled hidden states float32 [R, in_size] -> float32 [R, out_size]."""
        y = _product(self.out, x, pools)
        return y if self.activation is None else _activated(y, self.activation)


def _product(linear: Linear, x: jax.Array, pools: Pools) -> jax.Array:
    return linear.product(x.astype(linear.weight[...].dtype), pools)


def no_logits(hidden: jax.Array) -> jax.Array:
    """Make the logits [R, 1] of a model that chooses no tokens: zeros, or no number where a hidden state [R,
    E] is none, so that such a row is told of as with any model.
    """
    return jnp.sum(hidden.astype(jnp.float32), axis=1, keepdims=True) * np.float32(0)


def _activated(x: jax.Array, activation: Activation) -> jax.Array:
    match activation:
        case "tanh":
            return jnp.tanh(x)
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "relu":
            return jax.nn.relu(x)
