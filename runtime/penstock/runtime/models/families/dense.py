"""Dense decoders that are Llama's but for defaults, names, the place of norms, the order of rotated channels,
and an MLP without a gate: Apertus, Arcee, ERNIE 4.5, EXAONE 4, GLM 4, Helium.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.runtime.models.config import (
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    Norms,
)
from penstock.runtime.models.families.family import (
    POST_NORMS,
    PRE_NORMS,
    ModelFamily,
    pairs_apart,
    tensor_name,
)
from penstock.runtime.models.families.reading import every, read_model, read_rope, read_sizes, read_windows
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.load_rules import ParamPath, Rows, Source, Stored, StoredAt
from penstock.runtime.models.rope import RopeConfig

_GLM4_NORMS: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_mlp_layernorm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """How one architecture differs from Llama, and what its config.json leaves out.

    kv_heads, head_dim: see `read_sizes`. theta, eps, tied: see `read_rope` and `read_model`. bias: the field
    that decides on biases, and its default; biased: on which of "qkv", "o" and "mlp" it decides. mlp_bias:
    whether a field of that name decides on those of the MLP. partial: see `read_rope`. interleaved: a
    checkpoint has the two channels of each rotated pair side by side. names: of the norms. fused: gate and up
    are rows of one tensor. plain: see `MLPConfig`. windows: those of the layers; None: none has one.
    rope: the rotation where the file says nothing about it; None: by theta. turns_slid: if some layers have
    windows, only these are rotated.
    """

    model_type: str
    kv_heads: int = 0
    head_dim: int | None = None
    theta: float = 10_000.0
    eps: float = 1e-5
    tied: bool = False
    bias: tuple[str, bool] | None = ("attention_bias", False)
    biased: tuple[str, ...] = ("qkv", "o")
    mlp_bias: bool = False
    partial: float | None = None
    interleaved: bool = False
    norms: Norms = "pre"
    names: Mapping[str, str] = field(default_factory=lambda: PRE_NORMS)
    fused: bool = False
    qk_norm: bool = False
    plain: Literal["relu2", "xielu"] | None = None
    rope: RopeConfig | None = None
    windows: Callable[[Fields, int], tuple[int | None, ...]] | None = None
    turns_slid: bool = False
    harmless: tuple[str, ...] = ()


def _exaone_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Give each layer but every fourth the window; none, if sliding_window is null."""
    if "sliding_window" in fields and fields.raw("sliding_window") is None:
        fields.ignore(("sliding_window_pattern",))
        fields.only("layer_types", ["full_attention"] * num_layers)
        return (None,) * num_layers
    pattern = fields.raw("sliding_window_pattern")
    if isinstance(pattern, str):
        if not set(pattern) <= {"L", "G"} or not pattern:
            fields.problem("sliding_window_pattern", f"must be a number, or letters L and G, not {pattern!r}")
            pattern = "G"
        letters = (pattern * num_layers)[: num_layers - 1] + "G"  # the last layer always sees everything
        default = tuple("sliding_attention" if letter == "L" else "full_attention" for letter in letters)
    else:
        default = every(fields.integer("sliding_window_pattern", 4), num_layers)
    return read_windows(fields, default, 4096)


TRAITS: Mapping[str, Traits] = {
    "ApertusForCausalLM": Traits(
        model_type="apertus",
        theta=12_000_000.0,
        qk_norm=True,
        names={
            "attention_norm": "attention_layernorm",
            "mlp_norm": "feedforward_layernorm",
            "alpha_p": "act_fn.alpha_p",
            "alpha_n": "act_fn.alpha_n",
        },
        plain="xielu",
        rope=RopeConfig(
            "llama3",
            theta=12_000_000.0,
            factor=8.0,
            original_max_positions=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        harmless=(r"\.mlp\.act_fn\.(beta|eps)$",),  # the same in all models
    ),
    "ArceeForCausalLM": Traits(model_type="arcee", mlp_bias=True, plain="relu2"),
    "Ernie4_5ForCausalLM": Traits(
        model_type="ernie4_5",
        kv_heads=2,
        head_dim=128,
        theta=500_000.0,
        tied=True,
        bias=("use_bias", False),
        biased=("qkv", "o", "mlp"),
        interleaved=True,
    ),
    "Exaone4ForCausalLM": Traits(
        model_type="exaone4",
        bias=None,
        norms="post",
        names=POST_NORMS,
        qk_norm=True,
        windows=_exaone_windows,
        turns_slid=True,
    ),
    "GlmForCausalLM": Traits(
        model_type="glm",
        kv_heads=2,
        head_dim=128,
        eps=1.5625e-7,
        bias=("attention_bias", True),
        biased=("qkv",),
        partial=0.5,
        interleaved=True,
        fused=True,
    ),
    "Glm4ForCausalLM": Traits(
        model_type="glm4",
        kv_heads=2,
        head_dim=128,
        eps=1.5625e-7,
        bias=("attention_bias", True),
        biased=("qkv",),
        partial=0.5,
        interleaved=True,
        norms="sandwich",
        names=_GLM4_NORMS,
        fused=True,
    ),
    "HeliumForCausalLM": Traits(
        model_type="helium",
        kv_heads=20,
        head_dim=128,
        theta=100_000.0,
        eps=1e-8,
        biased=("qkv",),
        mlp_bias=True,
        interleaved=True,
    ),
}


def _parse(architecture: str, fields: Fields, traits: Traits) -> ModelConfig:
    fields.only("model_type", traits.model_type)
    fields.only("hidden_act", traits.plain or "silu")
    if traits.qk_norm:
        fields.only("qk_norm", True)
    sizes = read_sizes(fields, head_dim=traits.head_dim, kv_heads=traits.kv_heads)
    rope = read_rope(fields, sizes.max_positions, theta=traits.theta, partial=traits.partial)
    if traits.rope is not None and not (fields.raw("rope_parameters") or fields.raw("rope_scaling")):
        rope = traits.rope
    biased = traits.biased if traits.bias is not None and fields.boolean(*traits.bias) else ()
    mlp = MLPConfig(
        intermediate_size=fields.integer("intermediate_size"),
        plain=traits.plain,
        bias="mlp" in biased or (traits.mlp_bias and fields.boolean("mlp_bias", False)),
    )
    num_layers = sizes.num_layers
    windows = (None,) * num_layers if traits.windows is None else traits.windows(fields, num_layers)
    # A file that gives all layers full attention but leaves sliding_window has none rotated.
    turns_all = not traits.turns_slid or ("sliding_window" in fields and fields.raw("sliding_window") is None)
    layers = [
        LayerConfig(
            attention=AttentionConfig(
                num_heads=sizes.num_heads,
                num_kv_heads=sizes.num_kv_heads,
                head_dim=sizes.head_dim,
                scale=sizes.head_dim**-0.5,
                rope=rope if turns_all or window else None,
                window=window,
                qkv_bias="qkv" in biased,
                o_bias="o" in biased,
                qk_norm="head" if traits.qk_norm else "none",
            ),
            mlp=mlp,
            norms=traits.norms,
        )
        for window in windows
    ]
    return read_model(architecture, fields, sizes, layers, eps=traits.eps, tied=traits.tied)


def _stored(config: ModelConfig, traits: Traits) -> StoredAt:
    """Name a tensor for each parameter, but for gate and up where these are `fused`."""

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        part = path[-2] if len(path) > 1 else ""
        order = apart(config, path) if traits.interleaved and part in ("q_proj", "k_proj") else None
        if traits.fused and part in ("gate_proj", "up_proj"):
            name = tensor_name((*path[:-2], "gate_up_proj", path[-1]), traits.names)
            begin = 0 if part == "gate_proj" else shape[0]
            return Stored((Source(name, (2 * shape[0], *shape[1:]), begin=begin),))
        return Stored((Source(tensor_name(path, traits.names), shape, order=order),))

    return stored


def apart(config: ModelConfig, path: ParamPath) -> Rows:
    """Return the rows of queries or keys, whose rotated pairs lie side by side in the checkpoint."""
    attention = config.layers[int(path[1])].attention
    assert isinstance(attention, AttentionConfig)
    heads = attention.num_heads if path[-2] == "q_proj" else attention.num_kv_heads
    return pairs_apart(heads, attention.head_dim, attention.rotary_dim)


FAMILIES: Mapping[str, ModelFamily] = {
    name: ModelFamily(
        parse=functools.partial(_parse, traits=traits),
        stored=functools.partial(_stored, traits=traits),
        harmless=traits.harmless,
    )
    for name, traits in TRAITS.items()
}
