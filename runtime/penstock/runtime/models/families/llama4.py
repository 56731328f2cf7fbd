"""Llama 4's text model: attention in chunks with RoPE, and in some layers to everything without it; experts
beside one that all tokens share.

Checkpoints have channels that turn together side by side, and the experts of a layer stacked and transposed.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.runtime.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    QueryScaling,
    RouterConfig,
)
from penstock.runtime.models.families.family import PRE_NORMS, ModelFamily, pairs_apart, tensor_name
from penstock.runtime.models.families.mixture_fields import read_experts_and_choices, read_layer_numbers
from penstock.runtime.models.families.reading import (
    Sizes,
    read_layer_types,
    read_model,
    read_rope,
    read_sizes,
)
from penstock.runtime.models.families.stacked_experts import stored_stacked
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.load_rules import ParamPath, Source, Stored, StoredAt

_KINDS = ("full_attention", "chunked_attention")
_NAMES = {**PRE_NORMS, "mlp": "feed_forward"}


def _parse(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "llama4_text")
    fields.only("hidden_act", "silu")
    sizes = read_sizes(fields, head_dim=128, kv_heads=8)
    count, chosen = read_experts_and_choices(fields, ("num_local_experts", "num_experts"), 16, 1)
    inner = fields.integer("intermediate_size", 8192)
    experts = ExpertsConfig(
        num_experts=count,
        per_token=chosen,
        intermediate_size=inner,
        router=RouterConfig(score="sigmoid", normalize=False),
        weigh_input=True,
        shared_size=inner,
    )
    dense = MLPConfig(intermediate_size=fields.integer("intermediate_size_mlp", 16384))
    with_experts = _layers_with_experts(fields, sizes.num_layers)
    layers = [
        LayerConfig(attention=attention, mlp=experts if layer in with_experts else dense)
        for layer, attention in enumerate(_attention(fields, sizes))
    ]
    return read_model(architecture, fields, sizes, layers, eps=1e-5)


def _layers_with_experts(fields: Fields, num_layers: int) -> tuple[int, ...]:
    step = fields.integer("interleave_moe_layer_step", 1)
    listed = read_layer_numbers(fields, "moe_layers", num_layers)
    return tuple(range(step - 1, num_layers, step)) if listed is None else listed


def _attention(fields: Fields, sizes: Sizes) -> list[AttentionConfig]:
    """Read the attention of each layer."""
    rope = read_rope(fields, sizes.max_positions, theta=500_000.0)
    has_rope = _layers_with_rope(fields, sizes.num_layers)
    kinds = read_layer_types(fields, [_KINDS[has] for has in has_rope], _KINDS)
    chunk = fields.optional_integer("attention_chunk_size")
    if "attention_chunk_size" not in fields:
        chunk = 8192
    if chunk is None and "chunked_attention" in kinds:
        fields.problem("attention_chunk_size", "is null, but layers have chunked_attention")
    norm = fields.boolean("use_qk_norm", True)
    # The first configurations of Llama 4 have 4 here and mean true.
    tuned = fields.raw("attn_temperature_tuning") == 4 or fields.boolean("attn_temperature_tuning", True)
    strength, length = fields.number("attn_scale", 0.1), fields.number("floor_scale", 8192.0)
    scaling = QueryScaling(strength, length, shift=1) if tuned else None
    bias = fields.boolean("attention_bias", False)
    return [
        AttentionConfig(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            scale=sizes.head_dim**-0.5,
            rope=rope if has else None,
            chunk=chunk if kind == "chunked_attention" else None,
            qk_norm="l2_after" if has and norm else "none",
            query_scaling=None if has else scaling,
            qkv_bias=bias,
            o_bias=bias,
        )
        for has, kind in zip(has_rope, kinds, strict=True)
    ]


def _layers_with_rope(fields: Fields, num_layers: int) -> list[bool]:
    """Say for each layer whether it has RoPE. An empty list of the file stands for none."""
    interval = fields.integer("no_rope_layer_interval", 4)
    listed = fields.raw("no_rope_layers")
    if not listed:
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(listed, list) or len(listed) < num_layers or not {*map(str, listed)} <= {"0", "1"}:
        fields.problem("no_rope_layers", f"must have 1 or 0 for each of {num_layers} layers, not {listed!r}")
        return [True] * num_layers
    return [entry == 1 for entry in listed[:num_layers]]


def _stored(config: ModelConfig) -> StoredAt:
    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        order = None
        if path[-2] in ("q_proj", "k_proj"):
            attention = config.layers[int(path[1])].attention
            assert isinstance(attention, AttentionConfig)
            if attention.rope is not None:
                dim = attention.head_dim
                order = pairs_apart(shape[0] // dim, dim, dim)
        return Stored((Source(tensor_name(path, _NAMES), shape, order=order),))

    return stored_stacked(stored, config, transposed=True)


FAMILIES: Mapping[str, ModelFamily] = {"Llama4ForCausalLM": ModelFamily(parse=_parse, stored=_stored)}
