"""Llama 4 with images: its text model, the encoder of images, and the projector between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.configs.tensor_names import TensorNames
from penstock.runtime.models.configs.vision import Llama4VisionConfig
from penstock.runtime.models.families import llama4
from penstock.runtime.models.families.family import ModelFamily, pairs_apart
from penstock.runtime.models.families.vision_fields import decoder_of, read_image_token
from penstock.runtime.models.families.vision_wrapper import text_fields
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.hf_harmless_fields import HARMLESS_FIELDS
from penstock.runtime.models.load_rules import ParamPath, Source, Stored, StoredAt

_TEXT = llama4.FAMILIES["Llama4ForCausalLM"]
_NAMES = TensorNames(
    "language_model.model.",
    "language_model.lm_head.",
    vision="",
    vision_tensor="vision_model.patch_embedding.linear.weight",
)
_UNUSED = ("boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index")
"""Tokens around an image, which the processor finds by their texts."""
_PARTS: Mapping[str, str] = {
    "patch_embed": "vision_model.patch_embedding.linear",
    "pre_norm": "vision_model.layernorm_pre",
    "layers": "vision_model.model.layers",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "attn": "self_attn",
    "out_proj": "o_proj",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
    "post_norm": "vision_model.layernorm_post",
    "adapter_in": "vision_model.vision_adapter.mlp.fc1",
    "adapter_out": "vision_model.vision_adapter.mlp.fc2",
    "projection": "multi_modal_projector.linear_1",
}
"""What checkpoints call the parts of the encoder."""
_WHOLE: Mapping[str, str] = {
    "class_token": "visual.vision_model.class_embedding",
    "pos_embed": "visual.vision_model.positional_embedding_vlm",
}
"""Parameters whose tensors have no further part of their names."""


def _parse(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "llama4")
    fields.ignore(_UNUSED)
    vision = _read_encoder(fields)
    text = text_fields(fields, "llama4_text")
    text.ignore(decoder_of(text, {"llama4_text": _TEXT}).ignored)
    config = _TEXT.parse(architecture, text)
    return replace(config, vision=replace(vision, out_size=config.hidden_size), names=_NAMES)


def _read_encoder(fields: Fields) -> Llama4VisionConfig:
    """Read the encoder and its projector, but for the decoder's size. Defaults are those of transformers'
    configuration classes.
    """
    inner = Fields(fields.mapping("vision_config"), "vision_config.", fields.problems)
    inner.only("model_type", "llama4_vision_model")
    inner.only("hidden_act", "gelu")
    inner.only("norm_eps", 1e-5)
    inner.only("num_channels", 3)
    inner.only("pixel_shuffle_ratio", 0.5)
    inner.only("vision_feature_layer", -1)
    inner.only("vision_feature_select_strategy", "default")
    inner.only("multi_modal_projector_bias", False)
    inner.ignore(("dtype", "torch_dtype", "projector_dropout"))
    hidden, heads = inner.integer("hidden_size", 768), inner.integer("num_attention_heads", 16)
    if hidden % (4 * heads):
        inner.problem("num_attention_heads", f"{heads} heads of {hidden} channels have no whole quarters")
    adapter = inner.integer("projector_output_dim", 4096)
    for name, default in {"projector_input_dim": 4096, "vision_output_dim": 7680}.items():
        if inner.integer(name, default) != adapter:
            inner.problem(name, f"must be {adapter}, projector_output_dim")
    config = Llama4VisionConfig(
        out_size=1,
        image_token_id=read_image_token(fields, 200_092),
        depth=inner.num_layers(34),
        hidden_size=hidden,
        intermediate_size=inner.integer("intermediate_size", 5632),
        num_heads=heads,
        image_size=inner.integer("image_size", 448),
        patch_size=inner.integer("patch_size", 14),
        adapter_size=adapter,
        rope_theta=_read_theta(inner),
    )
    if config.intermediate_size != hidden * config.merge_size**2:
        inner.problem("intermediate_size", f"must be {hidden * config.merge_size**2}, 4 times hidden_size")
    square = config.patch_size * config.merge_size
    if config.image_size % square:
        inner.problem("image_size", f"{config.image_size} is no multiple of {square}, the pixels of a token")
    inner.refuse_unread(HARMLESS_FIELDS)
    return config


def _read_theta(inner: Fields) -> float:
    """Read the base of the encoder's rotation, of either generation of transformers."""
    theta = inner.number("rope_theta", 10_000.0)
    rope = Fields(inner.mapping("rope_parameters"), "vision_config.rope_parameters.", inner.problems)
    rope.only("rope_type", "default")
    theta = rope.number("rope_theta", theta)
    rope.refuse_unread()
    return theta


def _stored(config: ModelConfig) -> StoredAt:
    text, vision = _TEXT.stored(config), config.vision
    if vision is None:
        return text
    assert isinstance(vision, Llama4VisionConfig)

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        return _stored_encoder(vision, path, shape) if path[0] == "visual" else text(path, shape)

    return stored


def _stored_encoder(config: Llama4VisionConfig, path: ParamPath, shape: tuple[int, ...]) -> Stored:
    """Tell where checkpoints have a parameter of the encoder or the projector; its path begins with
    "visual". The two channels of a rotated pair lie side by side there.
    """
    if (whole := _WHOLE.get(str(path[1]))) is not None:
        return Stored((Source(whole, shape),))
    turned = config.head_dim if path[-2] in ("q_proj", "k_proj") else 0
    order = pairs_apart(config.num_heads, turned, turned) if turned else None
    name = ".".join(_PARTS.get(str(part), str(part)) for part in path)
    return Stored((Source(name, shape, order=order),))


FAMILIES: Mapping[str, ModelFamily] = {
    "Llama4ForConditionalGeneration": replace(_TEXT, parse=_parse, ignored=(), stored=_stored)
}
