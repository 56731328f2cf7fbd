"""Pixtral's encoder of images, and the projector of the models around it: a transformer over patches that
turn by row and column, and a product that makes one token of a square of patches.

Every image attends to itself only. Products are never int8, as in `qwen_tower`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.runtime.models import rope
from penstock.runtime.models.configs.vision import PixtralConfig
from penstock.runtime.models.linear import Linear, LinearFormat, add_projected, project
from penstock.runtime.models.norms import RMSNorm
from penstock.runtime.models.pools import PoolPlanners, Pools
from penstock.runtime.models.vision.activations import activated, activated_gate
from penstock.runtime.models.vision.attention import attend
from penstock.runtime.models.vision.pixtral_inputs import PixtralInputs

_EPS = 1e-5
"""Of the encoder's norms; the projector's has that of the decoder."""
_BLOCK = 512


class PixtralAttention(nnx.Module):
    """Attention of patches, rotated by row and column."""

    def __init__(
        self, config: PixtralConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        size = config.hidden_size
        parts = {"q_proj": size, "k_proj": size, "v_proj": size}
        self.qkv = Linear(size, parts, dtype, planners, linear=linear)
        self.o_proj = Linear(size, {"o_proj": size}, dtype, planners, linear=linear)
        self.num_heads = config.num_heads

    def __call__(
        self,
        x: jax.Array,
        residual: jax.Array,
        turns: tuple[jax.Array, jax.Array],
        spans: jax.Array,
        num_patches: jax.Array,
        pools: Pools,
    ) -> jax.Array:
        """Compute residual + attention(x), both [N, size]."""
        qkv = project(self.qkv, x, num_patches, pools)
        out = attend(qkv, spans, num_heads=self.num_heads, block=_BLOCK, turns=turns)
        return add_projected(self.o_proj, out, residual, num_patches, pools)


class PixtralMLP(nnx.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(
        self, config: PixtralConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up = Linear(size, parts, dtype, planners, linear=linear)
        self.down = Linear(inner, {"down_proj": size}, dtype, planners, linear=linear)
        self.activation = config.activation

    def __call__(self, x: jax.Array, residual: jax.Array, num_patches: jax.Array, pools: Pools) -> jax.Array:
        """Compute residual + mlp(x), both [N, size]."""
        inner = activated_gate(self.gate_up, x, num_patches, pools, self.activation)
        return add_projected(self.down, inner, residual, num_patches, pools)


class PixtralBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, config: PixtralConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, _EPS, planners)
        self.ffn_norm = RMSNorm(config.hidden_size, _EPS, planners)
        self.attention = PixtralAttention(config, dtype, linear, planners)
        self.feed_forward = PixtralMLP(config, dtype, linear, planners)

    def __call__(
        self,
        x: jax.Array,
        turns: tuple[jax.Array, jax.Array],
        spans: jax.Array,
        num_patches: jax.Array,
        pools: Pools,
    ) -> jax.Array:
        """Compute x [N, size] -> [N, size]."""
        x = self.attention(self.attention_norm(x, pools), x, turns, spans, num_patches, pools)
        return self.feed_forward(self.ffn_norm(x, pools), x, num_patches, pools)


class PixtralProjector(nnx.Module):
    """Makes a token's embedding of the patches of a square: out(activation(in(x))), with a norm and a product
    that merges the square before it where the model merges.
    """

    def __init__(
        self, config: PixtralConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        size, out, bias = config.hidden_size, config.out_size, config.projector_bias
        eps, square = config.merger_eps, size * config.merge_size**2
        self.norm = None if eps is None else RMSNorm(size, eps, planners)
        self.merging_layer = (
            None if eps is None else Linear(square, {"merging_layer": size}, dtype, planners, linear=linear)
        )
        self.linear_1 = Linear(size, {"linear_1": out}, dtype, planners, bias=bias, linear=linear)
        self.linear_2 = Linear(out, {"linear_2": out}, dtype, planners, bias=bias, linear=linear)
        self.per_token, self.activation = config.merge_size**2, config.projector_activation

    def __call__(self, x: jax.Array, num_patches: jax.Array, pools: Pools) -> jax.Array:
        """Compute x [N, size] -> [N / merge_size^2, out_size]."""
        num_tokens = num_patches // self.per_token
        if self.norm is not None and self.merging_layer is not None:
            squares = self.norm(x, pools).reshape(x.shape[0] // self.per_token, -1)
            x = project(self.merging_layer, squares, num_tokens, pools)
        inner = activated(project(self.linear_1, x, num_tokens, pools), self.activation)
        return project(self.linear_2, inner, num_tokens, pools)


class PixtralTower(nnx.Module):
    """Patches to embeddings of tokens."""

    def __init__(
        self, config: PixtralConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        floats = LinearFormat(packed=linear.packed)
        self.config, self.dtype = config, jnp.dtype(dtype)
        parts = {"patch_conv": config.hidden_size}
        self.patch_conv = Linear(config.patch_features, parts, dtype, planners, linear=floats)
        self.ln_pre = RMSNorm(config.hidden_size, _EPS, planners)
        self.blocks = nnx.List([PixtralBlock(config, dtype, floats, planners) for _ in range(config.depth)])
        self.projector = PixtralProjector(config, dtype, floats, planners)

    def __call__(self, inputs: PixtralInputs, num_patches: jax.Array, pools: Pools) -> tuple[jax.Array, ...]:
        """Embed several images: [N / merge_size^2, out_size] in the model's dtype, in the order of the
        images and of their tokens. num_patches: how many patches are not padding, int32 [].
        """
        x = project(self.patch_conv, jnp.asarray(inputs.patches, self.dtype), num_patches, pools)
        x = self.ln_pre(x, pools)
        turns, spans = self._turns(jnp.asarray(inputs.places)), jnp.asarray(inputs.spans)
        for block in self.blocks:
            x = block(x, turns, spans, num_patches, pools)
        return (self.projector(x, num_patches, pools),)

    def _turns(self, places: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Compute cosines and sines of the angles, float32 [N, head_dim / 2]: the first half of the pairs
        turns by row with every other frequency, the second half by column with the others.
        """
        config = rope.RopeConfig(theta=self.config.rope_theta)
        frequencies = np.asarray(rope.inverse_frequencies(config, self.config.head_dim))
        rows, columns = places.astype(jnp.float32)
        angles = [rows[:, None] * frequencies[None, 0::2], columns[:, None] * frequencies[None, 1::2]]
        angle = jnp.concatenate(angles, axis=1)
        return jnp.cos(angle), jnp.sin(angle)
