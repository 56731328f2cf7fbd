"""SigLIP, the encoder of Gemma 3's images: a transformer over the patches of an image of one size, whose
outputs are averaged over squares of patches, and projected to the decoder's channels.

Products go through `linear` and are never int8, as in Qwen's encoder.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.runtime.models.configs.vision import SiglipVisionConfig
from penstock.runtime.models.linear import PLAIN, Embedding, Linear, LinearFormat, project
from penstock.runtime.models.norms import LayerNorm, RMSNorm
from penstock.runtime.models.pools import PoolPlanners, Pools
from penstock.runtime.models.vision.layer import VisionLayer
from penstock.runtime.models.vision.siglip_inputs import SiglipInputs, places

_BLOCK = 512


class SiglipTower(nnx.Module):
    """The patches of one image to embeddings of tokens."""

    def __init__(
        self, config: SiglipVisionConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        floats = LinearFormat(packed=linear.packed)
        size = config.hidden_size
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.patch_embed = Linear(
            config.patch_features, {"patch_embed": size}, dtype, planners, bias=True, linear=floats
        )
        self.pos_embed = Embedding(config.num_patches, size, dtype, planners, PLAIN, name="pos_embed")
        layer = partial(VisionLayer, config, dtype, floats, planners, eps=config.eps, block=_BLOCK)
        self.layers = nnx.List([layer(activation=config.activation) for _ in range(config.depth)])
        self.post_norm = LayerNorm(size, config.eps, planners)
        self.soft_norm = RMSNorm(size, config.eps, planners, offset=1.0)
        self.projection = Linear(size, {"projection": config.out_size}, dtype, planners, linear=floats)

    def __call__(self, inputs: SiglipInputs, num_patches: jax.Array, pools: Pools) -> tuple[jax.Array, ...]:
        """See `Tower`."""
        config = self.config
        count = config.num_patches
        x = project(self.patch_embed, jnp.asarray(inputs.patches, self.dtype), num_patches, pools)
        x = x + self.pos_embed(jnp.asarray(places(config)), pools)
        spans = jnp.asarray(np.repeat(np.array([[0], [count]], np.int32), count, axis=1))
        for layer in self.layers:
            x = layer(x, spans, num_patches, pools)
        squares = self.post_norm(x, pools).reshape(config.num_tokens, config.per_token, config.hidden_size)
        pooled = jnp.mean(squares.astype(jnp.float32), axis=1).astype(x.dtype)
        num_tokens = num_patches // config.per_token
        return (project(self.projection, self.soft_norm(pooled, pools), num_tokens, pools),)
