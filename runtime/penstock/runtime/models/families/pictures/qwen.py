"""Qwen2.5-VL and Qwen3-VL: decoders with M-RoPE, and vision transformers whose squares of patches become
tokens.

Videos are not served: `video_token_id` is known, so that a prompt with one can be refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray

from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.configs.tensor_names import USUAL, TensorNames
from penstock.runtime.models.configs.vision import VisionActivation, VisionConfig
from penstock.runtime.models.families.family import ModelFamily, stored_plainly
from penstock.runtime.models.families.llama import Traits, parse_decoder
from penstock.runtime.models.families.pictures.wrapper import text_fields
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.hf_harmless_fields import HARMLESS_FIELDS
from penstock.runtime.models.load_rules import ParamPath, Source, Stored, StoredAt
from penstock.runtime.models.rope import RopeConfig

_ACTIVATIONS: Mapping[str, VisionActivation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_UNUSED = ("vision_start_token_id", "vision_end_token_id", "vision_token_id")
"""Tokens around pictures, which are the template's affair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One architecture.

    model_type: of config.json; the decoder's ends in _text, the encoder's in _vision. parse_text:
    (architecture, fields of the decoder) -> ModelConfig. names: what checkpoints call parts of the encoder.
    beginnings: of the names of published tensors. The others are defaults of vision_config; windows: whether
    blocks attend in windows; deepstack: None if the family has none.
    """

    model_type: str
    parse_text: Callable[[str, Fields], ModelConfig]
    image_token_id: int
    video_token_id: int
    hidden_act: str
    hidden_size: int
    intermediate_size: int
    depth: int
    patch_size: int
    windows: bool = False
    deepstack: tuple[int, ...] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    beginnings: TensorNames = USUAL


KINDS: Mapping[str, Kind] = {
    "Qwen2_5_VLForConditionalGeneration": Kind(
        model_type="qwen2_5_vl",
        parse_text=functools.partial(
            parse_decoder,
            traits=Traits(
                "qwen2_5_vl_text",
                True,
                False,
                False,
                False,
                "layer_types",
                kv_heads=8,
                theta=1_000_000.0,
                eps=1e-5,
                mrope=RopeConfig(sections=(16, 24, 24)),
                window_layers=80,
            ),
        ),
        image_token_id=151655,
        video_token_id=151656,
        hidden_act="silu",
        hidden_size=3584,
        intermediate_size=3420,
        depth=32,
        patch_size=14,
        windows=True,
        names={"norm": "ln_q", "linear_fc1": "mlp.0", "linear_fc2": "mlp.2"},
    ),
    "Qwen3VLForConditionalGeneration": Kind(
        model_type="qwen3_vl",
        parse_text=functools.partial(
            parse_decoder,
            traits=Traits(
                "qwen3_vl_text",
                None,
                None,
                False,
                True,
                "none",
                head_dim=128,
                kv_heads=32,
                theta=500_000.0,
                mrope=RopeConfig(sections=(24, 20, 20), interleaved=True),
            ),
        ),
        image_token_id=151655,
        video_token_id=151656,
        beginnings=TensorNames("model.language_model.", vision="model.visual."),
        hidden_act="gelu_pytorch_tanh",
        hidden_size=1152,
        intermediate_size=4304,
        depth=27,
        patch_size=16,
        deepstack=(8, 16, 24),
    ),
}


def _parse(architecture: str, fields: Fields, kind: Kind) -> ModelConfig:
    fields.only("model_type", kind.model_type)
    fields.ignore(_UNUSED)
    inner = Fields(fields.mapping("vision_config"), "vision_config.", fields.problems)
    vision = _read_vision(inner, kind)
    vision = replace(
        vision,
        image_token_id=fields.integer("image_token_id", kind.image_token_id, minimum=0),
        video_token_id=fields.integer("video_token_id", kind.video_token_id, minimum=0),
    )
    text = text_fields(fields, f"{kind.model_type}_text")
    size = text.raw("hidden_size")
    if isinstance(size, int) and vision.out_size != size:
        inner.problem("out_hidden_size", f"must be the decoder's hidden_size {size}, not {vision.out_size}")
    return replace(kind.parse_text(architecture, text), vision=vision, names=kind.beginnings)


def _read_vision(fields: Fields, kind: Kind) -> VisionConfig:
    """The encoder, but for the ids of tokens. Defaults are those of transformers' configuration classes."""
    fields.only("model_type", f"{kind.model_type}_vision", kind.model_type)
    fields.ignore(("in_chans", "spatial_patch_size", "tokens_per_second", "dtype", "torch_dtype"))
    depth = fields.integer("depth", kind.depth)
    hidden, heads = fields.integer("hidden_size", kind.hidden_size), fields.integer("num_heads", 16)
    if hidden % (4 * heads):
        fields.problem("num_heads", f"{heads} heads of {hidden} channels have no whole quarters")
    rope = Fields(fields.mapping("rope_parameters"), "vision_config.rope_parameters.", fields.problems)
    rope.only("rope_type", "axial")
    theta = rope.number("rope_theta", 10_000.0)
    rope.refuse_unread()
    patch, merge = fields.integer("patch_size", kind.patch_size), fields.integer("spatial_merge_size", 2)
    config = VisionConfig(
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
        activation=_read_activation(fields, kind),
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


def _read_activation(fields: Fields, kind: Kind) -> VisionActivation:
    name = fields.raw("hidden_act") or kind.hidden_act
    known = [name for name in _ACTIVATIONS if not (kind.windows and name == "gelu")]
    if name not in known:
        fields.problem("hidden_act", f"{name!r} is not supported; supported: {', '.join(known)}")
        return "silu"
    return _ACTIVATIONS[str(name)]


def _read_side(fields: Fields) -> int:
    """The side of the square table of positions."""
    count = fields.integer("num_position_embeddings", 2304)
    side = math.isqrt(count)
    if side**2 != count:
        fields.problem("num_position_embeddings", f"must be a square, not {count}")
    return side


def _read_window(fields: Fields, patch: int, merge: int) -> int:
    """Patches of a side of a window, which are whole tokens."""
    size = fields.integer("window_size", 112)
    tokens = size // merge // patch
    if not tokens:
        fields.problem("window_size", f"must be at least {merge * patch}, the pixels of a token, not {size}")
    return max(tokens, 1) * merge


def _read_blocks(fields: Fields, name: str, default: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """Numbers of blocks, in rising order."""
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


def _stored(config: ModelConfig, kind: Kind) -> StoredAt:
    text = stored_plainly()(config)
    names = {**kind.names, "patch_embed": "patch_embed.proj"}

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        if path[0] != "visual":
            return text(path, shape)
        name = ".".join(names.get(str(part), str(part)) for part in path)
        vision = config.vision
        assert vision is not None
        if path[1:] == ("patch_embed", "weight"):
            side = vision.patch_size
            kernel = (vision.in_channels, vision.temporal_patch_size, side, side)
            return Stored((Source(name, (shape[0], *kernel)),), _flat)
        return Stored((Source(name, shape),))

    return stored


def _flat(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Kernels of a convolution over whole patches as rows of a matrix."""
    return rows[0].reshape(len(rows[0]), -1)


FAMILIES: Mapping[str, ModelFamily] = {
    name: ModelFamily(
        parse=functools.partial(_parse, kind=kind),
        stored=functools.partial(_stored, kind=kind),
    )
    for name, kind in KINDS.items()
}
