"""Decoders like Llama's with mixtures of experts: Mixtral, Phi-3.5-MoE, those of Qwen, and ERNIE 4.5."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from penstock.runtime.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    RouterConfig,
)
from penstock.runtime.models.families.dense import apart
from penstock.runtime.models.families.family import PRE_NORMS, ModelFamily, stored_plainly, tensor_name
from penstock.runtime.models.families.mixture_fields import (
    read_experts_and_choices,
    read_layer_numbers,
)
from penstock.runtime.models.families.reading import read_layer_types, read_model, read_rope, read_sizes
from penstock.runtime.models.families.stacked_experts import where_stacked
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.load_rules import ParamPath, Source, Stored, StoredAt
from penstock.runtime.models.rope import RopeConfig

QWEN_NAMES: Mapping[str, str] = {**PRE_NORMS, "router": "gate"}
MIXTRAL_NAMES: Mapping[str, str] = {
    **PRE_NORMS,
    "mlp": "block_sparse_moe",
    "router": "gate",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}


@dataclass(frozen=True, slots=True)
class Traits:
    """How one architecture differs from the others, and what its config.json leaves out.

    kv_heads, eps, theta: defaults. bias: the field that decides on the biases of q, k and v, and its default;
    o_bias: whether it decides on that of the output, too. dense_layers: whether fields can give layers an MLP
    in the place of experts. ignored: further fields that transformers' own implementation does not look at.
    mrope: see `read_rope`.
    """

    model_type: str
    kv_heads: int
    experts: Callable[[Fields], ExpertsConfig]
    windows: Callable[[Fields, int], tuple[int | None, ...]]
    names: Mapping[str, str]
    bias: tuple[str, bool] | None = None
    o_bias: bool = False
    qk_norm: bool = False
    eps: float = 1e-6
    theta: float = 10_000.0
    dense_layers: bool = False
    ignored: tuple[str, ...] = ()
    mrope: RopeConfig | None = None


def _mixtral_experts(fields: Fields) -> ExpertsConfig:
    count, chosen = read_experts_and_choices(fields, ("num_local_experts", "num_experts"), 8, 2)
    inner = fields.integer("intermediate_size")
    return ExpertsConfig(num_experts=count, per_token=chosen, intermediate_size=inner)


def qwen_experts(
    fields: Fields, *, count: int, chosen: int, inner: int, shared: int | None, normalize: bool = False
) -> ExpertsConfig:
    """Read Qwen's experts. count, chosen, inner: defaults. shared: the default of the shared expert's size;
    None: there is no such expert. normalize: the weights of a token's experts are always divided by their
    sum; else a field says so.
    """
    if normalize:
        fields.only("norm_topk_prob", True)
    count, chosen = read_experts_and_choices(fields, ("num_experts", "num_local_experts"), count, chosen)
    return ExpertsConfig(
        num_experts=count,
        per_token=chosen,
        intermediate_size=fields.integer("moe_intermediate_size", inner),
        router=RouterConfig(normalize=normalize or fields.boolean("norm_topk_prob", False)),
        shared_size=None if shared is None else fields.integer("shared_expert_intermediate_size", shared),
        shared_gate=shared is not None,
    )


def no_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Let all layers attend to everything; there is no field about it."""
    return (None,) * num_layers


def _one_window(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Give all layers the window, if there is one (Mixtral)."""
    window = fields.optional_integer("sliding_window")
    return (window,) * num_layers


def _switched_window(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Give all layers the window, if it is switched on (Qwen 3)."""
    window = fields.optional_integer("sliding_window", minimum=0)
    if not fields.boolean("use_sliding_window", False):
        return (None,) * num_layers
    if window is None and "sliding_window" not in fields:
        window = 4096
    return (window or None,) * num_layers


def _qwen2_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Give every other one of the first max_window_layers the window, if it is switched on (Qwen 2)."""
    window = _switched_window(fields, 1)[0]
    first = fields.integer("max_window_layers", 28, minimum=0)
    has_window = [window is not None and layer % 2 == 0 and layer < first for layer in range(num_layers)]
    default = ["sliding_attention" if has else "full_attention" for has in has_window]
    types = read_layer_types(fields, default, ("full_attention", "sliding_attention"))
    if window is None and "sliding_attention" in types:
        fields.problem("layer_types", "names sliding_attention, but no sliding window is switched on")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


TRAITS: Mapping[str, Traits] = {
    "MixtralForCausalLM": Traits(
        "mixtral",
        8,
        _mixtral_experts,
        _one_window,
        MIXTRAL_NAMES,
        eps=1e-5,
        theta=1_000_000.0,
    ),
    "Qwen2MoeForCausalLM": Traits(
        "qwen2_moe",
        16,
        functools.partial(qwen_experts, count=60, chosen=4, inner=1408, shared=5632),
        _qwen2_windows,
        QWEN_NAMES,
        bias=("qkv_bias", True),
        dense_layers=True,
    ),
    "Qwen3MoeForCausalLM": Traits(
        "qwen3_moe",
        4,
        functools.partial(qwen_experts, count=128, chosen=8, inner=768, shared=None),
        _switched_window,
        QWEN_NAMES,
        bias=("attention_bias", False),
        o_bias=True,
        qk_norm=True,
        dense_layers=True,
        ignored=("max_window_layers",),
    ),
}


def _parse(architecture: str, fields: Fields, traits: Traits) -> ModelConfig:
    fields.only("model_type", traits.model_type)
    fields.only("hidden_act", "silu")
    sizes = read_sizes(fields, kv_heads=traits.kv_heads)
    experts = traits.experts(fields)
    windows = traits.windows(fields, sizes.num_layers)
    is_dense = _dense_layers(fields, sizes.num_layers) if traits.dense_layers else (False,) * sizes.num_layers
    inner = fields.integer("intermediate_size") if traits.dense_layers else 0
    bias = traits.bias is not None and fields.boolean(*traits.bias)
    rope = read_rope(fields, sizes.max_positions, theta=traits.theta, mrope=traits.mrope)
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
                o_bias=bias and traits.o_bias,
                qk_norm="head" if traits.qk_norm else "none",
            ),
            mlp=MLPConfig(intermediate_size=inner) if dense else experts,
        )
        for window, dense in zip(windows, is_dense, strict=True)
    ]
    return read_model(architecture, fields, sizes, layers, eps=traits.eps)


def _dense_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Say for each layer whether it has an MLP and no experts."""
    listed = read_layer_numbers(fields, "mlp_only_layers", num_layers) or ()
    step = fields.integer("decoder_sparse_step", 1)
    return tuple(layer in listed or (layer + 1) % step != 0 for layer in range(num_layers))


def _parse_ernie(architecture: str, fields: Fields) -> ModelConfig:
    """Parse ERNIE: softmax scores with a correction for the choice; shared experts; some layers may be
    dense.
    """
    fields.only("model_type", "ernie4_5_moe")
    fields.only("hidden_act", "silu")
    fields.call({"num_experts_per_tok": "moe_k"})
    fields.only("moe_norm_min", 1e-12)
    fields.only("moe_gate", "topk")
    fields.only("moe_gate_act", "softmax")
    fields.only("moe_use_aux_free", True)
    sizes = read_sizes(fields, kv_heads=4)
    bias, rope = fields.boolean("use_bias", False), read_rope(fields, sizes.max_positions, theta=500_000.0)
    attention = AttentionConfig(
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        scale=sizes.head_dim**-0.5,
        rope=rope,
        qkv_bias=bias,
        o_bias=bias,
    )
    count, chosen = read_experts_and_choices(fields, ("moe_num_experts", "num_experts"), 64, 6)
    inner = fields.integer("moe_intermediate_size", 1536)
    experts = ExpertsConfig(
        num_experts=count,
        per_token=chosen,
        intermediate_size=inner,
        router=RouterConfig(correction=True),
        shared_size=inner * fields.integer("moe_num_shared_experts", 2, minimum=0) or None,
    )
    if bias:
        fields.problem("use_bias", "true is not supported for experts")
    dense = MLPConfig(intermediate_size=fields.integer("intermediate_size"))
    begin, step = (
        fields.integer("moe_layer_start_index", 1, minimum=0),
        fields.integer("moe_layer_interval", 1),
    )
    last = fields.raw("moe_layer_end_index")
    end = sizes.num_layers - 1 if last in (None, -1) else fields.integer("moe_layer_end_index", minimum=0)
    layers = [
        LayerConfig(
            attention=attention,
            mlp=experts if (layer + 1) % step == 0 and begin <= layer <= end else dense,
        )
        for layer in range(sizes.num_layers)
    ]
    return read_model(architecture, fields, sizes, layers, eps=1e-5, tied=True)


def _parse_phimoe(architecture: str, fields: Fields) -> ModelConfig:
    """Parse PhiMoE: layer norms, and weights of experts by SparseMixer."""
    fields.only("model_type", "phimoe")
    fields.only("hidden_act", "silu")
    sizes = read_sizes(fields, kv_heads=8)
    bias = fields.boolean("attention_bias", False)
    count, chosen = read_experts_and_choices(fields, ("num_local_experts", "num_experts"), 16, 2)
    if chosen != 2:
        fields.problem("num_experts_per_tok", f"must be 2, not {chosen}")
    layer = LayerConfig(
        attention=AttentionConfig(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            scale=sizes.head_dim**-0.5,
            rope=_phimoe_rope(fields, sizes.max_positions),
            window=fields.optional_integer("sliding_window"),
            qkv_bias=bias,
            o_bias=bias,
        ),
        mlp=ExpertsConfig(
            num_experts=count,
            per_token=2,
            intermediate_size=fields.integer("intermediate_size"),
            router=RouterConfig(score="sparsemixer", jitter=fields.number("router_jitter_noise", 0.01)),
        ),
    )
    return read_model(
        architecture,
        fields,
        sizes,
        [layer] * sizes.num_layers,
        eps=1e-5,
        norm="layer",
        head_bias=fields.boolean("lm_head_bias", False),
    )


def _phimoe_rope(fields: Fields, max_positions: int) -> RopeConfig:
    """Read LongRoPE, which, where it is used, has temperatures of its own, of which published files have one
    alone.
    """
    rope = read_rope(fields, max_positions, theta=1_000_000.0, others=("short_mscale", "long_mscale"))
    if rope.kind == "default":
        return rope
    if rope.kind != "longrope":
        fields.problem("rope_scaling", f"{rope.kind!r} is not supported in this family")
    given = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    inner = Fields(given, "rope_scaling.", fields.problems)
    temperature = inner.number("short_mscale")
    inner.only("long_mscale", temperature)
    return replace(rope, attention_factor=temperature)


_ERNIE_NAMES: Mapping[str, str] = {**QWEN_NAMES, "shared_expert": "shared_experts"}


def _stored_ernie(config: ModelConfig) -> StoredAt:
    """Say where parameters are stored: rotated pairs lie side by side, and the correction is a row of a
    tensor beside the router.
    """

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        if path[-1] == "correction":
            name = tensor_name((*path[:-2], "moe_statics", "e_score_correction_bias"), _ERNIE_NAMES)
            return Stored((Source(name, (1, *shape), at=(0,)),))
        is_rotated = len(path) > 2 and path[-2] in ("q_proj", "k_proj")
        order = apart(config, path) if is_rotated else None
        return Stored((Source(tensor_name(path, _ERNIE_NAMES), shape, order=order),))

    return stored


def family(traits: Traits, *, transposed: bool = False) -> ModelFamily:
    """Make the family of an architecture with these traits. transposed: see `where_stacked`."""
    return ModelFamily(
        parse=functools.partial(_parse, traits=traits),
        ignored=traits.ignored,
        stored=where_stacked(stored_plainly(traits.names), transposed=transposed),
    )


_PHIMOE = ModelFamily(
    parse=_parse_phimoe,
    ignored=("auto_map", "input_jitter_noise"),
    stored=where_stacked(stored_plainly(MIXTRAL_NAMES)),
)
FAMILIES: Mapping[str, ModelFamily] = {
    **{name: family(traits) for name, traits in TRAITS.items()},
    "PhimoeForCausalLM": _PHIMOE,
    "PhiMoEForCausalLM": _PHIMOE,  # as Microsoft's files call it
    "Ernie4_5_MoeForCausalLM": ModelFamily(
        parse=_parse_ernie,
        ignored=("auto_map", "moe_capacity", "num_nextn_predict_layers"),
        stored=where_stacked(_stored_ernie),
        further_layers=True,
    ),
}
