"""LFM2: gated short convolutions, with attention in some of the layers, and maybe with experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.runtime.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    RouterConfig,
)
from penstock.runtime.models.configs.recurrent import ShortConvConfig
from penstock.runtime.models.families.family import ModelFamily, tensor_name
from penstock.runtime.models.families.mixture_fields import (
    read_experts_and_choices,
    read_layer_numbers,
)
from penstock.runtime.models.families.reading import (
    Sizes,
    read_layer_types,
    read_model,
    read_rope,
    read_sizes,
)
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.load_rules import ParamPath, Source, Stored, StoredAt

_IGNORED = (
    "block_dim",
    "block_mlp_init_scale",
    "block_norm_eps",
    "block_out_init_scale",
    "block_use_swiglu",
    "block_use_xavier_init",
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "num_heads",
    "theta",
    "use_pos_enc",
)
"""What published files say beside the fields of transformers' class."""
_NAMES: Mapping[str, str] = {
    "attention_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
    "norm": "embedding_norm",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "o_proj": "out_proj",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "router": "gate",
}


def _parse_dense(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "lfm2")
    sizes = read_sizes(fields, kv_heads=8)
    mlp = MLPConfig(intermediate_size=_intermediate_size(fields))
    return _model(architecture, fields, sizes, [mlp] * sizes.num_layers)


def _parse_mixture(architecture: str, fields: Fields) -> ModelConfig:
    """Parse a mixture: the first layers have MLPs, and all others have experts."""
    fields.only("model_type", "lfm2_moe")
    sizes = read_sizes(fields, kv_heads=8)
    num_dense = min(fields.integer("num_dense_layers", 2, minimum=0), sizes.num_layers)
    dense = MLPConfig(intermediate_size=fields.integer("intermediate_size", 7168))
    count, chosen = read_experts_and_choices(fields, ("num_experts", "num_local_experts"), 32, 4)
    experts = ExpertsConfig(
        num_experts=count,
        per_token=chosen,
        intermediate_size=fields.integer("moe_intermediate_size", 1792),
        router=RouterConfig(
            score="sigmoid",
            correction=fields.boolean("use_expert_bias", True),
            normalize=fields.boolean("norm_topk_prob", True),
            scale=fields.number("routed_scaling_factor", 1.0),
        ),
    )
    mlps = [dense] * num_dense + [experts] * (sizes.num_layers - num_dense)
    return _model(architecture, fields, sizes, mlps)


def _model(
    architecture: str, fields: Fields, sizes: Sizes, mlps: Sequence[MLPConfig | ExpertsConfig]
) -> ModelConfig:
    """Return the model whose layers have these in the place of the MLP."""
    attention = AttentionConfig(
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        scale=sizes.head_dim**-0.5,
        rope=read_rope(fields, sizes.max_positions, theta=1_000_000.0),
        qk_norm="head",
    )
    conv = ShortConvConfig(
        channels=sizes.hidden_size,
        num_taps=fields.integer("conv_L_cache", 3, minimum=2),
        bias=fields.boolean("conv_bias", False),
    )
    layers = [
        LayerConfig(attention=attention if kind == "full_attention" else conv, mlp=mlp)
        for kind, mlp in zip(_kinds(fields, sizes), mlps, strict=True)
    ]
    tied = fields.boolean("tie_embedding", True)  # the older name
    if "tie_embedding" in fields and fields.boolean("tie_word_embeddings", tied) != tied:
        fields.problem("tie_embedding", "contradicts tie_word_embeddings")
    return read_model(architecture, fields, sizes, layers, eps_name="norm_eps", eps=1e-5, tied=tied)


def _kinds(fields: Fields, sizes: Sizes) -> tuple[str, ...]:
    """Return the kind of each layer, by layer_types or by the older full_attn_idxs, which stands for all
    layers if absent.
    """
    listed = read_layer_numbers(fields, "full_attn_idxs", sizes.num_layers)
    attend = range(sizes.num_layers) if listed is None else listed
    kinds = ["full_attention" if layer in attend else "conv" for layer in range(sizes.num_layers)]
    return read_layer_types(fields, kinds, ("full_attention", "conv"))


def _intermediate_size(fields: Fields) -> int:
    """Return the size that the file gives, or two thirds of it, times a factor, rounded up to a multiple."""
    older, size = fields.optional_integer("block_ff_dim"), fields.optional_integer("intermediate_size")
    size = older or size or fields.integer("intermediate_size")
    multiple = fields.integer("block_multiple_of", 256)
    factor = fields.optional_number("block_ffn_dim_multiplier")
    if "block_ffn_dim_multiplier" not in fields:
        factor = 1.0
    if not fields.boolean("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    return size if factor is None else -(-int(factor * size) // multiple) * multiple


def _stored(config: ModelConfig) -> StoredAt:
    """Say where parameters are stored: convolutions are called so, and attention is called self_attn. The
    correction of a router's scores is beside the router and not in it.
    """

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        if path[2:3] == ("self_attn",):
            attention = config.layers[int(path[1])].attention
            if isinstance(attention, ShortConvConfig):
                path = (*path[:2], "conv", *path[3:])
        if path[-1] == "correction":
            path = (*path[:-2], "expert_bias")
        return Stored((Source(tensor_name(path, _NAMES), shape),))

    return stored


FAMILIES: Mapping[str, ModelFamily] = {
    "Lfm2ForCausalLM": ModelFamily(parse=_parse_dense, stored=_stored, ignored=_IGNORED),
    "Lfm2MoeForCausalLM": ModelFamily(parse=_parse_mixture, stored=_stored, ignored=_IGNORED),
}
