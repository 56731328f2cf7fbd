"""Qwen's encoder of images: a transformer over patches, and mergers that make tokens of squares of them.

Every image attends to itself only. Products go through `linear`, so that packed weights serve; they are
never int8, because the activations of vision transformers have outliers that int8 by rows does not carry.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.runtime.models import rope
from penstock.runtime.models.configs.vision import QwenVisionConfig
from penstock.runtime.models.linear import (
    PLAIN,
    Embedding,
    Linear,
    LinearFormat,
    add_projected,
    project,
)
from penstock.runtime.models.norms import LayerNorm, RMSNorm
from penstock.runtime.models.pools import PoolPlanners, Pools
from penstock.runtime.models.vision.activations import activated, activated_gate
from penstock.runtime.models.vision.attention import attend
from penstock.runtime.models.vision.qwen_inputs import QwenInputs

_EPS = 1e-6
_FULL_BLOCK = 512
_WINDOW_BLOCK = 128


def _norm(config: QwenVisionConfig, size: int, planners: PoolPlanners) -> RMSNorm | LayerNorm:
    return RMSNorm(size, _EPS, planners) if config.rms_norms else LayerNorm(size, _EPS, planners)


class VisionAttention(nnx.Module):
    """Attention of patches, rotated by row and column."""

    def __init__(
        self, config: QwenVisionConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        size = config.hidden_size
        self.qkv = Linear(size, {"qkv": 3 * size}, dtype, planners, bias=True, linear=linear)
        self.proj = Linear(size, {"proj": size}, dtype, planners, bias=True, linear=linear)
        self.num_heads = config.num_heads

    def __call__(
        self,
        x: jax.Array,
        residual: jax.Array,
        turns: tuple[jax.Array, jax.Array],
        spans: jax.Array,
        block: int,
        num_patches: jax.Array,
        pools: Pools,
    ) -> jax.Array:
        """Compute residual + attention(x), both [N, size]."""
        qkv = project(self.qkv, x, num_patches, pools)
        out = attend(qkv, spans, num_heads=self.num_heads, block=block, turns=turns)
        return add_projected(self.proj, out, residual, num_patches, pools)


class VisionMLP(nnx.Module):
    """fc2(activation(fc1(x))), or a gated MLP."""

    def __init__(
        self, config: QwenVisionConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        parts = {"gate_proj": inner, "up_proj": inner} if config.gated else {"linear_fc1": inner}
        last = "down_proj" if config.gated else "linear_fc2"
        self.first = Linear(size, parts, dtype, planners, bias=True, linear=linear)
        self.last = Linear(inner, {last: size}, dtype, planners, bias=True, linear=linear)
        self.gated, self.activation = config.gated, config.activation

    def __call__(self, x: jax.Array, residual: jax.Array, num_patches: jax.Array, pools: Pools) -> jax.Array:
        """Compute residual + mlp(x), both [N, size]."""
        if self.gated:
            inner = activated_gate(self.first, x, num_patches, pools, self.activation)
        else:
            inner = activated(project(self.first, x, num_patches, pools), self.activation)
        return add_projected(self.last, inner, residual, num_patches, pools)


class VisionBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, config: QwenVisionConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        self.norm1 = _norm(config, config.hidden_size, planners)
        self.norm2 = _norm(config, config.hidden_size, planners)
        self.attn = VisionAttention(config, dtype, linear, planners)
        self.mlp = VisionMLP(config, dtype, linear, planners)

    def __call__(
        self,
        x: jax.Array,
        turns: tuple[jax.Array, jax.Array],
        spans: jax.Array,
        block: int,
        num_patches: jax.Array,
        pools: Pools,
    ) -> jax.Array:
        """Compute x [N, size] -> [N, size]."""
        x = self.attn(self.norm1(x, pools), x, turns, spans, block, num_patches, pools)
        return self.mlp(self.norm2(x, pools), x, num_patches, pools)


class Merger(nnx.Module):
    """Makes a token's embedding of the patches of a square, by an MLP with exact GELU."""

    def __init__(
        self,
        config: QwenVisionConfig,
        dtype: jnp.dtype,
        linear: LinearFormat,
        planners: PoolPlanners,
        *,
        norm_of_square: bool = False,
    ) -> None:
        """norm_of_square: the norm is over all channels of a square, else over those of each patch."""
        self.per_token = config.merge_size**2
        inner = config.hidden_size * self.per_token
        self.norm = _norm(config, inner if norm_of_square else config.hidden_size, planners)
        self.norm_of_square = norm_of_square
        parts = {"linear_fc1": inner}, {"linear_fc2": config.out_size}
        self.linear_fc1 = Linear(inner, parts[0], dtype, planners, bias=True, linear=linear)
        self.linear_fc2 = Linear(inner, parts[1], dtype, planners, bias=True, linear=linear)

    def __call__(self, x: jax.Array, num_patches: jax.Array, pools: Pools) -> jax.Array:
        """Compute x [N, size] -> [N / merge_size^2, out_size]."""
        num_tokens, squares = num_patches // self.per_token, (x.shape[0] // self.per_token, -1)
        if self.norm_of_square:
            x = self.norm(x.reshape(squares), pools)
        else:
            x = self.norm(x, pools).reshape(squares)
        inner = activated(project(self.linear_fc1, x, num_tokens, pools), "gelu")
        return project(self.linear_fc2, inner, num_tokens, pools)


class QwenTower(nnx.Module):
    """Patches to embeddings of tokens."""

    def __init__(
        self, config: QwenVisionConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        floats = LinearFormat(packed=linear.packed)
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.patch_embed = Linear(
            config.patch_features,
            {"patch_embed": config.hidden_size},
            dtype,
            planners,
            bias=config.patch_bias,
            linear=floats,
        )
        side = config.position_side
        self.pos_embed = (
            None
            if side is None
            else Embedding(side**2, config.hidden_size, dtype, planners, PLAIN, name="pos_embed")
        )
        self.blocks = nnx.List([VisionBlock(config, dtype, floats, planners) for _ in range(config.depth)])
        self.merger = Merger(config, dtype, floats, planners)
        self.deepstack_merger_list = nnx.List(
            [Merger(config, dtype, floats, planners, norm_of_square=True) for _ in config.deepstack]
        )

    def __call__(self, inputs: QwenInputs, num_patches: jax.Array, pools: Pools) -> tuple[jax.Array, ...]:
        """Compute the embeddings of several images: what replaces those of their tokens, then for each
        block of `deepstack` what is added after layer 0, 1, and so on of the decoder; each [N / merge_size^2,
        out_size] in the model's dtype, in the order of the images and of the prompt's tokens.

        num_patches: how many patches are not padding, int32 []. What stands behind their tokens is undefined.
        """
        config = self.config
        x = project(self.patch_embed, jnp.asarray(inputs.patches, self.dtype), num_patches, pools)
        if self.pos_embed is not None:
            x = x + self._positions(inputs, pools).astype(x.dtype)
        turns = self._turns(jnp.asarray(inputs.places))
        further: dict[int, jax.Array] = {}
        for number, block in enumerate(self.blocks):
            windows = None if number in config.full_blocks else inputs.windows
            spans, size = (inputs.frames, _FULL_BLOCK) if windows is None else (windows, _WINDOW_BLOCK)
            x = block(x, turns, jnp.asarray(spans), size, num_patches, pools)
            if number in config.deepstack:
                merger = self.deepstack_merger_list[config.deepstack.index(number)]
                further[config.deepstack.index(number)] = merger(x, num_patches, pools)
        merged = [self.merger(x, num_patches, pools), *(further[i] for i in range(len(further)))]
        order = inputs.order
        return tuple(merged if order is None else (tokens[jnp.asarray(order)] for tokens in merged))

    def _positions(self, inputs: QwenInputs, pools: Pools) -> jax.Array:
        """Interpolate the learned table at each patch, float32 [N, size]."""
        assert self.pos_embed is not None
        assert inputs.corners is not None
        assert inputs.weights is not None
        corners, weights = jnp.asarray(inputs.corners), jnp.asarray(inputs.weights)
        total = jnp.zeros((corners.shape[0], self.config.hidden_size), jnp.float32)
        for corner in range(4):
            rows = self.pos_embed(corners[:, corner], pools).astype(jnp.float32)
            total = total + rows * weights[:, corner, None]
        return total

    def _turns(self, places: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Compute cosines and sines of the angles, float32 [N, head_dim / 2]: half of the pairs turn by row,
        half by column.
        """
        config = rope.RopeConfig(theta=self.config.rope_theta)
        by_axis = [rope.cos_sin(config, self.config.head_dim // 2, axis) for axis in places]
        cos, sin = (jnp.concatenate(parts, axis=1) for parts in zip(*by_axis, strict=True))
        return cos, sin
