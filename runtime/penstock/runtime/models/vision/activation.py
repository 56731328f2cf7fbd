"""The activations of encoders of pictures."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from penstock.runtime.models.configs.vision import VisionActivation


def activated(x: jax.Array, activation: VisionActivation) -> jax.Array:
    """The activation of x, computed in float32."""
    wide = x.astype(jnp.float32)
    if activation == "silu":
        return jax.nn.silu(wide).astype(x.dtype)
    return jax.nn.gelu(wide, approximate=activation == "gelu_tanh").astype(x.dtype)
