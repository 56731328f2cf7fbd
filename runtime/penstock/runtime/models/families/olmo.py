"""OLMo 2 and 3, OLMoE and FlexOlmo: one norm over the channels of all heads, and, but for OLMoE, norms after
attention and MLP.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from penstock.runtime.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    Norms,
    RouterConfig,
)
from penstock.runtime.models.families.family import POST_NORMS, PRE_NORMS, ModelFamily, stored_plainly
from penstock.runtime.models.families.mixture_fields import read_experts_and_choices
from penstock.runtime.models.families.reading import (
    Sizes,
    every,
    read_model,
    read_rope,
    read_ropes,
    read_sizes,
    read_windows,
)
from penstock.runtime.models.families.stacked_experts import where_stacked
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.rope import RopeConfig

_TYPES: Mapping[str, str] = {"Olmo2ForCausalLM": "olmo2", "Olmo3ForCausalLM": "olmo3"}
"""From architectures to model_type."""


def _parse_olmo2(architecture: str, fields: Fields) -> ModelConfig:
    sizes = read_sizes(fields, kv_heads=0)
    rope = read_rope(fields, sizes.max_positions)
    return _model(architecture, fields, sizes, [(None, rope)] * sizes.num_layers)


def _parse_olmo3(architecture: str, fields: Fields) -> ModelConfig:
    sizes = read_sizes(fields, kv_heads=0)
    # Both types of layers have one base, but only those with full attention are scaled in older files.
    bases = dict.fromkeys(("full_attention", "sliding_attention"), ("rope_theta", 500000.0))
    ropes = read_ropes(fields, sizes.max_positions, bases)
    windows = read_windows(fields, every(4, sizes.num_layers), 4096)
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    layers = [(window, ropes[kind]) for window, kind in zip(windows, kinds, strict=True)]
    return _model(architecture, fields, sizes, layers)


def _model(
    architecture: str, fields: Fields, sizes: Sizes, layers: Sequence[tuple[int | None, RopeConfig]]
) -> ModelConfig:
    """Make the model's config. `layers`: the window and the RoPE of each."""
    fields.only("model_type", _TYPES[architecture])
    fields.only("hidden_act", "silu")
    bias = fields.boolean("attention_bias", False)
    mlp = MLPConfig(intermediate_size=fields.integer("intermediate_size"))
    made = [
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
                qk_norm="all",
            ),
            mlp=mlp,
            norms="post",
        )
        for window, rope in layers
    ]
    return read_model(architecture, fields, sizes, made, eps=1e-5)


def _parse_mixture(
    architecture: str,
    fields: Fields,
    *,
    model_type: str,
    count: int,
    chosen: int,
    theta: float,
    eps: float,
    norms: Norms,
) -> ModelConfig:
    """Parse OLMoE and FlexOlmo. count, chosen: defaults of the numbers of experts."""
    fields.only("model_type", model_type)
    fields.only("hidden_act", "silu")
    fields.only("clip_qkv", None)
    sizes = read_sizes(fields, kv_heads=0)
    bias = fields.boolean("attention_bias", False)
    count, chosen = read_experts_and_choices(fields, ("num_experts", "num_local_experts"), count, chosen)
    layer = LayerConfig(
        attention=AttentionConfig(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            scale=sizes.head_dim**-0.5,
            rope=read_rope(fields, sizes.max_positions, theta=theta),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="all",
        ),
        mlp=ExpertsConfig(
            num_experts=count,
            per_token=chosen,
            intermediate_size=fields.integer("intermediate_size"),
            router=RouterConfig(normalize=fields.boolean("norm_topk_prob", False)),
        ),
        norms=norms,
    )
    return read_model(architecture, fields, sizes, [layer] * sizes.num_layers, eps=eps)


_STORED = stored_plainly(POST_NORMS)
_parse_olmoe = functools.partial(
    _parse_mixture, model_type="olmoe", count=64, chosen=8, theta=1e4, eps=1e-5, norms="pre"
)
_parse_flex = functools.partial(
    _parse_mixture, model_type="flex_olmo", count=7, chosen=5, theta=5e5, eps=1e-6, norms="post"
)
FAMILIES: Mapping[str, ModelFamily] = {
    "Olmo2ForCausalLM": ModelFamily(parse=_parse_olmo2, stored=_STORED),
    "Olmo3ForCausalLM": ModelFamily(parse=_parse_olmo3, stored=_STORED),
    "OlmoeForCausalLM": ModelFamily(
        parse=_parse_olmoe, stored=where_stacked(stored_plainly({**PRE_NORMS, "router": "gate"}))
    ),
    "FlexOlmoForCausalLM": ModelFamily(
        parse=_parse_flex, stored=where_stacked(stored_plainly({**POST_NORMS, "router": "gate"}))
    ),
}
