"""The pre-norm decoders of the Llama family, which differ by a few switches."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from penstock.runtime.models.config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig
from penstock.runtime.models.families.classes import last_token_classifier
from penstock.runtime.models.families.family import ModelFamily
from penstock.runtime.models.families.reading import (
    read_layer_types,
    read_model,
    read_predictor,
    read_rope,
    read_sizes,
)
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class Traits:
    """How one architecture differs from the others, and what its config.json leaves out.

    qkv_bias, o_bias: fixed by the architecture, or None if `attention_bias` decides. windows: "none"; "all":
    every layer has sliding_window; "layer_types": that field and use_sliding_window decide. head_dim: the
    default; None: hidden_size / num_attention_heads. kv_heads: see `read_sizes`. ignored: see `ModelFamily`.
    theta, eps: the defaults of rope_theta and rms_norm_eps. mrope: see `read_rope`. window_layers: the
    default of max_window_layers. predicts: see `read_predictor`.
    """

    model_type: str
    qkv_bias: bool | None
    o_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool
    windows: Literal["none", "all", "layer_types"]
    head_dim: int | None = None
    kv_heads: int | None = None
    ignored: tuple[str, ...] = ()
    theta: float = 10_000.0
    eps: float = 1e-6
    mrope: RopeConfig | None = None
    window_layers: int = 28
    predicts: bool = False


TRAITS: Mapping[str, Traits] = {
    "LlamaForCausalLM": Traits("llama", None, None, None, False, "none", kv_heads=0),
    "MistralForCausalLM": Traits("mistral", False, False, False, False, "all"),
    "Qwen2ForCausalLM": Traits(
        "qwen2", True, False, False, False, "layer_types", ignored=("attention_bias",)
    ),
    "Qwen3ForCausalLM": Traits("qwen3", None, None, False, True, "layer_types", head_dim=128),
}


MIMO = Traits(
    "mimo",
    True,
    False,
    False,
    False,
    "layer_types",
    ignored=("attention_bias", "auto_map"),
    predicts=True,
)
"""A Qwen2 with layers that predict further tokens; transformers has no class for it."""


def _parse(architecture: str, fields: Fields, traits: Traits) -> ModelConfig:
    fields.only("model_type", traits.model_type)
    fields.only("hidden_act", "silu")
    fields.only("pretraining_tp", 1)
    fields.only("rope_interleaved", False)
    sizes = read_sizes(fields, head_dim=traits.head_dim, kv_heads=traits.kv_heads)
    rope = read_rope(fields, sizes.max_positions, theta=traits.theta, mrope=traits.mrope)
    bias = traits.qkv_bias is None and fields.boolean("attention_bias", False)
    mlp = MLPConfig(
        intermediate_size=fields.integer("intermediate_size"),
        bias=fields.boolean("mlp_bias", False) if traits.mlp_bias is None else traits.mlp_bias,
    )
    layers = [
        LayerConfig(
            attention=AttentionConfig(
                num_heads=sizes.num_heads,
                num_kv_heads=sizes.num_kv_heads,
                head_dim=sizes.head_dim,
                scale=sizes.head_dim**-0.5,
                rope=rope,
                window=window,
                qkv_bias=bias if traits.qkv_bias is None else traits.qkv_bias,
                o_bias=bias if traits.o_bias is None else traits.o_bias,
                qk_norm="head" if traits.qk_norm else "none",
            ),
            mlp=mlp,
        )
        for window in _windows(fields, traits, sizes.num_layers)
    ]
    classifies = architecture.endswith("ForSequenceClassification")
    classifier = last_token_classifier(fields) if classifies else None
    predictor = read_predictor(fields, layers[-1]) if traits.predicts else None
    return read_model(
        architecture,
        fields,
        sizes,
        layers,
        eps=traits.eps,
        classifier=classifier,
        predictor=predictor,
    )


def _windows(fields: Fields, traits: Traits, num_layers: int) -> tuple[int | None, ...]:
    """Read the sliding window of each layer."""
    window: int | None = None
    first = 0
    if traits.windows == "all":
        window = fields.optional_integer("sliding_window")
        if window is None and "sliding_window" not in fields:
            window = 4096
    elif traits.windows == "layer_types":
        use = fields.boolean("use_sliding_window", False)
        named = fields.optional_integer("sliding_window")
        if use:
            window = 4096 if named is None and "sliding_window" not in fields else named
        first = fields.integer("max_window_layers", traits.window_layers, minimum=0)
    default = tuple(window if layer >= first else None for layer in range(num_layers))
    kinds = tuple("full_attention" if w is None else "sliding_attention" for w in default)
    types = read_layer_types(fields, kinds, ("full_attention", "sliding_attention"))
    if window is None and "sliding_attention" in types:
        fields.problem("layer_types", "names sliding_attention, but no sliding window is switched on")
    listed = tuple(window if kind == "sliding_attention" else None for kind in types)
    if traits.windows == "all" and listed != default:
        fields.problem("layer_types", "differs from the one attention type this architecture has")
    return listed


def family(traits: Traits) -> ModelFamily:
    """Make the family of an architecture with these traits."""
    return ModelFamily(parse=functools.partial(_parse, traits=traits), ignored=traits.ignored)


_PREDICTOR = "model.mtp_layers.0"
FAMILIES: Mapping[str, ModelFamily] = {
    **{
        name: family(traits)
        for generates, traits in TRAITS.items()
        for name in (generates, generates.replace("ForCausalLM", "ForSequenceClassification"))
    },
    "MiMoForCausalLM": replace(
        family(MIMO),
        harmless=(r"^model\.mtp_layers\.",),
        predictor={
            "enorm": f"{_PREDICTOR}.token_layernorm",
            "hnorm": f"{_PREDICTOR}.hidden_layernorm",
            "eh_proj": f"{_PREDICTOR}.input_proj",
            "block": _PREDICTOR,
            "norm": f"{_PREDICTOR}.final_layernorm",
        },
        hidden_first=True,
    ),
}
