"""The encoders of images of Qwen's models: vision_config, and where checkpoints have their parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.runtime.models.configs.vision import QwenVisionConfig
from penstock.runtime.models.families.vision_fields import flat_kernels, read_activation
from penstock.runtime.models.hf_fields import MOST_LAYERS, Fields
from penstock.runtime.models.hf_harmless_fields import HARMLESS_FIELDS
from penstock.runtime.models.load_rules import ParamPath, Source, Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """One kind of encoder: the defaults of its fields, and what checkpoints call its parts (`names`).

    windows: blocks attend in windows, and have gated MLPs, norms by root mean square and no table of
    positions. deepstack: the default of deepstack_visual_indexes; None: it has no such field.
    """

    hidden_act: str = "gelu_pytorch_tanh"
    hidden_size: int = 1152
    intermediate_size: int = 4304
    depth: int = 27
    patch_size: int = 16
    windows: bool = False
    deepstack: tuple[int, ...] | None = None
    names: Mapping[str, str] = field(default_factory=dict)


def read_encoder(fields: Fields, model_type: str, kind: Encoder) -> QwenVisionConfig:
    """Read the encoder that vision_config describes, but for the ids of tokens. model_type: that of the
    wrapper, which early files have here too. Defaults are those of transformers' configuration classes.
    """
    fields.only("model_type", f"{model_type}_vision", model_type)
    fields.ignore(("in_chans", "spatial_patch_size", "tokens_per_second", "dtype", "torch_dtype"))
    depth = fields.integer("depth", kind.depth, most=MOST_LAYERS)
    hidden, heads = fields.integer("hidden_size", kind.hidden_size), fields.integer("num_heads", 16)
    if hidden % (4 * heads):
        fields.problem("num_heads", f"{heads} heads of {hidden} channels have no whole quarters")
    rope = Fields(fields.mapping("rope_parameters"), "vision_config.rope_parameters.", fields.problems)
    rope.only("rope_type", "axial")
    theta = rope.number("rope_theta", 10_000.0)
    rope.refuse_unread()
    patch, merge = fields.integer("patch_size", kind.patch_size), fields.integer("spatial_merge_size", 2)
    config = QwenVisionConfig(
        depth=depth,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", kind.intermediate_size),
        num_heads=heads,
        out_size=fields.integer("out_hidden_size", 3584),
        patch_size=patch,
        image_token_id=0,
        video_token_id=0,
        in_channels=fields.integer("in_channels", 3),
        temporal_patch_size=fields.integer("temporal_patch_size", 2),
        merge_size=merge,
        activation=read_activation(fields, "hidden_act", kind.hidden_act),
        gated=kind.windows,
        rms_norms=kind.windows,
        patch_bias=not kind.windows,
        position_side=None if kind.windows else _read_side(fields),
        deepstack=()
        if kind.deepstack is None
        else _read_blocks(fields, "deepstack_visual_indexes", kind.deepstack, depth),
        window=_read_window(fields, patch, merge) if kind.windows else None,
        full_blocks=_read_blocks(fields, "fullatt_block_indexes", (7, 15, 23, 31), depth)
        if kind.windows
        else (),
        rope_theta=theta,
    )
    fields.refuse_unread(HARMLESS_FIELDS)
    return config


def _read_side(fields: Fields) -> int:
    """Read the side of the square table of positions."""
    count = fields.integer("num_position_embeddings", 2304)
    side = math.isqrt(count)
    if side**2 != count:
        fields.problem("num_position_embeddings", f"must be a square, not {count}")
    return side


def _read_window(fields: Fields, patch: int, merge: int) -> int:
    """Read how many patches a side of a window has, which are whole tokens."""
    size = fields.integer("window_size", 112)
    tokens = size // merge // patch
    if not tokens:
        fields.problem("window_size", f"must be at least {merge * patch}, the pixels of a token, not {size}")
    return max(tokens, 1) * merge


def _read_blocks(fields: Fields, name: str, default: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """Read the numbers of blocks, in rising order."""
    listed = fields.raw(name)
    if listed is None:
        return default
    if not isinstance(listed, list) or not all(
        isinstance(block, int) and not isinstance(block, bool) and 0 <= block < depth for block in listed
    ):
        fields.problem(name, f"must list blocks from 0 to {depth - 1}, not {listed!r}")
        return ()
    if sorted(set(listed)) != listed:
        fields.problem(name, f"must be in rising order, not {listed!r}")
    return tuple(listed)


def stored_encoder(
    config: QwenVisionConfig, kind: Encoder, path: ParamPath, shape: tuple[int, ...]
) -> Stored:
    """Tell where checkpoints have a parameter of the encoder; its path begins with "visual"."""
    names = {**kind.names, "patch_embed": "patch_embed.proj"}
    name = ".".join(names.get(str(part), str(part)) for part in path)
    if path[1:] == ("patch_embed", "weight"):
        side = config.patch_size
        kernel = (config.in_channels, config.temporal_patch_size, side, side)
        return Stored((Source(name, (shape[0], *kernel)),), flat_kernels)
    return Stored((Source(name, shape),))
