"""Granite 4: Mamba-2 in the place of most attention, maybe with experts beside an MLP for all tokens. Granite
3 with experts stores these in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from penstock.runtime.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
)
from penstock.runtime.models.configs.recurrent import MambaConfig
from penstock.runtime.models.families.family import PRE_NORMS, ModelFamily, tensor_name
from penstock.runtime.models.families.mamba import read_mamba, source_of_mamba
from penstock.runtime.models.families.mixture_fields import read_experts_and_choices
from penstock.runtime.models.families.reading import read_model, read_rope, read_sizes
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.load_rules import ParamPath, Source, Stored, StoredAt

_KINDS: Mapping[str, bool] = {
    "mamba": True,
    "linear_attention": True,
    "attention": False,
    "full_attention": False,
}
"""What files call the kinds of layers, to whether these are Mamba-2's."""
_NAMES: Mapping[str, str] = {**PRE_NORMS, "gated_norm": "norm.weight"}
_IGNORED = ("init_method", "mamba_chunk_size")
"""How weights were drawn, and how many tokens of a prompt transformers computes at once."""


def _parse(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "granitemoehybrid")
    fields.only("hidden_act", "silu")
    fields.only("normalization_function", "rmsnorm")
    sizes = read_sizes(fields, kv_heads=0)
    bias = fields.boolean("attention_bias", False)
    rope = read_rope(fields, sizes.max_positions)
    fields.only("position_embedding_type", "rope", "nope")
    attention = AttentionConfig(
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        scale=fields.number("attention_multiplier", 1.0),
        rope=rope if fields.raw("position_embedding_type") == "rope" else None,
        qkv_bias=bias,
        o_bias=bias,
    )
    inner = fields.integer("mamba_expand", 2) * sizes.hidden_size
    mamba, mlp = read_mamba(fields, inner, "mamba_expand * hidden_size"), _mlp(fields)
    multiplier = fields.number("residual_multiplier", 1.0)
    layers = [
        LayerConfig(attention=mamba if is_mamba else attention, mlp=mlp, residual_multiplier=multiplier)
        for is_mamba in _layer_kinds(fields, sizes.num_layers)
    ]
    return read_model(
        architecture,
        fields,
        sizes,
        layers,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logits_scale=1 / fields.number("logits_scaling", 1.0),
    )


def _layer_kinds(fields: Fields, num_layers: int) -> list[bool]:
    """Say for each layer whether it is one of Mamba-2. The field has two names."""
    found = {
        name: value
        for name in ("layer_types", "layers_block_type")
        if (value := fields.raw(name)) is not None
    }
    kinds: list[bool] = [True] * num_layers
    for name, value in found.items():
        if not isinstance(value, list) or len(value) != num_layers or set(map(str, value)) - set(_KINDS):
            fields.problem(
                name, f"must list one of {', '.join(_KINDS)} for each of {num_layers} layers, not {value!r}"
            )
            continue
        listed = [_KINDS[kind] for kind in value]
        if name != next(iter(found)) and listed != kinds:
            fields.problem(name, "contradicts layer_types")
        kinds = listed
    return kinds


def _mlp(fields: Fields) -> MLPConfig | ExpertsConfig:
    """Read what all tokens share, and the experts besides, if there are any."""
    shared = fields.integer("shared_intermediate_size", 1024)
    count = fields.integer("num_local_experts", 8, minimum=0)
    chosen = fields.integer("num_experts_per_tok", 2, minimum=0)
    inner = fields.optional_integer("intermediate_size")
    if not count:
        return MLPConfig(intermediate_size=shared)
    if not 0 < chosen <= count:
        fields.problem("num_experts_per_tok", f"must be 1 to {count}, the number of experts, not {chosen}")
    return ExpertsConfig(
        num_experts=count,
        per_token=chosen,
        intermediate_size=inner or fields.integer("intermediate_size"),
        shared_size=shared,
    )


def _stored(config: ModelConfig) -> StoredAt:
    """Say where parameters are stored: products with the same input are rows of one tensor, and the experts'
    are stacked.
    """

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        if path[2:3] == ("mlp",):
            return Stored((_source_of_mlp(config, path, shape),))
        if path[2:3] == ("self_attn",):
            mamba = config.layers[int(path[1])].attention
            if isinstance(mamba, MambaConfig):
                above = (*path[:2], "mamba")
                return Stored((source_of_mamba(mamba, above, path[3:], shape, _NAMES),))
        return Stored((Source(tensor_name(path, _NAMES), shape),))

    return stored


def _source_of_mlp(config: ModelConfig, path: ParamPath, shape: tuple[int, ...]) -> Source:
    layer, part = path[:2], path[-2]
    if part == "router":
        return Source(tensor_name((*layer, "block_sparse_moe", "router", "layer", "weight"), _NAMES), shape)
    tensor = "output_linear" if part == "down_proj" else "input_linear"
    rows = shape[0] if part == "down_proj" else 2 * shape[0]
    begin = shape[0] if part == "up_proj" else 0
    if path[3] != "experts":
        name = tensor_name((*layer, "shared_mlp", tensor, "weight"), _NAMES)
        return Source(name, (rows, shape[1]), begin=begin)
    experts = config.layers[int(path[1])].mlp
    assert isinstance(experts, ExpertsConfig)
    name = tensor_name((*layer, "block_sparse_moe", tensor, "weight"), _NAMES)
    return Source(name, (experts.num_experts, rows, shape[1]), at=(int(path[4]),), begin=begin)


def _parse_attending(architecture: str, fields: Fields, *, model_type: str, shared: bool) -> ModelConfig:
    """Parse Granite 3 with experts, all of whose layers attend. shared: whether there is one for all
    tokens.
    """
    fields.only("model_type", model_type)
    fields.only("hidden_act", "silu")
    sizes = read_sizes(fields, kv_heads=0)
    bias = fields.boolean("attention_bias", False)
    count, chosen = read_experts_and_choices(fields, ("num_local_experts", "num_experts"), 8, 2)
    size = fields.integer("shared_intermediate_size", 0, minimum=0) if shared else 0
    layer = LayerConfig(
        attention=AttentionConfig(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            scale=fields.number("attention_multiplier", 1.0),
            rope=read_rope(fields, sizes.max_positions),
            qkv_bias=bias,
            o_bias=bias,
        ),
        mlp=ExpertsConfig(
            num_experts=count,
            per_token=chosen,
            intermediate_size=fields.integer("intermediate_size"),
            shared_size=size or None,
        ),
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


FAMILIES: Mapping[str, ModelFamily] = {
    "GraniteMoeForCausalLM": ModelFamily(
        parse=functools.partial(_parse_attending, model_type="granitemoe", shared=False), stored=_stored
    ),
    "GraniteMoeSharedForCausalLM": ModelFamily(
        parse=functools.partial(_parse_attending, model_type="granitemoeshared", shared=True), stored=_stored
    ),
    "GraniteMoeHybridForCausalLM": ModelFamily(parse=_parse, stored=_stored, ignored=_IGNORED),
}
