"""The MLP. It takes the norm before it and the residual stream, because the CPU kernels fuse these with their
products. Gate and up are one product.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.runtime.models.config import MLPConfig, ModelConfig, PlainActivation
from penstock.runtime.models.layers.inputs import LayerInputs, Residual
from penstock.runtime.models.linear import Linear, LinearFormat, project, project_activated, project_gated
from penstock.runtime.models.load_rules import Span
from penstock.runtime.models.norms import Norm, Vector
from penstock.runtime.models.pools import PoolPlanners
from penstock.runtime.ops.native.norm import can_normalize, normalize
from penstock.runtime.ops.products import gated


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x)) (SwiGLU and GeGLU, Shazeer 2020), or down(activation(up(x)))."""

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
        if config.plain is not None:
            del parts["gate_proj"]
        cuts = {part: (Span(config.pieces, inner),) for part in parts}
        self.gate_up_proj = Linear(hidden, parts, dtype, planners, bias=bias, linear=linear, cuts=cuts)
        down = {"down_proj": hidden}
        self.down_proj = Linear(inner, down, dtype, planners, bias=bias, linear=linear, sums=config.pieces)
        self.activation, self.plain = config.activation, config.plain
        self.gate_multiplier, self.inner = config.gate_multiplier, inner
        learned = config.plain == "xielu"
        self.alpha_p = Vector("alpha_p", 1, planners) if learned else None
        self.alpha_n = Vector("alpha_n", 1, planners) if learned else None

    @property
    def is_native(self) -> bool:
        """Whether native kernels compute this layer, or XLA by one rounded operation for each element."""
        is_exact = self.gate_multiplier == 1.0 and self.plain != "xielu" and self.activation != "gelu"
        is_exact = is_exact and (self.plain not in ("gelu", "gelu_tanh") or can_normalize(self.inner))
        return is_exact and all(linear.packed for linear in (self.gate_up_proj, self.down_proj))

    def __call__(self, x: jax.Array, norm: Norm | None, residual: Residual, inputs: LayerInputs) -> jax.Array:
        """Add to x what the MLP makes of norm(x): x [T, E] -> [T, E]."""
        return residual.add_projected(self.down_proj, self._inner(x, norm, inputs), x, inputs)

    def alone(self, x: jax.Array, norm: Norm | None, inputs: LayerInputs) -> jax.Array:
        """Compute what the MLP makes of norm(x), without x: x [T, E] -> [T, E]."""
        return project(self.down_proj, self._inner(x, norm, inputs), inputs.num_tokens, inputs.pools)

    def _inner(self, x: jax.Array, norm: Norm | None, inputs: LayerInputs) -> jax.Array:
        rows, pools = inputs.num_tokens, inputs.pools
        if self.plain is None and self.gate_multiplier != 1.0:
            assert self.activation != "gelu", "no family has a multiplier and this activation"
            both = project(self.gate_up_proj, x, rows, pools, norm=norm).astype(jnp.float32)
            factors = np.repeat(np.array([self.gate_multiplier, 1.0], np.float32), both.shape[1] // 2)
            return gated(self.activation, both * factors[None]).astype(x.dtype)
        if self.plain is None and self.activation != "gelu":
            return project_gated(self.gate_up_proj, x, rows, pools, norm=norm, activation=self.activation)
        if self.plain in ("gelu", "gelu_tanh"):
            inner = project_activated(self.gate_up_proj, x, rows, pools, norm=norm, plain=self.plain)
            if inner is not None:
                return inner
        made = project(self.gate_up_proj, x, rows, pools, norm=norm)
        if self.plain in ("gelu", "gelu_tanh") and self.gate_up_proj.packed and can_normalize(self.inner):
            return normalize(made, num_rows=rows, eps=None, plain=self.plain)
        up = made.astype(jnp.float32)
        if self.plain is None:
            gate, up = jnp.split(up, 2, axis=1)
            return (_activated(gate, "gelu") * up).astype(x.dtype)
        if self.alpha_p is None or self.alpha_n is None:
            return _activated(up, self.plain).astype(x.dtype)
        alphas = (alpha(pools).astype(jnp.float32)[None] for alpha in (self.alpha_p, self.alpha_n))
        return _xielu(up, *alphas).astype(x.dtype)


def _activated(x: jax.Array, activation: PlainActivation) -> jax.Array:
    match activation:
        case "xielu":
            raise ValueError("xielu has learned numbers")
        case "relu":
            return jax.nn.relu(x)
        case "relu2":
            return jnp.square(jax.nn.relu(x))
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)


_XIELU_SLOPE, _XIELU_EDGE = np.float32(0.5), np.float32(-1e-6)


def _xielu(x: jax.Array, alpha_p: jax.Array, alpha_n: jax.Array) -> jax.Array:
    """Compute xIELU of x [T, N]; alpha_p, alpha_n [1, 1], of which softplus makes positive numbers."""
    above = jax.nn.softplus(alpha_p) * x * x
    bent = jnp.expm1(jnp.minimum(x, _XIELU_EDGE)) - x
    below = (_XIELU_SLOPE + jax.nn.softplus(alpha_n)) * bent
    return jnp.where(x > 0, above, below) + _XIELU_SLOPE * x
