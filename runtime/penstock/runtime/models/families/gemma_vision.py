"""Gemma 3 with images: its text model, SigLIP, and a projection between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.configs.tensor_names import TensorNames
from penstock.runtime.models.configs.vision import SiglipVisionConfig
from penstock.runtime.models.families import gemma
from penstock.runtime.models.families.family import ModelFamily
from penstock.runtime.models.families.vision_fields import flat_kernels, read_activation
from penstock.runtime.models.families.vision_wrapper import text_fields
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.hf_harmless_fields import HARMLESS_FIELDS
from penstock.runtime.models.load_rules import ParamPath, Source, Stored, StoredAt

_TEXT = gemma.FAMILIES["Gemma3ForCausalLM"]
_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
"""Fields of text_config that the text model requires, and that published files leave out."""
_NAMES = TensorNames(
    "language_model.model.",
    "language_model.lm_head.",
    vision="vision_tower.vision_model.",
    projector="multi_modal_projector.",
    vision_tensor="embeddings.patch_embedding.weight",
)
_PARTS: Mapping[str, str] = {
    "patch_embed": "embeddings.patch_embedding",
    "pos_embed": "embeddings.position_embedding",
    "layers": "encoder.layers",
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attn": "self_attn",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
    "post_norm": "post_layernorm",
}
"""What checkpoints call the parts of the encoder."""


def _parse(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "gemma3")
    inner = Fields(fields.mapping("vision_config"), "vision_config.", fields.problems)
    vision = _read_encoder(fields, inner)
    text = text_fields(fields, "gemma3_text", _DEFAULTS)
    text.ignore(_TEXT.ignored)
    config = _TEXT.parse(architecture, text)
    return replace(config, vision=replace(vision, out_size=config.hidden_size), names=_NAMES)


def _read_encoder(fields: Fields, inner: Fields) -> SiglipVisionConfig:
    """Read the encoder, but for the size of what it gives. Defaults are those of transformers' classes."""
    inner.only("model_type", "siglip_vision_model")
    inner.ignore(("dtype", "torch_dtype"))
    inner.ignore(("vision_use_head",))  # the head makes one vector of an image, which is used nowhere
    hidden, heads = inner.integer("hidden_size", 768), inner.integer("num_attention_heads", 12)
    if hidden % heads:
        inner.problem("num_attention_heads", f"{heads} heads do not divide {hidden} channels")
    size, patch = inner.integer("image_size", 224), inner.integer("patch_size", 16)
    count = fields.integer("mm_tokens_per_image", 256)
    side, tokens = size // patch, math.isqrt(count)
    if size % patch:
        inner.problem("patch_size", f"{patch} does not divide image_size, {size}")
    elif tokens**2 != count or side % tokens:
        fields.problem("mm_tokens_per_image", f"{count} is no square whose side divides {side} patches")
        tokens = 1
    config = SiglipVisionConfig(
        depth=inner.num_layers(12),
        hidden_size=hidden,
        intermediate_size=inner.integer("intermediate_size", 3072),
        num_heads=heads,
        out_size=0,
        image_size=size,
        patch_size=patch,
        tokens_per_side=tokens,
        image_token_id=fields.integer("image_token_index", 262_144, minimum=0),
        begin_token_id=fields.integer("boi_token_index", 255_999, minimum=0),
        end_token_id=fields.integer("eoi_token_index", 256_000, minimum=0),
        in_channels=inner.integer("num_channels", 3),
        activation=read_activation(inner, "hidden_act", "gelu_pytorch_tanh"),
        eps=inner.number("layer_norm_eps", 1e-6),
    )
    inner.refuse_unread(HARMLESS_FIELDS)
    return config


def _stored(config: ModelConfig) -> StoredAt:
    text, vision = _TEXT.stored(config), config.vision

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        if path[0] != "visual":
            return text(path, shape)
        assert isinstance(vision, SiglipVisionConfig)
        match path[1:]:
            case ("soft_norm", "weight"):
                return Stored((Source("projector.mm_soft_emb_norm.weight", shape),))
            case ("projection", "weight"):
                there = Source("projector.mm_input_projection_weight", (shape[1], shape[0]), axis=1)
                return Stored((there,))
        name = ".".join(_PARTS.get(str(part), str(part)) for part in path)
        if path[1:] == ("patch_embed", "weight"):
            kernel = (vision.in_channels, vision.patch_size, vision.patch_size)
            return Stored((Source(name, (shape[0], *kernel)),), flat_kernels)
        return Stored((Source(name, shape),))

    return stored


FAMILIES: Mapping[str, ModelFamily] = {
    "Gemma3ForConditionalGeneration": replace(
        _TEXT,
        parse=_parse,
        ignored=(),
        stored=_stored,
        harmless=(*_TEXT.harmless, r"(^|\.)vision_tower\.(vision_model\.)?head\."),
    )
}
