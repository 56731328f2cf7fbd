"""Pre-norm decoders that have one thing each that Llama has not: Granite, Ministral 3, Phi-3 and Phi-4,
Seed-OSS, SmolLM 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from penstock.runtime.models.config import (
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    QueryScaling,
)
from penstock.runtime.models.families.family import PRE_NORMS, ModelFamily, tensor_name
from penstock.runtime.models.families.reading import (
    Sizes,
    read_layer_types,
    read_model,
    read_rope,
    read_sizes,
)
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.load_rules import ParamPath, Source, Stored, StoredAt
from penstock.runtime.models.rope import RopeConfig


def _attention(sizes: Sizes, rope: RopeConfig, *, bias: bool, o_bias: bool) -> AttentionConfig:
    """Return the attention that Llama would have. `bias`: whether q, k and v have biases."""
    return AttentionConfig(
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        scale=sizes.head_dim**-0.5,
        rope=rope,
        qkv_bias=bias,
        o_bias=o_bias,
    )


def _mlp(fields: Fields, *, bias: bool) -> MLPConfig:
    fields.only("hidden_act", "silu")
    return MLPConfig(intermediate_size=fields.integer("intermediate_size"), bias=bias)


def _parse_granite(architecture: str, fields: Fields) -> ModelConfig:
    """Parse Granite, with four multipliers: of embeddings, scores, what layers add, and logits."""
    fields.only("model_type", "granite")
    sizes = read_sizes(fields, kv_heads=0)
    bias, mlp_bias = fields.boolean("attention_bias", False), fields.boolean("mlp_bias", False)
    rope = read_rope(fields, sizes.max_positions)
    attention = _attention(sizes, rope, bias=bias, o_bias=bias)
    layer = LayerConfig(
        attention=dataclasses.replace(attention, scale=fields.number("attention_multiplier", 1.0)),
        mlp=_mlp(fields, bias=mlp_bias),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
    )
    return read_model(
        architecture,
        fields,
        sizes,
        [layer] * sizes.num_layers,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logits_scale=1 / fields.number("logits_scaling", 1.0),
    )


def _parse_ministral3(architecture: str, fields: Fields) -> ModelConfig:
    """Parse Ministral 3, whose queries grow with their position, by a field among those of RoPE."""
    fields.only("model_type", "ministral3")
    sizes = read_sizes(fields, head_dim=128)
    others = ("llama_4_scaling_beta", "max_position_embeddings")
    rope = read_rope(fields, sizes.max_positions, theta=1e6, others=others)
    parameters = fields.raw("rope_parameters") or fields.raw("rope_scaling")
    if not parameters:
        fields.problem("rope_parameters", "is required")
    known = parameters if isinstance(parameters, dict) else {}
    strength = Fields(known, "rope_parameters.", fields.problems).optional_number("llama_4_scaling_beta")
    scaling = None
    if strength is not None:
        scaling = QueryScaling(strength, float(rope.original_max_positions))
        if rope.original_max_positions < 1:
            fields.problem("rope_parameters.original_max_position_embeddings", "is required")
    attention = dataclasses.replace(
        _attention(sizes, rope, bias=False, o_bias=False),
        query_scaling=scaling,
        window=fields.optional_integer("sliding_window"),
    )
    layer = LayerConfig(attention=attention, mlp=_mlp(fields, bias=False))
    return read_model(architecture, fields, sizes, [layer] * sizes.num_layers, eps=1e-5)


def _parse_phi3(architecture: str, fields: Fields) -> ModelConfig:
    """Parse Phi-3: LongRoPE, part of a head's channels rotated, and fused tensors."""
    fields.only("model_type", "phi3")
    fields.only("full_attn_mod", 1)
    fields.only("interpolate_factor", 1)
    sizes = read_sizes(fields, kv_heads=0)
    rope = read_rope(fields, sizes.max_positions, partial=1.0, original=4096)
    attention = dataclasses.replace(
        _attention(sizes, rope, bias=False, o_bias=False), window=fields.optional_integer("sliding_window")
    )
    layer = LayerConfig(attention=attention, mlp=_mlp(fields, bias=False))
    return read_model(architecture, fields, sizes, [layer] * sizes.num_layers, eps=1e-5)


def _stored_in_phi3(config: ModelConfig) -> StoredAt:
    """Say where parameters are stored: q, k and v are rows of one tensor, and so are gate and up."""

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        layer, part = path[:-2], path[-2]
        if part in ("q_proj", "k_proj", "v_proj"):
            attention = config.layers[0].attention
            assert isinstance(attention, AttentionConfig)
            q, k = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
            begin = {"q_proj": 0, "k_proj": q, "v_proj": q + k}[str(part)]
            name, rows = tensor_name((*layer, "qkv_proj", "weight"), PRE_NORMS), q + 2 * k
        elif part in ("gate_proj", "up_proj"):
            begin = 0 if part == "gate_proj" else shape[0]
            name, rows = tensor_name((*layer, "gate_up_proj", "weight"), PRE_NORMS), 2 * shape[0]
        else:
            return Stored((Source(tensor_name(path, PRE_NORMS), shape),))
        return Stored((Source(name, (rows, *shape[1:]), begin=begin),))

    return stored


def _parse_seed_oss(architecture: str, fields: Fields) -> ModelConfig:
    """Read the bias of attention's output from a field of its own."""
    fields.only("model_type", "seed_oss")
    sizes = read_sizes(fields, head_dim=128, kv_heads=8)
    attention = _attention(
        sizes,
        read_rope(fields, sizes.max_positions),
        bias=fields.boolean("attention_bias", True),
        o_bias=fields.boolean("attention_out_bias", False),
    )
    layer = LayerConfig(attention=attention, mlp=_mlp(fields, bias=fields.boolean("mlp_bias", False)))
    return read_model(architecture, fields, sizes, [layer] * sizes.num_layers)


def _parse_smollm3(architecture: str, fields: Fields) -> ModelConfig:
    """Parse SmolLM3: layers without RoPE, which have the sliding window if it is switched on."""
    fields.only("model_type", "smollm3")
    sizes = read_sizes(fields, kv_heads=4)
    bias, mlp_bias = fields.boolean("attention_bias", False), fields.boolean("mlp_bias", False)
    rope = read_rope(fields, sizes.max_positions, theta=2e6)
    attention, mlp = _attention(sizes, rope, bias=bias, o_bias=bias), _mlp(fields, bias=mlp_bias)
    rotated = _rotated_layers(fields, sizes.num_layers)
    window = fields.optional_integer("sliding_window")
    if not fields.boolean("use_sliding_window", False):
        window = None
    slides = [window is not None and not has_rope for has_rope in rotated]
    types = read_layer_types(
        fields,
        ["sliding_attention" if has_window else "full_attention" for has_window in slides],
        ("full_attention", "sliding_attention"),
    )
    if window is None and "sliding_attention" in types:
        fields.problem("layer_types", "names sliding_attention, but no sliding window is switched on")
    layers = [
        LayerConfig(
            attention=dataclasses.replace(
                attention,
                rope=rope if has_rope else None,
                window=window if kind == "sliding_attention" else None,
            ),
            mlp=mlp,
        )
        for has_rope, kind in zip(rotated, types, strict=True)
    ]
    return read_model(architecture, fields, sizes, layers, tied=True)


def _rotated_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Say for each layer whether it has RoPE: no_rope_layers has 1 where it has, despite its name."""
    interval = fields.integer("no_rope_layer_interval", 4)
    default = tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    listed = fields.raw("no_rope_layers")
    if listed is None:
        return default
    if not isinstance(listed, list) or len(listed) < num_layers or any(flag not in (0, 1) for flag in listed):
        fields.problem(
            "no_rope_layers", f"must list 0 or 1 for each of the {num_layers} layers, not {listed!r}"
        )
        return default
    return tuple(bool(flag) for flag in listed[:num_layers])


FAMILIES: Mapping[str, ModelFamily] = {
    "GraniteForCausalLM": ModelFamily(parse=_parse_granite),
    "Ministral3ForCausalLM": ModelFamily(parse=_parse_ministral3),
    "Phi3ForCausalLM": ModelFamily(parse=_parse_phi3, stored=_stored_in_phi3, ignored=("auto_map",)),
    "SeedOssForCausalLM": ModelFamily(parse=_parse_seed_oss, ignored=("pretraining_tp",)),
    "SmolLM3ForCausalLM": ModelFamily(parse=_parse_smollm3, ignored=("max_window_layers", "pretraining_tp")),
}
