"""Llama 4's encoder of images, and the projector behind it. It encodes tiles, squares of one size.

Every tile attends to itself only, and to a class token behind its patches that is not read. Queries and keys
turn by column and row. Products are never int8, as in `qwen_tower`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.runtime.models import rope
from penstock.runtime.models.configs.vision import Llama4VisionConfig
from penstock.runtime.models.linear import PLAIN, Embedding, Linear, LinearFormat, project
from penstock.runtime.models.norms import LayerNorm, Vector
from penstock.runtime.models.pools import PoolPlanners, Pools
from penstock.runtime.models.vision.activations import activated
from penstock.runtime.models.vision.grids import Floats, places_of
from penstock.runtime.models.vision.layer import VisionLayer

_EPS = 1e-5
"""Of all norms."""


class Llama4Tower(nnx.Module):
    """Tiles to embeddings of tokens."""

    def __init__(
        self, config: Llama4VisionConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        floats = LinearFormat(packed=linear.packed)
        self.config, self.dtype = config, jnp.dtype(dtype)
        size, inner = config.hidden_size, config.adapter_size
        self.patch_embed = Linear(
            config.patch_features, {"patch_embed": size}, dtype, planners, linear=floats
        )
        self.class_token = Vector("class_token", size, planners)
        self.pos_embed = Embedding(
            config.patches_per_tile + 1, size, dtype, planners, PLAIN, name="pos_embed"
        )
        self.pre_norm = LayerNorm(size, _EPS, planners)
        block = config.patches_per_tile + 1
        layer = partial(VisionLayer, config, dtype, floats, planners, eps=_EPS, block=block)
        self.layers = nnx.List([layer(activation="gelu") for _ in range(config.depth)])
        self.post_norm = LayerNorm(size, _EPS, planners)
        square = size * config.merge_size**2
        self.adapter_in = Linear(square, {"adapter_in": inner}, dtype, planners, linear=floats)
        self.adapter_out = Linear(inner, {"adapter_out": inner}, dtype, planners, linear=floats)
        self.projection = Linear(inner, {"projection": config.out_size}, dtype, planners, linear=floats)

    def __call__(self, inputs: jax.Array, num_patches: jax.Array, pools: Pools) -> tuple[jax.Array, ...]:
        """Embed several tiles, whose patches [N, values of a patch] are `inputs`: [N / merge_size^2,
        out_size] in the model's dtype. num_patches: how many patches are not padding, int32 [].
        """
        config = self.config
        size, per_tile, square = config.hidden_size, config.patches_per_tile, config.merge_size**2
        patches = project(self.patch_embed, jnp.asarray(inputs, self.dtype), num_patches, pools)
        tiles = patches.reshape(-1, per_tile, size)
        last = jnp.broadcast_to(self.class_token(pools)[None, None], (len(tiles), 1, size))
        rows, columns = places_of(config.side, config.side, config.merge_size)
        entries = np.append(rows * config.side + columns, per_tile).astype(np.int32)
        x = jnp.concatenate([tiles, last], axis=1) + self.pos_embed(jnp.asarray(entries), pools)[None]
        x = self.pre_norm(x.reshape(-1, size), pools)
        edges = np.arange(len(tiles) + 1, dtype=np.int32) * (per_tile + 1)
        spans = jnp.asarray(np.repeat(np.stack([edges[:-1], edges[1:]]), per_tile + 1, axis=1))
        num_rows = num_patches // per_tile * (per_tile + 1)
        angles = jnp.tile(jnp.asarray(_angles(config)), (len(tiles), 1))
        turns = jnp.cos(angles), jnp.sin(angles)
        for layer in self.layers:
            x = layer(x, spans, num_rows, pools, turns)
        x = self.post_norm(x, pools).reshape(-1, per_tile + 1, size)[:, :-1].reshape(-1, square * size)
        num_tokens = num_patches // square
        for product in (self.adapter_in, self.adapter_out):
            x = activated(project(product, x, num_tokens, pools), "gelu")
        return (project(self.projection, x, num_tokens, pools),)


def _angles(config: Llama4VisionConfig) -> Floats:
    """Compute the angles of the patches of a tile and of its class token, [patches + 1, head_dim / 2]: the
    first half of the pairs turns by column, the second half by row, both counted from 1. The class token does
    not turn.
    """
    turned = rope.RopeConfig(theta=config.rope_theta)
    frequencies = np.asarray(rope.inverse_frequencies(turned, config.head_dim // 2))
    rows, columns = places_of(config.side, config.side, config.merge_size).astype(np.float32) + 1
    by_place = [columns[:, None] * frequencies, rows[:, None] * frequencies]
    return np.pad(np.concatenate(by_place, axis=1), ((0, 1), (0, 0)))
