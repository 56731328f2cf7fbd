"""InternViT, the encoder of images of InternVL, and its projector. It encodes tiles, squares of one size.

Every tile attends to itself only, and to a class token that is not read. Products are never int8, as in
`qwen_tower`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.runtime.models.configs.vision import InternConfig
from penstock.runtime.models.linear import PLAIN, Embedding, Linear, LinearFormat, project
from penstock.runtime.models.norms import LayerNorm, RMSNorm, Vector
from penstock.runtime.models.pools import PoolPlanners, Pools
from penstock.runtime.models.vision.activations import activated
from penstock.runtime.models.vision.attention import attend_spans
from penstock.runtime.models.vision.grids import places_of

_QK_EPS = 1e-6
"""Of the norms of queries and keys."""
_PROJECTOR_EPS = 1e-5


class InternAttention(nnx.Module):
    """Attention within a tile."""

    def __init__(
        self, config: InternConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        size = config.hidden_size
        parts = {"q_proj": size, "k_proj": size, "v_proj": size}
        self.qkv = Linear(size, parts, dtype, planners, bias=config.qkv_bias, linear=linear)
        self.projection_layer = Linear(
            size, {"projection_layer": size}, dtype, planners, bias=True, linear=linear
        )
        self.q_norm = RMSNorm(size, _QK_EPS, planners) if config.qk_norm else None
        self.k_norm = RMSNorm(size, _QK_EPS, planners) if config.qk_norm else None
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.block = config.patches_per_tile + 1

    def __call__(self, x: jax.Array, spans: jax.Array, num_rows: jax.Array, pools: Pools) -> jax.Array:
        """Compute x [rows, size] -> [rows, size]."""
        q, k, v = jnp.split(project(self.qkv, x, num_rows, pools), 3, axis=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, pools), self.k_norm(k, pools)
        q, k, v = (each.reshape(x.shape[0], self.num_heads, self.head_dim) for each in (q, k, v))
        out = attend_spans(q, k, v, spans, scale=self.head_dim**-0.5, block=self.block)
        return project(self.projection_layer, out.reshape(x.shape), num_rows, pools)


class InternMLP(nnx.Module):
    """fc2(activation(fc1(x)))."""

    def __init__(
        self, config: InternConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        self.fc1 = Linear(size, {"fc1": inner}, dtype, planners, bias=True, linear=linear)
        self.fc2 = Linear(inner, {"fc2": size}, dtype, planners, bias=True, linear=linear)
        self.activation = config.activation

    def __call__(self, x: jax.Array, num_rows: jax.Array, pools: Pools) -> jax.Array:
        """Compute x [rows, size] -> [rows, size]."""
        inner = activated(project(self.fc1, x, num_rows, pools), self.activation)
        return project(self.fc2, inner, num_rows, pools)


class InternBlock(nnx.Module):
    """x + scale_1 * attention(norm(x)), then x + scale_2 * mlp(norm(x))."""

    def __init__(
        self, config: InternConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        size, kind = config.hidden_size, RMSNorm if config.rms_norms else LayerNorm
        self.layernorm_before = kind(size, config.eps, planners)
        self.layernorm_after = kind(size, config.eps, planners)
        self.attention = InternAttention(config, dtype, linear, planners)
        self.mlp = InternMLP(config, dtype, linear, planners)
        self.lambda_1 = Vector("lambda_1", size, planners)
        self.lambda_2 = Vector("lambda_2", size, planners)

    def __call__(self, x: jax.Array, spans: jax.Array, num_rows: jax.Array, pools: Pools) -> jax.Array:
        """Compute x [rows, size] -> [rows, size]."""
        seen = self.attention(self.layernorm_before(x, pools), spans, num_rows, pools)
        x = x + self.lambda_1(pools)[None] * seen
        return x + self.lambda_2(pools)[None] * self.mlp(self.layernorm_after(x, pools), num_rows, pools)


class InternProjector(nnx.Module):
    """Makes a token's embedding of the patches of a square: out(activation(in(norm(square))))."""

    def __init__(
        self, config: InternConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        square, out = config.hidden_size * config.merge_size**2, config.out_size
        self.layer_norm = LayerNorm(square, _PROJECTOR_EPS, planners)
        self.linear_1 = Linear(square, {"linear_1": out}, dtype, planners, bias=True, linear=linear)
        self.linear_2 = Linear(out, {"linear_2": out}, dtype, planners, bias=True, linear=linear)
        self.activation = config.projector_activation

    def __call__(self, squares: jax.Array, num_tokens: jax.Array, pools: Pools) -> jax.Array:
        """Compute squares [tokens, merge_size^2 * size] -> [tokens, out_size]."""
        inner = project(self.linear_1, self.layer_norm(squares, pools), num_tokens, pools)
        return project(self.linear_2, activated(inner, self.activation), num_tokens, pools)


class InternTower(nnx.Module):
    """Tiles to embeddings of tokens."""

    def __init__(
        self, config: InternConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        floats = LinearFormat(packed=linear.packed)
        self.config, self.dtype = config, jnp.dtype(dtype)
        size = config.hidden_size
        self.patch_embeddings = Linear(
            config.patch_features, {"patch_embeddings": size}, dtype, planners, bias=True, linear=floats
        )
        self.cls_token = Vector("cls_token", size, planners)
        self.position_embeddings = (
            Embedding(config.patches_per_tile + 1, size, dtype, planners, PLAIN, name="position_embeddings")
            if config.has_positions
            else None
        )
        self.blocks = nnx.List([InternBlock(config, dtype, floats, planners) for _ in range(config.depth)])
        self.projector = InternProjector(config, dtype, floats, planners)

    def __call__(self, inputs: jax.Array, num_patches: jax.Array, pools: Pools) -> tuple[jax.Array, ...]:
        """Embed several tiles, whose patches [N, values of a patch] are `inputs`: [N / merge_size^2,
        out_size] in the model's dtype. num_patches: how many patches are not padding, int32 [].
        """
        config = self.config
        size, per_tile = config.hidden_size, config.patches_per_tile
        patches = project(self.patch_embeddings, jnp.asarray(inputs, self.dtype), num_patches, pools)
        tiles = patches.reshape(-1, per_tile, size)
        first = jnp.broadcast_to(self.cls_token(pools)[None, None], (len(tiles), 1, size))
        x = jnp.concatenate([first, tiles], axis=1)
        if self.position_embeddings is not None:
            rows, columns = places_of(config.side, config.side, config.merge_size)
            entries = np.concatenate([[0], 1 + rows * config.side + columns]).astype(np.int32)
            x = x + self.position_embeddings(jnp.asarray(entries), pools)[None]
        edges = np.arange(len(tiles) + 1, dtype=np.int32) * (per_tile + 1)
        spans = jnp.asarray(np.repeat(np.stack([edges[:-1], edges[1:]]), per_tile + 1, axis=1))
        num_rows = num_patches // per_tile * (per_tile + 1)
        x = x.reshape(-1, size)
        for block in self.blocks:
            x = block(x, spans, num_rows, pools)
        squares = x.reshape(-1, per_tile + 1, size)[:, 1:].reshape(-1, config.merge_size**2 * size)
        return (self.projector(squares, num_patches // config.merge_size**2, pools),)
