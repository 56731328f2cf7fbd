"""Gemma 4: Gemma 3 with heads of another size in layers of full attention, values that are normalised or are
the keys, last layers that share the KV of earlier ones, embeddings for each layer, and experts beside MLPs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.runtime.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    MLPAndExpertsConfig,
    MLPConfig,
    ModelConfig,
    PerLayerConfig,
    RouterConfig,
)
from penstock.runtime.models.families.family import SANDWICH_NORMS, ModelFamily, tensor_name
from penstock.runtime.models.families.reading import (
    Sizes,
    every,
    read_model,
    read_ropes,
    read_sizes,
    read_windows,
)
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.load_rules import ParamPath, Source, Stored, StoredAt
from penstock.runtime.models.rope import RopeConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES = {
    _FULL: RopeConfig("proportional", theta=1e6, partial_rotary_factor=0.25),
    _SLIDING: RopeConfig(theta=1e4),
}
"""RoPE where config.json says nothing."""


def _parse(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "gemma4_text")
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    fields.only("use_bidirectional_attention", "vision")
    sizes = read_sizes(fields, head_dim=256, kv_heads=4)
    windows = list(read_windows(fields, every(6, sizes.num_layers), 512))
    windows[-1] = None  # the last layer has full attention whatever layer_types says
    attentions = _attentions(fields, sizes, windows)
    owners = _owners(fields, windows)
    for layer, owner in enumerate(owners):
        ours, theirs = attentions[layer], attentions[layer if owner is None else owner]
        if (ours.head_dim, ours.num_kv_heads) != (theirs.head_dim, theirs.num_kv_heads):
            fields.problem(
                "per_layer_config", f"layer {layer} shares KV of layer {owner}, whose heads are others"
            )
    wide = fields.boolean("use_double_wide_mlp", False)
    experts = _experts(fields)
    inner = fields.integer("intermediate_size")
    layers = [
        LayerConfig(
            attention=attention,
            mlp=_mlp(2 * inner if wide and owner is not None else inner, experts),
            norms="sandwich",
            has_scalar=True,
            shares_kv_of=owner,
        )
        for attention, owner in zip(attentions, owners, strict=True)
    ]
    size = fields.integer("hidden_size_per_layer_input", 256, minimum=0)
    rows = fields.integer("vocab_size_per_layer_input", 262_144)
    return read_model(
        architecture,
        fields,
        sizes,
        layers,
        tied=True,
        embedding_scale=sizes.hidden_size**0.5,
        logits_softcap=fields.optional_number("final_logit_softcapping"),
        per_layer=PerLayerConfig(size=size, vocab_size=rows, activation="gelu_tanh") if size else None,
    )


def _experts(fields: Fields) -> ExpertsConfig | None:
    """Read the experts that each layer has beside its MLP, if it has any."""
    if not fields.boolean("enable_moe_block", False):
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            fields.raw(name)  # without meaning
        return None
    count, chosen = fields.integer("num_experts"), fields.integer("top_k_experts")
    if chosen > count:
        fields.problem("top_k_experts", f"{chosen} is more than the {count} experts")
        chosen = count
    return ExpertsConfig(
        num_experts=count,
        per_token=chosen,
        intermediate_size=fields.integer("moe_intermediate_size"),
        router=RouterConfig(expert_scale=True),
        activation="gelu_tanh",
    )


def _mlp(inner: int, experts: ExpertsConfig | None) -> MLPConfig | MLPAndExpertsConfig:
    mlp = MLPConfig(intermediate_size=inner, activation="gelu_tanh")
    return mlp if experts is None else MLPAndExpertsConfig(mlp=mlp, experts=experts)


def _attentions(fields: Fields, sizes: Sizes, windows: Sequence[int | None]) -> list[AttentionConfig]:
    """Read the attention of each layer."""
    same = fields.boolean("attention_k_eq_v", False)
    bias = fields.boolean("attention_bias", False)
    ropes = _ropes(fields, sizes)
    return [
        AttentionConfig(
            num_heads=sizes.num_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=1.0,
            rope=ropes[_FULL if window is None else _SLIDING],
            window=window,
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head",
            v_norm=True,
            values_are_keys=same and window is None,
        )
        for window, (head_dim, kv_heads) in zip(
            windows, _heads(fields, sizes, windows, same=same), strict=True
        )
    ]


def _ropes(fields: Fields, sizes: Sizes) -> Mapping[str, RopeConfig]:
    if not fields.mapping("rope_parameters"):
        return _ROPES
    return read_ropes(
        fields, sizes.max_positions, {_FULL: ("rope_theta", 1e6), _SLIDING: ("rope_theta", 1e4)}
    )


def _heads(
    fields: Fields, sizes: Sizes, windows: Sequence[int | None], *, same: bool
) -> list[tuple[int, int]]:
    """Return (head_dim, KV heads) of each layer: per_layer_config says it for those that differ, in older
    files global_head_dim and num_global_key_value_heads for all with full attention.
    """
    overrides = Fields(fields.mapping("per_layer_config"), "per_layer_config.", fields.problems)
    head_dim = fields.integer("global_head_dim", 512)
    kv_heads = fields.optional_integer("num_global_key_value_heads")
    found: list[tuple[int, int]] = []
    for layer, window in enumerate(windows):
        ours = sizes.head_dim, sizes.num_kv_heads
        if "per_layer_config" in fields:
            name = f"per_layer_config.{layer}."
            own = Fields(overrides.mapping(str(layer)), name, fields.problems)
            ours = own.integer("head_dim", ours[0]), own.integer("num_key_value_heads", ours[1])
            own.refuse_unread()
        elif window is None:
            ours = head_dim, kv_heads if kv_heads is not None and same else ours[1]
        if ours[0] % 2 or sizes.num_heads % ours[1]:
            fields.problem("per_layer_config", f"{ours} do not fit {sizes.num_heads} heads in layer {layer}")
        found.append(ours)
    overrides.refuse_unread()
    return found


def _owners(fields: Fields, windows: Sequence[int | None]) -> list[int | None]:
    """Return for each of the last `num_kv_shared_layers` the last layer before them of its kind, whose KV it
    shares; None for the others.
    """
    first = len(windows) - fields.integer("num_kv_shared_layers", 0, minimum=0)
    owners = {window is None: layer for layer, window in enumerate(windows[: max(first, 0)])}
    if first < 0 or not {window is None for window in windows[first:]} <= set(owners):
        fields.problem("num_kv_shared_layers", "leaves a kind of attention without a layer that has KV")
        return [None] * len(windows)
    return [None] * first + [owners[window is None] for window in windows[first:]]


_BESIDE_EXPERTS: Mapping[str, str] = {
    "mlp_end_norm": "post_feedforward_layernorm_1",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_end_norm": "post_feedforward_layernorm_2",
}


def _stored(config: ModelConfig) -> StoredAt:
    mlp = config.layers[0].mlp
    experts = mlp.experts if isinstance(mlp, MLPAndExpertsConfig) else None

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        match path:
            case ("layers", layer, "mlp", "experts", int(expert), part, "weight") if experts is not None:
                stem = f"model.layers.{layer}.experts"
                inner, hidden = experts.intermediate_size, config.hidden_size
                if part == "down_proj":
                    whole = (experts.num_experts, hidden, inner)
                    return Stored((Source(f"{stem}.down_proj", whole, at=(expert,)),))
                whole = (experts.num_experts, 2 * inner, hidden)
                begin = inner if part == "up_proj" else 0
                return Stored((Source(f"{stem}.gate_up_proj", whole, at=(expert,), begin=begin),))
            case ("layers", layer, "mlp", "router", "weight"):
                return Stored((Source(f"model.layers.{layer}.router.proj.weight", shape),))
            case ("layers", layer, "mlp", "router", "expert_scale"):
                return Stored((Source(f"model.layers.{layer}.router.per_expert_scale", shape),))
            case ("layers", layer, "mlp", "router_norm", "weight"):
                return Stored((Source(f"model.layers.{layer}.router.scale", shape),))
            case ("layers", layer, "mlp", str(norm), "weight") if norm in _BESIDE_EXPERTS:
                return Stored((Source(f"model.layers.{layer}.{_BESIDE_EXPERTS[norm]}.weight", shape),))
            case ("layers", layer, "mlp", "mlp", *rest):
                path = ("layers", layer, "mlp", *rest)
            case _:
                path = tuple(part for part in path if part != "per_layer")
        return Stored((Source(tensor_name(path, SANDWICH_NORMS), shape),))

    return stored


FAMILIES: Mapping[str, ModelFamily] = {
    "Gemma4ForCausalLM": ModelFamily(
        parse=_parse,
        stored=_stored,
        ignored=("hidden_act",),
        harmless=(r"\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight$",),
    )
}
