"""Mistral 3 and Pixtral: decoders with Pixtral's encoder of images."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray

from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.configs.tensor_names import TensorNames
from penstock.runtime.models.configs.vision import PixtralConfig
from penstock.runtime.models.families import llama, variants
from penstock.runtime.models.families.family import ModelFamily
from penstock.runtime.models.families.vision_fields import (
    decoder_of,
    flat_kernels,
    read_activation,
    read_image_token,
)
from penstock.runtime.models.families.vision_wrapper import text_fields
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.hf_harmless_fields import HARMLESS_FIELDS
from penstock.runtime.models.load_rules import ParamPath, Source, Stored, StoredAt

_NAMES = TensorNames(
    "language_model.model.",
    "language_model.lm_head.",
    vision="",
    vision_tensor="vision_tower.patch_conv.weight",
)
_UNUSED = ("ignore_index", "image_seq_length")
"""What training and other encoders read."""
_MISTRAL = llama.FAMILIES["MistralForCausalLM"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One architecture.

    model_type: of config.json. texts: the model_type of text_config to the family of the decoder. merges: the
    projector makes one token of a square of patches, else each patch is a token. bias: the default of
    multimodal_projector_bias. image_token_id: the default of image_token_index. defaults: of fields of
    text_config that the family requires, and published files leave out.
    """

    model_type: str
    texts: Mapping[str, ModelFamily]
    merges: bool
    bias: bool
    image_token_id: int
    defaults: Mapping[str, object] = field(default_factory=dict)


KINDS: Mapping[str, Kind] = {
    "Mistral3ForConditionalGeneration": Kind(
        model_type="mistral3",
        texts={"mistral": _MISTRAL, "ministral3": variants.FAMILIES["Ministral3ForCausalLM"]},
        merges=True,
        bias=False,
        image_token_id=10,
    ),
    "LlavaForConditionalGeneration": Kind(
        model_type="llava",
        texts={"mistral": _MISTRAL},
        merges=False,
        bias=True,
        image_token_id=32_000,
        defaults={"num_attention_heads": 32},
    ),
}


def _parse(architecture: str, fields: Fields, kind: Kind) -> ModelConfig:
    fields.only("model_type", kind.model_type)
    fields.ignore(_UNUSED)
    vision = _read_encoder(fields, kind)
    text = text_fields(fields, "", kind.defaults)
    family = decoder_of(text, kind.texts)
    text.ignore((*family.ignored, "is_composition"))
    config = family.parse(architecture, text)
    eps = config.rms_norm_eps if kind.merges else None
    vision = replace(vision, out_size=config.hidden_size, merger_eps=eps)
    return replace(config, vision=vision, names=_NAMES)


def _read_encoder(fields: Fields, kind: Kind) -> PixtralConfig:
    """Read the encoder and its projector, but for what they share with the decoder. Defaults are those of
    transformers' configuration classes.
    """
    inner = Fields(fields.mapping("vision_config"), "vision_config.", fields.problems)
    inner.only("model_type", "pixtral")
    hidden, heads = inner.integer("hidden_size", 1024), inner.integer("num_attention_heads", 16)
    if hidden % (4 * heads):
        inner.problem("num_attention_heads", f"{heads} heads of {hidden} channels have no whole quarters")
    inner.only("head_dim", hidden // heads)
    inner.ignore(("image_size", "is_composition", "dtype", "torch_dtype"))
    theta = inner.number("rope_theta", 10_000.0)
    rope = Fields(inner.mapping("rope_parameters"), "vision_config.rope_parameters.", fields.problems)
    rope.only("rope_type", "axial")
    theta = rope.number("rope_theta", theta)
    rope.refuse_unread()
    config = PixtralConfig(
        out_size=1,
        image_token_id=read_image_token(fields, kind.image_token_id),
        depth=inner.num_layers(24),
        hidden_size=hidden,
        intermediate_size=inner.integer("intermediate_size", 4096),
        num_heads=heads,
        patch_size=inner.integer("patch_size", 16),
        in_channels=inner.integer("num_channels", 3),
        merge_size=fields.integer("spatial_merge_size", 2) if kind.merges else 1,
        activation=read_activation(inner, "hidden_act", "gelu"),
        projector_activation=read_activation(fields, "projector_hidden_act", "gelu"),
        projector_bias=fields.boolean("multimodal_projector_bias", kind.bias),
        rope_theta=theta,
    )
    layer = fields.raw("vision_feature_layer")
    if layer != -1 and not (layer is None and kind.merges):
        fields.problem("vision_feature_layer", f"{layer!r} is not supported; supported: -1, the last layer")
    if not kind.merges and fields.raw("vision_feature_select_strategy") != "full":
        fields.problem("vision_feature_select_strategy", "must be 'full'")
    inner.refuse_unread(HARMLESS_FIELDS)
    return config


def _stored(config: ModelConfig, text: ModelFamily) -> StoredAt:
    text_stored, vision = text.stored(config), config.vision
    if vision is None:
        return text_stored
    assert isinstance(vision, PixtralConfig)

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        return _stored_encoder(vision, path, shape) if path[0] == "visual" else text_stored(path, shape)

    return stored


def _stored_encoder(config: PixtralConfig, path: ParamPath, shape: tuple[int, ...]) -> Stored:
    """Tell where checkpoints have a parameter of the encoder or the projector; its path begins with
    "visual".
    """
    first, *inner = path[1:]
    names = {"blocks": "vision_tower.transformer.layers", "projector": "multi_modal_projector"}
    name = ".".join(str(part) for part in ("visual", names.get(str(first), f"vision_tower.{first}"), *inner))
    name = name.replace(".merging_layer.", ".patch_merger.merging_layer.")
    if first == "patch_conv":
        kernel = (config.in_channels, config.patch_size, config.patch_size)
        return Stored((Source(name, (shape[0], *kernel)),), flat_kernels)
    if "merging_layer" in inner:
        return Stored((Source(name, shape),), functools.partial(_patch_by_patch, config.merge_size**2))
    return Stored((Source(name, shape),))


def _patch_by_patch(per_token: int, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return rows whose columns go channel by channel, each with all patches of a square, with columns that
    go patch by patch.
    """
    by_channel = rows[0].reshape(len(rows[0]), -1, per_token)
    return by_channel.transpose(0, 2, 1).reshape(len(rows[0]), -1)


def _family(kind: Kind) -> ModelFamily:
    text = next(iter(kind.texts.values()))  # those of one kind differ in nothing but what they parse
    return replace(
        text,
        parse=functools.partial(_parse, kind=kind),
        ignored=(),
        stored=functools.partial(_stored, text=text),
    )


FAMILIES: Mapping[str, ModelFamily] = {name: _family(kind) for name, kind in KINDS.items()}
