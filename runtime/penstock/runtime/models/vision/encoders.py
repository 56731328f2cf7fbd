"""What belongs to each kind of encoder of images: its module, and what the engine must know of it."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from penstock.runtime.images.vision import Vision
from penstock.runtime.models.configs.vision import (
    Gemma4VisionConfig,
    InternConfig,
    Llama4VisionConfig,
    PixtralConfig,
    QwenVisionConfig,
    SiglipVisionConfig,
    TileConfig,
    VisionConfig,
)
from penstock.runtime.models.linear import LinearFormat
from penstock.runtime.models.pools import PoolPlanners, Pools
from penstock.runtime.models.vision import (
    gemma4_inputs,
    pixtral_inputs,
    qwen_inputs,
    siglip_inputs,
    tile_inputs,
)
from penstock.runtime.models.vision.gemma4_tower import Gemma4Tower
from penstock.runtime.models.vision.grids import grid_problem
from penstock.runtime.models.vision.intern_tower import InternTower
from penstock.runtime.models.vision.llama4_tower import Llama4Tower
from penstock.runtime.models.vision.pixtral_tower import PixtralTower
from penstock.runtime.models.vision.qwen_tower import QwenTower
from penstock.runtime.models.vision.siglip_tower import SiglipTower


class Tower(Protocol):
    """An encoder as a module of the model."""

    def __call__(self, inputs: Any, num_patches: jax.Array, pools: Pools) -> tuple[jax.Array, ...]:
        """Turn what `Vision.inputs` made, of which the first num_patches, int32 [], are not padding, into the
        embeddings [most tokens, out_size] in the model's dtype: what replaces those of the tokens, then what
        is added after layer 0, 1, and so on of the decoder. What stands behind the image's is undefined.
        """
        ...


def tower_of(config: VisionConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners) -> Tower:
    """Make the module of an encoder."""
    match config:
        case QwenVisionConfig():
            return QwenTower(config, dtype, linear, planners)
        case SiglipVisionConfig():
            return SiglipTower(config, dtype, linear, planners)
        case Gemma4VisionConfig():
            return Gemma4Tower(config, dtype, linear, planners)
        case PixtralConfig():
            return PixtralTower(config, dtype, linear, planners)
        case InternConfig():
            return InternTower(config, dtype, linear, planners)
        case Llama4VisionConfig():
            return Llama4Tower(config, dtype, linear, planners)
        case _:
            raise TypeError(f"no encoder has a {type(config).__name__}")


def vision_of(config: VisionConfig) -> Vision:
    """Return what the engine must know of a model with this encoder."""
    match config:
        case QwenVisionConfig():
            return Vision(
                image_token_id=config.image_token_id,
                refused_tokens=((config.video_token_id, "a video"),),
                patches_per_token=config.merge_size**2,
                patch_values=config.patch_features,
                inputs=partial(qwen_inputs.vision_inputs, config),
                rotary_positions=partial(qwen_inputs.rotary_positions, config),
                grid_problem=partial(grid_problem, config.merge_size),
            )
        case PixtralConfig():
            return Vision(
                image_token_id=config.image_token_id,
                patches_per_token=config.merge_size**2,
                patch_values=config.patch_features,
                inputs=partial(pixtral_inputs.vision_inputs, config),
                grid_problem=partial(grid_problem, config.merge_size),
            )
        case TileConfig():
            return Vision(
                image_token_id=config.image_token_id,
                patches_per_token=config.merge_size**2,
                patch_values=config.patch_features,
                num_patches=config.patches_per_tile,
                inputs=partial(tile_inputs.vision_inputs, config),
                grid_problem=partial(tile_inputs.grid_problem, config),
            )
        case SiglipVisionConfig():
            return Vision(
                image_token_id=config.image_token_id,
                patches_per_token=config.per_token,
                patch_values=config.patch_features,
                inputs=partial(siglip_inputs.vision_inputs, config),
                num_patches=config.num_patches,
                around=(config.begin_token_id, config.end_token_id),
                both_ways=True,
                grid_problem=partial(siglip_inputs.grid_problem, config),
            )
        case Gemma4VisionConfig():
            return Vision(
                image_token_id=config.image_token_id,
                refused_tokens=((config.video_token_id, "a video"), (config.audio_token_id, "a sound")),
                patches_per_token=config.merge_size**2,
                patch_values=config.patch_features,
                most_tokens=config.most_tokens,
                inputs=partial(gemma4_inputs.vision_inputs, config),
                both_ways=config.both_ways != "none",
                grid_problem=partial(gemma4_inputs.grid_problem, config),
            )
        case _:
            raise TypeError(f"no encoder has a {type(config).__name__}")
