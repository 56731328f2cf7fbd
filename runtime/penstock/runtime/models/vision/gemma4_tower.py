"""The encoder of Gemma 4's images: a transformer over patches, whose queries and keys turn by column and by
row; the outputs of a square of patches are averaged to one token.

Every image attends to itself only. Products are never int8, as in `qwen_tower`, and each may have bounds
for what it is given and for what it gives, which the checkpoint has.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.runtime.models import rope
from penstock.runtime.models.configs.vision import Gemma4VisionConfig
from penstock.runtime.models.linear import PLAIN, Embedding, Linear, LinearFormat, project
from penstock.runtime.models.norms import RMSNorm, Vector, unit_mean_square
from penstock.runtime.models.pools import PoolPlanners, Pools
from penstock.runtime.models.vision.activations import activated
from penstock.runtime.models.vision.attention import attend_spans
from penstock.runtime.models.vision.gemma4_inputs import Gemma4Inputs

_BLOCK = 512


class ClippedLinear(nnx.Module):
    """clip(clip(x) W^T), where the model has bounds."""

    def __init__(
        self,
        config: Gemma4VisionConfig,
        in_size: int,
        out_size: int,
        dtype: jnp.dtype,
        linear: LinearFormat,
        planners: PoolPlanners,
    ) -> None:
        def bound(name: str) -> Vector | None:
            return Vector(name, 1, planners) if config.has_bounds else None

        self.linear = Linear(in_size, {"linear": out_size}, dtype, planners, linear=linear)
        self.input_min, self.input_max = bound("input_min"), bound("input_max")
        self.output_min, self.output_max = bound("output_min"), bound("output_max")

    def __call__(self, x: jax.Array, num_patches: jax.Array, pools: Pools) -> jax.Array:
        """Compute x [N, in] -> [N, out]."""
        x = _clipped(x, self.input_min, self.input_max, pools)
        y = project(self.linear, x, num_patches, pools)
        return _clipped(y, self.output_min, self.output_max, pools)


def _clipped(x: jax.Array, least: Vector | None, most: Vector | None, pools: Pools) -> jax.Array:
    return x if least is None or most is None else jnp.clip(x, least(pools)[None], most(pools)[None])


class Gemma4VisionAttention(nnx.Module):
    """Attention within an image, of heads whose queries, keys and values are normalised."""

    def __init__(
        self, config: Gemma4VisionConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        size = config.hidden_size
        self.q_proj = ClippedLinear(config, size, size, dtype, linear, planners)
        self.k_proj = ClippedLinear(config, size, size, dtype, linear, planners)
        self.v_proj = ClippedLinear(config, size, size, dtype, linear, planners)
        self.o_proj = ClippedLinear(config, size, size, dtype, linear, planners)
        self.q_norm = RMSNorm(config.head_dim, config.eps, planners)
        self.k_norm = RMSNorm(config.head_dim, config.eps, planners)
        self.num_heads, self.eps = config.num_heads, config.eps

    def __call__(
        self,
        x: jax.Array,
        turns: tuple[jax.Array, jax.Array],
        spans: jax.Array,
        num_patches: jax.Array,
        pools: Pools,
    ) -> jax.Array:
        """Compute x [N, size] -> [N, size]. turns: cosines and sines of the angles, float32
        [2, N, head_dim / 4]: by column and by row.
        """
        q, k, v = (
            part(x, num_patches, pools).reshape(x.shape[0], self.num_heads, -1)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _turned(self.q_norm(q, pools), *turns), _turned(self.k_norm(k, pools), *turns)
        out = attend_spans(q, k, unit_mean_square(v, self.eps), spans, scale=1.0, block=_BLOCK)
        return self.o_proj(out.reshape(x.shape), num_patches, pools)


def _turned(x: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """Turn x [N, heads, D], the first half of its channels by column, and the second half by row."""
    by_column, by_row = jnp.split(x, 2, axis=2)
    turned = [rope.rotate(by_column, cosines[0], sines[0]), rope.rotate(by_row, cosines[1], sines[1])]
    return jnp.concatenate(turned, axis=2)


class Gemma4VisionMLP(nnx.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(
        self, config: Gemma4VisionConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = ClippedLinear(config, size, inner, dtype, linear, planners)
        self.up_proj = ClippedLinear(config, size, inner, dtype, linear, planners)
        self.down_proj = ClippedLinear(config, inner, size, dtype, linear, planners)

    def __call__(self, x: jax.Array, num_patches: jax.Array, pools: Pools) -> jax.Array:
        """Compute x [N, size] -> [N, size]."""
        gate = activated(self.gate_proj(x, num_patches, pools), "gelu_tanh")
        return self.down_proj(gate * self.up_proj(x, num_patches, pools), num_patches, pools)


class Gemma4VisionLayer(nnx.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(
        self, config: Gemma4VisionConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        size, eps = config.hidden_size, config.eps
        self.input_layernorm = RMSNorm(size, eps, planners)
        self.post_attention_layernorm = RMSNorm(size, eps, planners)
        self.pre_feedforward_layernorm = RMSNorm(size, eps, planners)
        self.post_feedforward_layernorm = RMSNorm(size, eps, planners)
        self.self_attn = Gemma4VisionAttention(config, dtype, linear, planners)
        self.mlp = Gemma4VisionMLP(config, dtype, linear, planners)

    def __call__(
        self,
        x: jax.Array,
        turns: tuple[jax.Array, jax.Array],
        spans: jax.Array,
        num_patches: jax.Array,
        pools: Pools,
    ) -> jax.Array:
        """Compute x [N, size] -> [N, size]."""
        seen = self.self_attn(self.input_layernorm(x, pools), turns, spans, num_patches, pools)
        x = x + self.post_attention_layernorm(seen, pools)
        inner = self.mlp(self.pre_feedforward_layernorm(x, pools), num_patches, pools)
        return x + self.post_feedforward_layernorm(inner, pools)


class Gemma4Tower(nnx.Module):
    """Patches to embeddings of tokens."""

    def __init__(
        self, config: Gemma4VisionConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        floats = LinearFormat(packed=linear.packed)
        size, positions = config.hidden_size, config.num_positions
        self.config, self.dtype = config, jnp.dtype(dtype)
        parts = {"input_proj": size}
        self.input_proj = Linear(config.patch_features, parts, dtype, planners, linear=floats)
        self.of_columns = Embedding(positions, size, dtype, planners, PLAIN, name="of_columns")
        self.of_rows = Embedding(positions, size, dtype, planners, PLAIN, name="of_rows")
        self.layers = nnx.List(
            [Gemma4VisionLayer(config, dtype, floats, planners) for _ in range(config.depth)]
        )
        self.std_bias = Vector("std_bias", size, planners) if config.standardizes else None
        self.std_scale = Vector("std_scale", size, planners) if config.standardizes else None
        parts = {"embedding_projection": config.out_size}
        self.embedding_projection = Linear(size, parts, dtype, planners, linear=floats)

    def __call__(self, inputs: Gemma4Inputs, num_patches: jax.Array, pools: Pools) -> tuple[jax.Array, ...]:
        """Embed several images: [N / merge_size^2, out_size] in the model's dtype, in the order of the
        images and of their tokens. num_patches: how many patches are not padding, int32 [].
        """
        config = self.config
        rows, columns = jnp.asarray(inputs.places)
        patches = (2 * (jnp.asarray(inputs.patches) - np.float32(0.5))).astype(self.dtype)
        x = project(self.input_proj, patches, num_patches, pools)
        x = x + self.of_columns(columns, pools) + self.of_rows(rows, pools)
        frequencies = rope.inverse_frequencies(rope.RopeConfig(theta=config.rope_theta), config.head_dim // 2)
        angles = jnp.stack([columns, rows]).astype(jnp.float32)[..., None] * frequencies[None, None]
        turns, spans = (jnp.cos(angles), jnp.sin(angles)), jnp.asarray(inputs.spans)
        for layer in self.layers:
            x = layer(x, turns, spans, num_patches, pools)
        squares = x.reshape(-1, config.merge_size**2, config.hidden_size).astype(jnp.float32)
        pooled = jnp.mean(squares, axis=1).astype(self.dtype).astype(jnp.float32)
        pooled = pooled * np.float32(config.hidden_size**0.5)
        if self.std_bias is not None and self.std_scale is not None:
            bias, scale = (each(pools).astype(jnp.float32)[None] for each in (self.std_bias, self.std_scale))
            pooled = (pooled - bias) * scale
        num_tokens = num_patches // config.merge_size**2
        normed = unit_mean_square(pooled.astype(self.dtype), config.eps)
        return (project(self.embedding_projection, normed, num_tokens, pools),)
