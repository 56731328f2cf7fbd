"""A layer of a transformer over patches that has layer norms, and biases in all products: SigLIP's and, with
queries and keys that are rotated, Llama 4's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.runtime.models.configs.vision import VisionActivation, VisionConfig
from penstock.runtime.models.linear import Linear, LinearFormat, add_projected, project
from penstock.runtime.models.norms import LayerNorm
from penstock.runtime.models.pools import PoolPlanners, Pools
from penstock.runtime.models.vision.activations import activated
from penstock.runtime.models.vision.attention import attend


class VisionAttention(nnx.Module):
    """Attention of each patch to those of its span."""

    def __init__(
        self,
        config: VisionConfig,
        dtype: jnp.dtype,
        linear: LinearFormat,
        planners: PoolPlanners,
        *,
        block: int,
    ) -> None:
        size = config.hidden_size
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), size)
        self.qkv = Linear(size, parts, dtype, planners, bias=True, linear=linear)
        self.out = Linear(size, {"out_proj": size}, dtype, planners, bias=True, linear=linear)
        self.num_heads, self.block = config.num_heads, block

    def __call__(
        self,
        x: jax.Array,
        residual: jax.Array,
        spans: jax.Array,
        num_patches: jax.Array,
        pools: Pools,
        turns: tuple[jax.Array, jax.Array] | None,
    ) -> jax.Array:
        """Compute residual + attention(x), both [N, size]."""
        qkv = project(self.qkv, x, num_patches, pools)
        out = attend(qkv, spans, num_heads=self.num_heads, block=self.block, turns=turns)
        return add_projected(self.out, out, residual, num_patches, pools)


class VisionLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        config: VisionConfig,
        dtype: jnp.dtype,
        linear: LinearFormat,
        planners: PoolPlanners,
        *,
        eps: float,
        activation: VisionActivation,
        block: int,
    ) -> None:
        """Build a layer with the norms' `eps` and the MLP's activation. block: see `attend_spans`."""
        size, inner = config.hidden_size, config.intermediate_size
        self.norm1 = LayerNorm(size, eps, planners)
        self.norm2 = LayerNorm(size, eps, planners)
        self.attn = VisionAttention(config, dtype, linear, planners, block=block)
        self.first = Linear(size, {"fc1": inner}, dtype, planners, bias=True, linear=linear)
        self.last = Linear(inner, {"fc2": size}, dtype, planners, bias=True, linear=linear)
        self.activation: VisionActivation = activation

    def __call__(
        self,
        x: jax.Array,
        spans: jax.Array,
        num_patches: jax.Array,
        pools: Pools,
        turns: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        """Compute x [N, size] -> [N, size]. turns: cosines and sines of the angles by which queries and keys
        are rotated, float32 [N, head_dim / 2]; None: they are not.
        """
        x = self.attn(self.norm1(x, pools), x, spans, num_patches, pools, turns)
        inner = project(self.first, self.norm2(x, pools), num_patches, pools)
        return add_projected(self.last, activated(inner, self.activation), x, num_patches, pools)
