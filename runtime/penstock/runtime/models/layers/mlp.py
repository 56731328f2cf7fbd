"""The gated MLP. It takes the norm before it and the residual stream, because the CPU kernels fuse these with
their products. Gate and up are one product.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.runtime.models.config import MLPConfig, ModelConfig
from penstock.runtime.models.layers.inputs import LayerInputs, Residual
from penstock.runtime.models.linear import Linear, LinearFormat, project, project_gated
from penstock.runtime.models.norms import RMSNorm
from penstock.runtime.models.pools import PoolPlanners


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x)) (SwiGLU and GeGLU, Shazeer 2020)."""

    def __init__(
        self,
        model: ModelConfig,
        config: MLPConfig,
        dtype: jnp.dtype,
        linear: LinearFormat,
        planners: PoolPlanners,
    ) -> None:
        hidden, inner, bias = model.hidden_size, config.intermediate_size, config.bias
        parts = {"gate_proj": inner, "up_proj": inner}
        pieces = dict.fromkeys(parts, config.pieces)
        self.gate_up_proj = Linear(hidden, parts, dtype, planners, bias=bias, linear=linear, pieces=pieces)
        down = {"down_proj": hidden}
        self.down_proj = Linear(inner, down, dtype, planners, bias=bias, linear=linear, sums=config.pieces)
        self.activation = config.activation

    @property
    def is_native(self) -> bool:
        """Whether native kernels compute this layer."""
        return all(linear.packed for linear in (self.gate_up_proj, self.down_proj))

    def __call__(
        self, x: jax.Array, norm: RMSNorm | None, residual: Residual, inputs: LayerInputs
    ) -> jax.Array:
        """x and what the MLP makes of norm(x): x [T, E] -> [T, E]."""
        return residual.add_projected(self.down_proj, self._inner(x, norm, inputs), x, inputs)

    def alone(self, x: jax.Array, norm: RMSNorm | None, inputs: LayerInputs) -> jax.Array:
        """What the MLP makes of norm(x), without x: x [T, E] -> [T, E]."""
        return project(self.down_proj, self._inner(x, norm, inputs), inputs.num_tokens, inputs.pools)

    def _inner(self, x: jax.Array, norm: RMSNorm | None, inputs: LayerInputs) -> jax.Array:
        return project_gated(
            self.gate_up_proj, x, inputs.num_tokens, inputs.pools, norm=norm, activation=self.activation
        )
