"""Qwen3-Next and Qwen3.5: three layers of four have a gated delta net in the place of attention, and the
attention of the others has a gate for its outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.runtime.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    RouterConfig,
)
from penstock.runtime.models.configs.recurrent import DeltaNetConfig
from penstock.runtime.models.families.family import PRE_NORMS, ModelFamily, tensor_name
from penstock.runtime.models.families.mixture_fields import (
    read_experts_and_choices,
    read_layer_numbers,
)
from penstock.runtime.models.families.reading import (
    Sizes,
    read_layer_types,
    read_model,
    read_predictor,
    read_rope,
    read_sizes,
)
from penstock.runtime.models.families.stacked_experts import where_stacked
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.load_rules import ParamPath, Rows, Source, Stored, StoredAt
from penstock.runtime.models.rope import RopeConfig

HARMLESS = (r"^mtp\.",)
"""Layers that predict further tokens, which are read only if they are to guess."""
PREDICTOR: Mapping[str, str] = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "block": "mtp.layers.0",
    "norm": "mtp.norm",
}
"""See `ModelFamily.predictor`."""
IGNORED = ("full_attention_interval", "intermediate_size", "mamba_ssm_dtype")
"""Fields that are read where they mean something: without layer_types, or where layers have MLPs. And what is
said of the state's dtype, which is float32 everywhere."""
_NAMES: Mapping[str, str] = {**PRE_NORMS, "router": "gate", "q_gate": "q_proj"}
_NAMES_OF_NET: Mapping[str, str] = {**_NAMES, "self_attn": "linear_attn", "gated_norm": "norm.weight"}
_KINDS = ("linear_attention", "full_attention")
_MROPE = RopeConfig(sections=(11, 11, 10), interleaved=True)
"""Qwen3.5's three positions, which differ for tokens of images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """How one architecture differs from the others, and what its config.json leaves out.

    kv_heads: the default. experts: how many there are and how many a token has, by default; None: layers have
    MLPs. dense_layers: fields can give layers an MLP in the place of experts, and say whether the weights of
    a token's experts are divided by their sum. interleaved: a checkpoint has one tensor of queries, keys,
    values and gates, and one of what decays are made of, in which those of a key head lie side by side.
    mrope: see `read_rope`.
    """

    model_type: str
    kv_heads: int
    experts: tuple[int, int] | None = None
    dense_layers: bool = False
    interleaved: bool = False
    mrope: RopeConfig | None = _MROPE


TRAITS: Mapping[str, Traits] = {
    "Qwen3NextForCausalLM": Traits(
        model_type="qwen3_next",
        kv_heads=2,
        experts=(512, 10),
        dense_layers=True,
        interleaved=True,
        mrope=None,
    ),
    "Qwen3_5ForCausalLM": Traits(model_type="qwen3_5_text", kv_heads=4),
    "Qwen3_5MoeForCausalLM": Traits(model_type="qwen3_5_moe_text", kv_heads=2, experts=(256, 8)),
}


def parse(architecture: str, fields: Fields, traits: Traits) -> ModelConfig:
    """Parse the decoder that the fields describe. Raises ConfigError with all problems."""
    fields.only("model_type", traits.model_type)
    fields.only("hidden_act", "silu")
    fields.only("attn_output_gate", True)
    fields.only("output_gate_type", "silu", "swish")
    sizes = read_sizes(fields, head_dim=256, kv_heads=traits.kv_heads)
    bias = fields.boolean("attention_bias", False)
    attention = AttentionConfig(
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        scale=sizes.head_dim**-0.5,
        rope=read_rope(fields, sizes.max_positions, partial=0.25, mrope=traits.mrope),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        output_gate=True,
    )
    net = _read_net(fields)
    mlps = _read_mlps(fields, sizes.num_layers, traits)
    layers = [
        LayerConfig(attention=attention if kind == "full_attention" else net, mlp=mlp)
        for kind, mlp in zip(_read_kinds(fields, sizes), mlps, strict=True)
    ]
    predictor = read_predictor(
        fields,
        LayerConfig(attention=attention, mlp=mlps[-1]),
        names=("num_nextn_predict_layers", "mtp_num_hidden_layers"),
        default=1,
    )
    if fields.boolean("mtp_use_dedicated_embeddings", False) or len(set(mlps)) > 1:
        predictor = None  # another table of embeddings, or nobody says which MLP the layer has
    return read_model(architecture, fields, sizes, layers, norm_offset=1.0, predictor=predictor)


def _read_net(fields: Fields) -> DeltaNetConfig:
    keys, values = (
        fields.integer("linear_num_key_heads", 16),
        fields.integer("linear_num_value_heads", 32),
    )
    if values % keys:
        fields.problem("linear_num_value_heads", f"must be a multiple of the {keys} key heads, not {values}")
        values = keys
    return DeltaNetConfig(
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        num_taps=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
    )


def _read_kinds(fields: Fields, sizes: Sizes) -> tuple[str, ...]:
    """Read the kind of each layer: `layer_types`, or full attention in each full_attention_interval-th
    layer.
    """
    interval = fields.integer("full_attention_interval", 4)
    default = [_KINDS[(layer + 1) % interval == 0] for layer in range(sizes.num_layers)]
    return read_layer_types(fields, default, _KINDS)


def _read_mlps(fields: Fields, num_layers: int, traits: Traits) -> tuple[MLPConfig | ExpertsConfig, ...]:
    """Read what each layer has behind attention."""
    if traits.experts is None:
        return (MLPConfig(intermediate_size=fields.integer("intermediate_size")),) * num_layers
    count, chosen = read_experts_and_choices(fields, ("num_experts", "num_local_experts"), *traits.experts)
    experts = ExpertsConfig(
        num_experts=count,
        per_token=chosen,
        intermediate_size=fields.integer("moe_intermediate_size", 512),
        router=RouterConfig(normalize=not traits.dense_layers or fields.boolean("norm_topk_prob", True)),
        shared_size=fields.integer("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
    if not traits.dense_layers:
        return (experts,) * num_layers
    dense = MLPConfig(intermediate_size=fields.integer("intermediate_size", 5632))
    listed = read_layer_numbers(fields, "mlp_only_layers", num_layers) or ()
    step = fields.integer("decoder_sparse_step", 1)
    is_dense = [layer in listed or (layer + 1) % step != 0 for layer in range(num_layers)]
    return tuple(dense if alone else experts for alone in is_dense)


def stored(config: ModelConfig, *, interleaved: bool = False) -> StoredAt:
    """Tell where checkpoints have each parameter. interleaved: see `Traits`."""

    def at(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        if path[0] != "layers" or path[2] != "self_attn":
            return Stored((Source(tensor_name(path, _NAMES), shape),))
        attention, part = config.layers[int(path[1])].attention, str(path[3])
        if isinstance(attention, AttentionConfig):
            name = tensor_name(path, _NAMES)
            if part not in ("q_proj", "q_gate"):
                return Stored((Source(name, shape),))
            order = _of_each_head(attention.head_dim, attention.num_heads, part == "q_gate")
            return Stored((Source(name, (2 * shape[0], *shape[1:]), order=order),))
        assert isinstance(attention, DeltaNetConfig)
        if interleaved and part in _INTERLEAVED:
            tensor, rows = _INTERLEAVED[part]
            total, order = rows(attention, part)
            name = tensor_name((*path[:3], tensor, *path[4:]), _NAMES_OF_NET)
            return Stored((Source(name, (total, *shape[1:]), order=order),))
        return Stored((Source(tensor_name(path, _NAMES_OF_NET), shape),))

    return at


def _of_each_head(size: int, heads: int, is_gate: bool) -> Rows:
    """Return the rows of a head's queries, or of its gates, which lie behind them."""
    begin = size if is_gate else 0
    return tuple(2 * size * head + begin + row for head in range(heads) for row in range(size))


def _qkvz(net: DeltaNetConfig, part: str) -> tuple[int, Rows]:
    """Find the rows of a tensor in which each key head has its query, its key, its values and their gates;
    and how many there are.
    """
    values = net.value_channels // net.num_key_heads
    one = 2 * net.key_dim + 2 * values
    spans = [range(net.key_dim), range(net.key_dim, 2 * net.key_dim)]
    spans += [range(2 * net.key_dim, one - values)]
    if part == "in_proj_z":
        spans = [range(one - values, one)]
    order = tuple(one * head + row for span in spans for head in range(net.num_key_heads) for row in span)
    return one * net.num_key_heads, order


def _ba(net: DeltaNetConfig, part: str) -> tuple[int, Rows]:
    """Return the same for a tensor in which each key head has the two numbers of its value heads."""
    own = net.num_value_heads // net.num_key_heads
    begin = own if part == "in_proj_a" else 0
    order = tuple(2 * own * head + begin + row for head in range(net.num_key_heads) for row in range(own))
    return 2 * net.num_value_heads, order


_INTERLEAVED: Mapping[str, tuple[str, Callable[[DeltaNetConfig, str], tuple[int, Rows]]]] = {
    "in_proj_qkv": ("in_proj_qkvz", _qkvz),
    "in_proj_z": ("in_proj_qkvz", _qkvz),
    "in_proj_b": ("in_proj_ba", _ba),
    "in_proj_a": ("in_proj_ba", _ba),
}
"""The tensor in which a part is, and how to find its rows there."""


FAMILIES: Mapping[str, ModelFamily] = {
    name: ModelFamily(
        parse=functools.partial(parse, traits=traits),
        stored=where_stacked(functools.partial(stored, interleaved=traits.interleaved)),
        harmless=HARMLESS,
        predictor=PREDICTOR,
        ignored=IGNORED,
    )
    for name, traits in TRAITS.items()
}
