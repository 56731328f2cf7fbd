"""GLM 4.5 and later, dots.llm1, and MiniMax M2: mixtures of many small experts, chosen by sigmoids with a
correction.
"""

from __future__ import annotations

from penstock.runtime.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    RouterConfig,
)
from penstock.runtime.models.families.family import PRE_NORMS, ModelFamily, stored_plainly, tensor_name
from penstock.runtime.models.families.mixture_fields import read_experts_and_choices, read_grouped_experts
from penstock.runtime.models.families.reading import (
    read_model,
    read_predictor,
    read_rope,
    read_sizes,
    read_windows,
)
from penstock.runtime.models.families.softmax_mixtures import MIXTRAL_NAMES
from penstock.runtime.models.families.stacked_experts import where_stacked
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.load_rules import ParamPath, Source, Stored, StoredAt

_MINIMAX_IGNORED = (
    "auto_map",
    "layernorm_full_attention_beta",
    "layernorm_linear_attention_beta",
    "layernorm_mlp_beta",
    "mlp_intermediate_size",
    "mtp_transformer_layers",
    "num_mtp_modules",
    "shared_moe_mode",
    "swa_rope_theta",
    "use_mtp",
)
"""Fields of other models of MiniMax, and of layers that predict further tokens; transformers' class has none
of them.
"""
_GLM_NAMES = {
    **PRE_NORMS,
    "router": "gate",
    "correction": "e_score_correction_bias",
    "shared_expert": "shared_experts",
}


def _parse_glm(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "glm4_moe")
    fields.only("hidden_act", "silu")
    sizes = read_sizes(fields, kv_heads=8)
    bias = fields.boolean("attention_bias", False)
    attention = AttentionConfig(
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        scale=sizes.head_dim**-0.5,
        rope=read_rope(fields, sizes.max_positions, partial=0.5),
        qkv_bias=bias,
        qk_norm="head" if fields.boolean("use_qk_norm", False) else "none",
    )
    experts = read_grouped_experts(fields, count=128, inner=1408)
    dense = MLPConfig(intermediate_size=fields.integer("intermediate_size"))
    num_dense = fields.integer("first_k_dense_replace", 1, minimum=0)
    layers = [
        LayerConfig(attention=attention, mlp=dense if layer < num_dense else experts)
        for layer in range(sizes.num_layers)
    ]
    predictor = read_predictor(fields, layers[-1])
    return read_model(architecture, fields, sizes, layers, eps=1e-5, predictor=predictor)


def _parse_dots(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "dots1")
    fields.only("scoring_func", "noaux_tc", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("moe_layer_freq", 1)
    fields.only("hidden_act", "silu")
    sizes = read_sizes(fields, kv_heads=32)
    bias, rope = fields.boolean("attention_bias", False), read_rope(fields, sizes.max_positions)
    experts = read_grouped_experts(fields, count=128, inner=1408, shared=2, normalize=False)
    dense = MLPConfig(intermediate_size=fields.integer("intermediate_size"))
    num_dense = fields.integer("first_k_dense_replace", 0, minimum=0)
    first = fields.integer("max_window_layers", 62, minimum=0)
    slides = "sliding_window" not in fields or fields.raw("sliding_window") is not None
    kinds = [
        "sliding_attention" if slides and layer >= first else "full_attention"
        for layer in range(sizes.num_layers)
    ]
    layers = [
        LayerConfig(
            attention=AttentionConfig(
                num_heads=sizes.num_heads,
                num_kv_heads=sizes.num_kv_heads,
                head_dim=sizes.head_dim,
                scale=sizes.head_dim**-0.5,
                rope=rope,
                window=window,
                qkv_bias=bias,
                o_bias=bias,
                qk_norm="head",
            ),
            mlp=dense if layer < num_dense else experts,
        )
        for layer, window in enumerate(read_windows(fields, kinds, 4096))
    ]
    return read_model(architecture, fields, sizes, layers)


def _parse_minimax(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "minimax_m2")
    fields.only("hidden_act", "silu")
    _refuse_other_minimax(fields)
    sizes = read_sizes(fields, head_dim=128, kv_heads=8)
    rotary_dim = fields.optional_integer("rotary_dim")
    share = 1.0 if rotary_dim is None else rotary_dim / sizes.head_dim
    if rotary_dim is not None and (rotary_dim % 2 or rotary_dim > sizes.head_dim):
        fields.problem("rotary_dim", f"must be even and at most head_dim {sizes.head_dim}, not {rotary_dim}")
        share = 1.0
    attention = AttentionConfig(
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        scale=sizes.head_dim**-0.5,
        rope=read_rope(fields, sizes.max_positions, theta=5_000_000.0, partial=share),
        qk_norm="all",
    )
    count, chosen = read_experts_and_choices(fields, ("num_local_experts", "num_experts"), 256, 8)
    experts = ExpertsConfig(
        num_experts=count,
        per_token=chosen,
        intermediate_size=fields.integer("intermediate_size"),
        router=RouterConfig(score="sigmoid", correction=True),
    )
    layers = [LayerConfig(attention=attention, mlp=experts)] * sizes.num_layers
    return read_model(architecture, fields, sizes, layers)


def _refuse_other_minimax(fields: Fields) -> None:
    """Refuse every kind of MiniMax but that which published files tell, and which transformers' class takes
    for granted.
    """
    for name, value in (
        ("qk_norm_type", "per_layer"),
        ("scoring_func", "sigmoid"),
        ("shared_intermediate_size", 0),
        ("use_qk_norm", True),
        ("use_routing_bias", True),
        ("sliding_window", None),
    ):
        fields.only(name, value)
    types = fields.raw("attn_type_list")
    if types is not None and (not isinstance(types, list) or set(map(str, types)) - {"1"}):
        fields.problem("attn_type_list", f"must be 1, full attention, for each layer, not {types!r}")


def _stored_minimax(config: ModelConfig) -> StoredAt:
    """Say where parameters are stored: MiniMax's correction is beside the router and not in it."""

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        if path[-1] == "correction":
            path = (*path[:-2], "e_score_correction_bias")
        return Stored((Source(tensor_name(path, MIXTRAL_NAMES), shape),))

    return stored


FAMILIES = {
    "Dots1ForCausalLM": ModelFamily(parse=_parse_dots, stored=where_stacked(stored_plainly(_GLM_NAMES))),
    "Glm4MoeForCausalLM": ModelFamily(
        parse=_parse_glm, stored=stored_plainly(_GLM_NAMES), further_layers=True
    ),
    "MiniMaxM2ForCausalLM": ModelFamily(
        parse=_parse_minimax,
        ignored=_MINIMAX_IGNORED,
        stored=_stored_minimax,
        further_layers=True,
    ),
}
