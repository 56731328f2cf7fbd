"""Hunyuan, with and without experts: queries and keys are normalised after their rotation."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from penstock.runtime.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
)
from penstock.runtime.models.families.family import PRE_NORMS, ModelFamily, stored_plainly
from penstock.runtime.models.families.reading import Sizes, read_model, read_rope, read_sizes
from penstock.runtime.models.families.stacked_experts import where_stacked
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.rope import RopeConfig

_NAMES: Mapping[str, str] = {
    **PRE_NORMS,
    "q_norm": "query_layernorm",
    "k_norm": "key_layernorm",
    "router": "gate.wg",
    "shared_expert": "shared_mlp",
}
_IGNORED = (
    "auto_map",
    "capacity_factor",
    "cla_share_factor",
    "class_num",
    "dense_list",
    "eod_token_id",
    "im_end_id",
    "im_newline_id",
    "im_start_id",
    "image_token_id",
    "mask_init_id",
    "num_media_embeds",
    "org_vocab_size",
    "pad_id",
    "pool_type",
    "text_end_id",
    "text_start_id",
    "video_end_id",
    "video_start_id",
)
"""Tokens, and fields of what other switches turn on, which are refused."""
_OF_EXPERTS = ("moe_intermediate_size", "moe_topk", "norm_topk_prob", "num_shared_expert")
"""Fields that files without experts have too."""
_UNUSED_ROPE = ("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def _parse(architecture: str, fields: Fields, *, has_experts: bool) -> ModelConfig:
    fields.only("model_type", f"hunyuan_v1_{'moe' if has_experts else 'dense'}")
    fields.only("hidden_act", "silu")
    fields.only("norm_type", "rms")
    fields.only("pretraining_tp", 1)
    fields.only("use_qk_norm", True)
    fields.only("use_rotary_pos_emb", True)
    sizes = read_sizes(fields, kv_heads=0)
    fields.only("attention_head_dim", sizes.head_dim)
    bias = fields.boolean("attention_bias", False)
    inner = fields.integer("intermediate_size")
    if not has_experts:
        fields.only("num_experts", 1)
        fields.ignore(_OF_EXPERTS)
    layer = LayerConfig(
        attention=AttentionConfig(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            scale=sizes.head_dim**-0.5,
            rope=_rope(fields, sizes),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head_after",
        ),
        mlp=_experts(fields, inner, sizes.num_layers) if has_experts else MLPConfig(intermediate_size=inner),
    )
    return read_model(architecture, fields, sizes, [layer] * sizes.num_layers, eps=1e-5)


def _experts(fields: Fields, inner: int, num_layers: int) -> ExpertsConfig:
    """Read experts of the size of an MLP, and one that all tokens share. Files may say it for each layer."""
    for name, value in (("moe_intermediate_size", inner), ("num_shared_expert", 1)):
        fields.only(name, value, [value] * num_layers)
    fields.only("norm_topk_prob", True)
    fields.only("routed_scaling_factor", 1.0)
    fields.only("use_mixed_mlp_moe", True)
    fields.only("moe_layer_num_skipped", 0)
    count = fields.integer("num_experts", 1)
    fields.only("num_local_experts", count)
    chosen = fields.raw("moe_topk")
    if isinstance(chosen, list) and chosen and chosen == chosen[:1] * num_layers:
        chosen = chosen[0]
    chosen = 1 if chosen is None else chosen
    if not isinstance(chosen, int) or not 0 < chosen <= count:
        fields.problem("moe_topk", f"must be 1 to {count}, the number of experts, not {chosen!r}")
        chosen = 1
    fields.only("num_experts_per_tok", chosen)
    return ExpertsConfig(num_experts=count, per_token=chosen, intermediate_size=inner, shared_size=inner)


def _rope(fields: Fields, sizes: Sizes) -> RopeConfig:
    """Read RoPE. "dynamic" with an alpha has another base, which does not depend on the length of the
    context.
    """
    rope = read_rope(fields, sizes.max_positions, others=_UNUSED_ROPE)
    given = [fields.mapping(name).get("alpha") for name in ("rope_parameters", "rope_scaling")]
    alpha = next((value for value in given if value), None)
    if rope.kind != "dynamic" or alpha is None:
        return rope
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 1 <= alpha < float("inf"):
        fields.problem("rope_scaling", f"alpha must be a finite number of at least 1, not {alpha!r}")
        return rope
    dim = sizes.head_dim
    return replace(
        rope,
        kind="default",
        factor=1.0,
        original_max_positions=0,
        theta=rope.theta * alpha ** (dim / (dim - 2)),
    )


FAMILIES: Mapping[str, ModelFamily] = {
    f"HunYuan{name}V1ForCausalLM": ModelFamily(
        parse=functools.partial(_parse, has_experts=has_experts),
        ignored=_IGNORED,
        stored=where_stacked(stored_plainly(_NAMES)),
    )
    for name, has_experts in (("Dense", False), ("MoE", True))
}
