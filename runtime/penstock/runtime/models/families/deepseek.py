"""DeepSeek V2 and V3, with latent attention and mixtures of experts, and the models that have the
architecture of one of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

from penstock.runtime.models.config import (
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    RouterConfig,
)
from penstock.runtime.models.families.family import PRE_NORMS, ModelFamily, pairs_apart, tensor_name
from penstock.runtime.models.families.mixture_fields import (
    check_groups,
    read_experts_and_choices,
    read_grouped_experts,
)
from penstock.runtime.models.families.reading import Sizes, read_model, read_predictor, read_rope
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.load_rules import ParamPath, Rows, Source, Stored, StoredAt
from penstock.runtime.models.rope import RopeConfig

_IGNORED = ("auto_map", "aux_loss_alpha", "ep_size", "seq_aux")
"""Training."""

_NAMES: Mapping[str, str] = {
    **PRE_NORMS,
    "router": "gate",
    "correction": "e_score_correction_bias",
    "shared_expert": "shared_experts",
}


def _parse(
    architecture: str,
    fields: Fields,
    *,
    model_type: str,
    mlps: Callable[[Fields, int], list[MLPConfig | ExpertsConfig]],
) -> ModelConfig:
    fields.only("model_type", model_type)
    fields.only("hidden_act", "silu")
    fields.only("pretraining_tp", 1)
    num_layers, num_heads = fields.num_layers(), fields.integer("num_attention_heads")
    fields.only("num_key_value_heads", num_heads)
    attention = _attention(fields, num_heads)
    sizes = Sizes(
        fields.integer("hidden_size"),
        num_layers,
        num_heads,
        num_heads,
        attention.nope_dim + attention.rope_dim,
        fields.integer("max_position_embeddings"),
    )
    layers = [LayerConfig(attention=attention, mlp=mlp) for mlp in mlps(fields, num_layers)]
    return read_model(architecture, fields, sizes, layers, predictor=read_predictor(fields, layers[-1]))


def _mlps(fields: Fields, num_layers: int) -> list[MLPConfig | ExpertsConfig]:
    """Read what each layer has behind attention: the first ones an MLP, and the others experts."""
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("moe_layer_freq", 1)
    num_dense = min(fields.integer("first_k_dense_replace", 3, minimum=0), num_layers)
    dense = MLPConfig(intermediate_size=fields.integer("intermediate_size", 18432))
    return [dense] * num_dense + [
        read_grouped_experts(fields, count=256, inner=2048, groups=8, top_groups=4, scale=2.5)
    ] * (num_layers - num_dense)


def _mlps_of_v2(fields: Fields, num_layers: int) -> list[MLPConfig | ExpertsConfig]:
    """Read the same in DeepSeek V2. Experts are chosen by softmax scores, maybe of the groups with the
    highest ones.
    """
    fields.only("scoring_func", "softmax")
    fields.only("topk_method", "greedy", "group_limited_greedy")
    fields.only("norm_topk_prob", False)
    fields.only("moe_layer_freq", 1)
    fields.only("mlp_bias", False)
    grouped = fields.raw("topk_method") == "group_limited_greedy"
    names = ("n_group", "topk_group")
    if not grouped:
        fields.ignore(names)
    groups, top_groups = (fields.integer(name) for name in names) if grouped else (1, 1)
    count, chosen = read_experts_and_choices(fields, ("n_routed_experts", "num_local_experts"), 64, 6)
    check_groups(fields, count, chosen, groups, top_groups, least=1)
    inner = fields.integer("moe_intermediate_size", 1407)
    experts = ExpertsConfig(
        num_experts=count,
        per_token=chosen,
        intermediate_size=inner,
        router=RouterConfig(
            normalize=False,
            scale=fields.number("routed_scaling_factor", 1.0),
            num_groups=groups,
            top_groups=top_groups,
            in_group=1,
        ),
        shared_size=inner * fields.integer("n_shared_experts", 2),
    )
    dense = MLPConfig(intermediate_size=fields.integer("intermediate_size", 11008))
    num_dense = min(fields.integer("first_k_dense_replace", 0, minimum=0), num_layers)
    return [dense] * num_dense + [experts] * (num_layers - num_dense)


def _attention(fields: Fields, num_heads: int) -> LatentConfig:
    nope_dim, rope_dim = fields.integer("qk_nope_head_dim", 128), fields.integer("qk_rope_head_dim", 64)
    if rope_dim % 2 or rope_dim < 4:
        fields.problem("qk_rope_head_dim", f"must be even and at least 4, not {rope_dim}")
    fields.only("qk_head_dim", nope_dim + rope_dim)
    fields.only("head_dim", rope_dim)
    has_rank = "q_lora_rank" not in fields or fields.raw("q_lora_rank") is not None
    rope = read_rope(fields, fields.integer("max_position_embeddings"))
    return LatentConfig(
        num_heads=num_heads,
        latent_dim=fields.integer("kv_lora_rank", 512),
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        value_dim=fields.integer("v_head_dim", 128),
        scale=(nope_dim + rope_dim) ** -0.5 * _yarn_temperature(fields, rope) ** 2,
        rope=rope,
        interleaved=fields.boolean("rope_interleave", True),
        query_rank=fields.integer("q_lora_rank", 1536) if has_rank else None,
        bias=fields.boolean("attention_bias", False),
    )


def _yarn_temperature(fields: Fields, rope: RopeConfig) -> float:
    """Return what YaRN multiplies queries and keys by that are not rotated too, by mscale_all_dim."""
    given = (fields.mapping(name).get("mscale_all_dim") for name in ("rope_parameters", "rope_scaling"))
    weight = next((value for value in given if isinstance(value, int | float)), 0.0)
    if rope.kind != "yarn" or rope.factor <= 1:
        return 1.0
    return 0.1 * weight * math.log(rope.factor) + 1.0


def _stored(config: ModelConfig) -> StoredAt:
    """Name a tensor for each parameter. What makes rotated channels has the two of a pair side by side, and
    is read in the order that we rotate in.
    """

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        return Stored((Source(tensor_name(path, _NAMES), shape, order=_order(config, path)),))

    return stored


def _order(config: ModelConfig, path: ParamPath) -> Rows | None:
    if path[0] != "layers":
        return None
    attention = config.layers[int(path[1])].attention
    if not isinstance(attention, LatentConfig) or not attention.interleaved:
        return None
    match path[-2]:
        case "q_proj" | "q_b_proj":
            kept, turned, heads = attention.nope_dim, attention.rope_dim, attention.num_heads
        case "kv_a_proj_with_mqa":
            kept, turned, heads = attention.latent_dim, attention.rope_dim, 1
        case _:
            return None
    return pairs_apart(heads, kept + turned, turned, kept)


FAMILIES: Mapping[str, ModelFamily] = {
    f"DeepseekV{version}ForCausalLM": ModelFamily(
        parse=functools.partial(_parse, model_type=f"deepseek_v{version}", mlps=mlps),
        ignored=_IGNORED,
        stored=_stored,
        further_layers=True,
    )
    for version, mlps in ((2, _mlps_of_v2), (3, _mlps))
}
