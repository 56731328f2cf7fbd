"""The activations of encoders of images, which are computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from penstock.runtime.models.configs.vision import VisionActivation
from penstock.runtime.models.linear import Linear, project, project_gated
from penstock.runtime.models.pools import Pools


def activated(x: jax.Array, activation: VisionActivation) -> jax.Array:
    """Compute the activation of x."""
    wide = x.astype(jnp.float32)
    if activation == "silu":
        return jax.nn.silu(wide).astype(x.dtype)
    return jax.nn.gelu(wide, approximate=activation == "gelu_tanh").astype(x.dtype)


def activated_gate(
    gate_up: Linear, x: jax.Array, num_rows: jax.Array, pools: Pools, activation: VisionActivation
) -> jax.Array:
    """Compute activation(gate(x)) * up(x), x [N, in] -> [N, out / 2]. The first half of the layer's outputs
    is the gate's. The kernels know no exact GELU, so that one is computed behind the product.
    """
    if activation != "gelu":
        return project_gated(gate_up, x, num_rows, pools, activation=activation)
    gate, up = jnp.split(project(gate_up, x, num_rows, pools).astype(jnp.float32), 2, axis=1)
    return (jax.nn.gelu(gate, approximate=False) * up).astype(x.dtype)
