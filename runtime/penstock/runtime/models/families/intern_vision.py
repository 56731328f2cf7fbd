"""InternVL in transformers' form: decoders with InternViT as the encoder of images.

Videos are not served, and a prompt has no place for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.configs.tensor_names import TensorNames
from penstock.runtime.models.configs.vision import InternConfig
from penstock.runtime.models.families import llama
from penstock.runtime.models.families.family import ModelFamily
from penstock.runtime.models.families.vision_fields import decoder_of, flat_kernels, read_activation
from penstock.runtime.models.families.vision_wrapper import text_fields
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.hf_harmless_fields import HARMLESS_FIELDS
from penstock.runtime.models.load_rules import ParamPath, Source, Stored, StoredAt

_TEXTS: Mapping[str, ModelFamily] = {
    "qwen2": llama.FAMILIES["Qwen2ForCausalLM"],
    "qwen3": llama.FAMILIES["Qwen3ForCausalLM"],
}
_TEXT = _TEXTS["qwen2"]
"""The two differ in nothing but what they parse."""
_NAMES = TensorNames(
    "language_model.model.",
    "language_model.lm_head.",
    vision="",
    vision_tensor="vision_tower.embeddings.cls_token",
)


def _parse(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "internvl")
    vision = _read_encoder(fields)
    text = text_fields(fields, "")
    family = decoder_of(text, _TEXTS)
    text.ignore(family.ignored)
    config = family.parse(architecture, text)
    return replace(config, vision=replace(vision, out_size=config.hidden_size), names=_NAMES)


def _read_encoder(fields: Fields) -> InternConfig:
    """Read the encoder and its projector, but for the decoder's size. Defaults are those of transformers'
    configuration classes.
    """
    inner = Fields(fields.mapping("vision_config"), "vision_config.", fields.problems)
    inner.only("model_type", "internvl_vision")
    inner.only("use_mask_token", False)
    inner.only("use_mean_pooling", True)
    inner.only("norm_type", "layer_norm", "rms_norm")
    inner.ignore(("dtype", "torch_dtype", "layer_scale_init_value", "projection_dropout"))
    fields.only("vision_feature_layer", -1)
    fields.only("vision_feature_select_strategy", "default")
    fields.only("downsample_ratio", 0.5)
    hidden, heads = inner.integer("hidden_size", 1024), inner.integer("num_attention_heads", 16)
    if hidden % heads:
        inner.problem("num_attention_heads", f"{heads} does not divide hidden_size {hidden}")
    config = InternConfig(
        out_size=1,
        image_token_id=fields.integer("image_token_id", 151_667, minimum=0),
        depth=inner.num_layers(24),
        hidden_size=hidden,
        intermediate_size=inner.integer("intermediate_size", 4096),
        num_heads=heads,
        image_size=_read_side(inner, "image_size", 448),
        patch_size=_read_side(inner, "patch_size", 14),
        in_channels=inner.integer("num_channels", 3),
        activation=read_activation(inner, "hidden_act", "gelu"),
        projector_activation=read_activation(fields, "projector_hidden_act", "gelu"),
        qkv_bias=inner.boolean("attention_bias", False),
        qk_norm=inner.boolean("use_qk_norm", False),
        rms_norms=inner.raw("norm_type") == "rms_norm",
        eps=inner.number("layer_norm_eps", 1e-6),
        has_positions=inner.boolean("use_absolute_position_embeddings", True),
    )
    square = config.patch_size * config.merge_size
    if config.image_size % square:
        inner.problem("image_size", f"{config.image_size} is no multiple of {square}, the pixels of a token")
    length = fields.optional_integer("image_seq_length")
    if length not in (None, config.tokens_per_tile):
        fields.problem("image_seq_length", f"must be {config.tokens_per_tile}, the tokens of a tile")
    inner.refuse_unread(HARMLESS_FIELDS)
    return config


def _read_side(fields: Fields, name: str, default: int) -> int:
    """Read the side of a square, which may be listed as height and width."""
    value = fields.raw(name)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 16:
        fields.problem(name, f"must be the side of a square in pixels, or that twice, not {value!r}")
        return default
    return value


def _stored(config: ModelConfig) -> StoredAt:
    text, vision = _TEXT.stored(config), config.vision
    if vision is None:
        return text
    assert isinstance(vision, InternConfig)

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        return _stored_encoder(vision, path, shape) if path[0] == "visual" else text(path, shape)

    return stored


def _stored_encoder(config: InternConfig, path: ParamPath, shape: tuple[int, ...]) -> Stored:
    """Tell where checkpoints have a parameter of the encoder or the projector; its path begins with
    "visual".
    """
    first, *inner = path[1:]
    match first:
        case "cls_token":
            return Stored((Source("visual.vision_tower.embeddings.cls_token", (1, 1, *shape), at=(0, 0)),))
        case "position_embeddings":
            name = "visual.vision_tower.embeddings.position_embeddings"
            return Stored((Source(name, (1, *shape), at=(0,)),))
        case "patch_embeddings":
            name = f"visual.vision_tower.embeddings.patch_embeddings.projection.{inner[-1]}"
            if inner[-1] == "bias":
                return Stored((Source(name, shape),))
            kernel = (config.in_channels, config.patch_size, config.patch_size)
            return Stored((Source(name, (shape[0], *kernel)),), flat_kernels)
        case "blocks":
            begin = "vision_tower.encoder.layer"
        case _:
            begin = "multi_modal_projector"
    return Stored((Source(".".join(str(part) for part in ("visual", begin, *inner)), shape),))


FAMILIES: Mapping[str, ModelFamily] = {
    "InternVLForConditionalGeneration": replace(_TEXT, parse=_parse, ignored=(), stored=_stored)
}
