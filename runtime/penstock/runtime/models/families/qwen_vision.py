"""Qwen2.5-VL, Qwen3-VL and Qwen3.5: decoders with M-RoPE, and encoders of images.

Videos are not served: `video_token_id` is known, so that a prompt with one can be refused.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.configs.tensor_names import USUAL, TensorNames
from penstock.runtime.models.configs.vision import QwenVisionConfig
from penstock.runtime.models.families import llama, qwen_hybrid, softmax_mixtures
from penstock.runtime.models.families.family import ModelFamily
from penstock.runtime.models.families.qwen_encoder import Encoder, read_encoder, stored_encoder
from penstock.runtime.models.families.vision_wrapper import text_fields
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.load_rules import ParamPath, Stored, StoredAt
from penstock.runtime.models.rope import RopeConfig

_UNUSED = ("vision_start_token_id", "vision_end_token_id", "vision_token_id")
"""Tokens around images, which are the template's affair."""
_NAMES = TensorNames("model.language_model.", vision="model.visual.")
_STACKED = replace(_NAMES, stacked=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One architecture.

    model_type: of config.json; the decoder's ends in _text, the encoder's in _vision. text: the decoder's
    family. image_token_id: the default; that of video_token_id is one more. names: of published tensors.
    """

    model_type: str
    text: ModelFamily
    encoder: Encoder
    image_token_id: int = 151655
    names: TensorNames = _NAMES


_QWEN3 = Encoder(deepstack=(8, 16, 24))
_MROPE = RopeConfig(sections=(24, 20, 20), interleaved=True)

KINDS: Mapping[str, Kind] = {
    "Qwen2_5_VLForConditionalGeneration": Kind(
        model_type="qwen2_5_vl",
        text=llama.family(
            llama.Traits(
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
            )
        ),
        encoder=Encoder(
            hidden_act="silu",
            hidden_size=3584,
            intermediate_size=3420,
            depth=32,
            patch_size=14,
            windows=True,
            names={"norm": "ln_q", "linear_fc1": "mlp.0", "linear_fc2": "mlp.2"},
        ),
        names=USUAL,
    ),
    "Qwen3VLForConditionalGeneration": Kind(
        model_type="qwen3_vl",
        text=llama.family(
            llama.Traits(
                "qwen3_vl_text",
                None,
                None,
                False,
                True,
                "none",
                head_dim=128,
                kv_heads=32,
                theta=500_000.0,
                mrope=_MROPE,
            )
        ),
        encoder=_QWEN3,
    ),
    "Qwen3VLMoeForConditionalGeneration": Kind(
        model_type="qwen3_vl_moe",
        text=softmax_mixtures.family(
            softmax_mixtures.Traits(
                "qwen3_vl_moe_text",
                16,
                functools.partial(
                    softmax_mixtures.qwen_experts, count=60, chosen=4, inner=1408, shared=None, normalize=True
                ),
                softmax_mixtures.no_windows,
                softmax_mixtures.QWEN_NAMES,
                bias=("attention_bias", False),
                o_bias=True,
                qk_norm=True,
                theta=500_000.0,
                dense_layers=True,
                mrope=_MROPE,
            ),
            transposed=True,
        ),
        encoder=_QWEN3,
        names=_STACKED,
    ),
    "Qwen3_5ForConditionalGeneration": Kind(
        model_type="qwen3_5",
        text=qwen_hybrid.FAMILIES["Qwen3_5ForCausalLM"],
        encoder=Encoder(),
        image_token_id=248056,
    ),
    "Qwen3_5MoeForConditionalGeneration": Kind(
        model_type="qwen3_5_moe",
        text=qwen_hybrid.FAMILIES["Qwen3_5MoeForCausalLM"],
        encoder=Encoder(),
        image_token_id=248056,
        names=_STACKED,
    ),
}


def _parse(architecture: str, fields: Fields, kind: Kind) -> ModelConfig:
    fields.only("model_type", kind.model_type)
    fields.ignore(_UNUSED)
    inner = Fields(fields.mapping("vision_config"), "vision_config.", fields.problems)
    vision = replace(
        read_encoder(inner, kind.model_type, kind.encoder),
        image_token_id=fields.integer("image_token_id", kind.image_token_id, minimum=0),
        video_token_id=fields.integer("video_token_id", kind.image_token_id + 1, minimum=0),
    )
    text = text_fields(fields, f"{kind.model_type}_text")
    size = text.raw("hidden_size")
    if isinstance(size, int) and vision.out_size != size:
        inner.problem("out_hidden_size", f"must be the decoder's hidden_size {size}, not {vision.out_size}")
    text.ignore(kind.text.ignored)
    return replace(kind.text.parse(architecture, text), vision=vision, names=kind.names)


def _stored(config: ModelConfig, kind: Kind) -> StoredAt:
    text, vision = kind.text.stored(config), config.vision

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        if path[0] == "visual":
            assert isinstance(vision, QwenVisionConfig)
            return stored_encoder(vision, kind.encoder, path, shape)
        return text(path, shape)

    return stored


FAMILIES: Mapping[str, ModelFamily] = {
    name: replace(
        kind.text,
        parse=functools.partial(_parse, kind=kind),
        ignored=(),
        stored=functools.partial(_stored, kind=kind),
    )
    for name, kind in KINDS.items()
}
