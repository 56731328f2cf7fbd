"""An MLP and a mixture of experts side by side (Gemma 4): norm(mlp(norm(x))) + norm(experts(norm(x))), where
the router reads x through a norm of its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.runtime.models.config import MLPAndExpertsConfig, ModelConfig
from penstock.runtime.models.layers.experts import ExpertStack
from penstock.runtime.models.layers.inputs import LayerInputs, Residual
from penstock.runtime.models.layers.mlp import MLP
from penstock.runtime.models.layers.router import Router
from penstock.runtime.models.linear import LinearFormat, normalised, summed
from penstock.runtime.models.norms import Norm, RMSNorm
from penstock.runtime.models.pools import PoolPlanners


class MLPAndExperts(nnx.Module):
    """Stands in the place of an MLP."""

    def __init__(
        self,
        model: ModelConfig,
        config: MLPAndExpertsConfig,
        dtype: jnp.dtype,
        linear: LinearFormat,
        planners: PoolPlanners,
    ) -> None:
        experts = config.experts
        self.is_cut = experts.is_cut
        self.mlp = MLP(model, config.mlp, dtype, linear, planners)
        self.router = Router(model, experts, dtype, linear, planners)
        self.experts = ExpertStack(model, experts, dtype, linear, planners)

        def norm() -> RMSNorm:
            return RMSNorm(model.hidden_size, model.rms_norm_eps, planners, offset=model.norm_offset)

        self.mlp_end_norm, self.router_norm = norm(), norm()
        self.experts_norm, self.experts_end_norm = norm(), norm()
        self.router_scale = model.hidden_size**-0.5

    @property
    def is_native(self) -> bool:
        """Whether native kernels compute this layer."""
        return self.mlp.is_native and self.router.packed and self.experts.packed

    def __call__(self, x: jax.Array, norm: Norm | None, residual: Residual, inputs: LayerInputs) -> jax.Array:
        """Add to x what both make of it: x [T, E] -> [T, E]. `norm` is that of the MLP."""
        natively = self.is_native

        def through(norm: Norm, y: jax.Array) -> jax.Array:
            return normalised(y, norm, inputs.num_tokens, inputs.pools, natively=natively)

        dense = through(self.mlp_end_norm, self.mlp.alone(x, norm, inputs))
        choice = self.router(through(self.router_norm, x) * np.asarray(self.router_scale, x.dtype), inputs)
        routed = self.experts(through(self.experts_norm, x), choice.ids, choice.weights, inputs)
        routed = summed(routed).astype(routed.dtype) if self.is_cut else routed
        both = Residual(self.experts_end_norm, natively=natively).add(routed, dense, inputs)
        return residual.add(both, x, inputs)
