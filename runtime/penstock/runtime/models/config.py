"""ModelConfig: what a model computes, parsed from a Hugging Face config.json without transformers.

A field that changes the computation is honoured or refused by name, never ignored. Both generations of the
format are read: `rope_parameters`, `dtype`, `layer_types` (transformers 5) and `rope_theta`, `rope_scaling`,
`torch_dtype` (transformers 4). Defaults are those of transformers' configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.runtime.errors import ConfigError, UnknownArchitecture
from penstock.runtime.models.hf_fields import REQUIRED, Fields
from penstock.runtime.models.hf_harmless_fields import HARMLESS_FIELDS
from penstock.runtime.models.rope import ROPE_KINDS, RopeConfig, yarn_attention_factor
from penstock.runtime.ops.cache_spec import CacheSpec, PagedKV

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family.

    sliding_windows: for each layer, how many latest tokens (itself included) a token attends to; None: all.
    dtype: that of the checkpoint, as config.json names it; None if it does not.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def cache(self) -> CacheSpec:
        """What the model's cache holds."""
        return CacheSpec(
            tuple(PagedKV(self.num_kv_heads, self.head_dim, window) for window in self.sliding_windows)
        )

    @staticmethod
    def from_dict(data: Mapping[str, object]) -> ModelConfig:
        """Parse a config.json mapping.

        Raises UnknownArchitecture, or ConfigError listing every field that cannot be served.
        """
        names = data.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise ConfigError(f"config.json: architectures must name exactly one architecture, not {names!r}")
        if names[0] not in FAMILIES:
            raise UnknownArchitecture(names[0], tuple(FAMILIES))
        return _parse(names[0], FAMILIES[names[0]], Fields(data))


@dataclass(frozen=True, slots=True)
class FamilyTraits:
    """How one architecture differs from the common decoder, and what its config.json leaves out.

    qkv_bias, o_bias: fixed by the architecture, or None if `attention_bias` decides. windows: "none"; "all":
    every layer has sliding_window; "layer_types": that field and use_sliding_window decide. head_dim: the
    default; None: hidden_size / num_attention_heads. ignored: further fields that transformers' own
    implementation of this architecture does not look at.
    """

    model_type: str
    qkv_bias: bool | None
    o_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool
    windows: Literal["none", "all", "layer_types"]
    head_dim: int | None = None
    kv_heads_default_to_heads: bool = False
    ignored: tuple[str, ...] = ()


FAMILIES: Mapping[str, FamilyTraits] = {
    "LlamaForCausalLM": FamilyTraits(
        "llama", None, None, None, False, "none", kv_heads_default_to_heads=True
    ),
    "MistralForCausalLM": FamilyTraits("mistral", False, False, False, False, "all"),
    "Qwen2ForCausalLM": FamilyTraits(
        "qwen2", True, False, False, False, "layer_types", ignored=("attention_bias",)
    ),
    "Qwen3ForCausalLM": FamilyTraits("qwen3", None, None, False, True, "layer_types", head_dim=128),
}


def _parse(architecture: str, traits: FamilyTraits, fields: Fields) -> ModelConfig:
    fields.only("model_type", traits.model_type)
    fields.only("hidden_act", "silu")
    fields.only("pretraining_tp", 1)
    fields.only("partial_rotary_factor", 1.0)
    fields.only("rope_interleaved", False)
    fields.only("is_encoder_decoder", False)
    hidden_size = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer(
        "num_key_value_heads",
        num_heads if traits.kv_heads_default_to_heads or "num_key_value_heads" in fields else REQUIRED,
    )
    if num_heads % num_kv_heads:
        fields.problem(
            "num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    head_dim = fields.optional_integer("head_dim") or traits.head_dim
    if head_dim is None:
        head_dim = hidden_size // num_heads
        if hidden_size % num_heads:
            fields.problem(
                "head_dim", f"is absent and hidden_size {hidden_size} is no multiple of {num_heads} heads"
            )
    if head_dim % 2 or head_dim < 4:
        fields.problem("head_dim", f"must be even and at least 4, not {head_dim}")
    max_positions = fields.integer("max_position_embeddings")
    attention_bias = traits.qkv_bias is None and fields.boolean("attention_bias", False)
    bos = fields.optional_integer("bos_token_id", minimum=0)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields, max_positions),
        sliding_windows=_windows(fields, traits, num_layers),
        qkv_bias=attention_bias if traits.qkv_bias is None else traits.qkv_bias,
        o_bias=attention_bias if traits.o_bias is None else traits.o_bias,
        mlp_bias=fields.boolean("mlp_bias", False) if traits.mlp_bias is None else traits.mlp_bias,
        qk_norm=traits.qk_norm,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        dtype=_dtype(fields),
        bos_token_id=bos,
        eos_token_ids=fields.token_ids("eos_token_id"),
    )
    fields.refuse_unread(HARMLESS_FIELDS.union(traits.ignored))
    fields.finish()
    return config


def _dtype(fields: Fields) -> str | None:
    new, old = fields.raw("dtype"), fields.raw("torch_dtype")
    name = "dtype" if new is not None else "torch_dtype"
    value = new if new is not None else old
    if value is None:
        return None
    value = str(value).removeprefix("torch.")
    if value not in DTYPES:
        fields.problem(name, f"{value!r} is not supported; supported: {', '.join(DTYPES)}")
    return value


def _windows(fields: Fields, traits: FamilyTraits, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer."""
    window: int | None = None
    first = 0
    if traits.windows == "all":
        window = fields.optional_integer("sliding_window")
        if window is None and "sliding_window" not in fields:
            window = 4096
    elif traits.windows == "layer_types":
        use = fields.boolean("use_sliding_window", False)
        named = fields.optional_integer("sliding_window")
        if use:
            window = 4096 if named is None and "sliding_window" not in fields else named
        first = fields.integer("max_window_layers", 28, minimum=0)
    default = tuple(window if layer >= first else None for layer in range(num_layers))
    types = fields.raw("layer_types")
    if types is None:
        return default
    if not isinstance(types, list) or len(types) != num_layers:
        fields.problem(
            "layer_types", f"must list one type for each of the {num_layers} layers, not {types!r}"
        )
        return default
    unknown = sorted({str(t) for t in types} - {"full_attention", "sliding_attention"})
    if unknown:
        fields.problem("layer_types", f"{', '.join(unknown)} is not supported")
    if window is None and "sliding_attention" in types:
        fields.problem("layer_types", "names sliding_attention, but no sliding window is switched on")
    listed = tuple(window if t == "sliding_attention" else None for t in types)
    if traits.windows == "all" and listed != default:
        fields.problem("layer_types", "differs from the one attention type this architecture has")
    return listed


def _rope(fields: Fields, max_positions: int) -> RopeConfig:
    """RoPE from rope_parameters, or from rope_scaling with the top-level rope_theta."""
    theta = fields.number("rope_theta", 10_000.0)
    original = fields.optional_integer("original_max_position_embeddings")
    parsed: list[RopeConfig] = []
    for name in ("rope_scaling", "rope_parameters"):
        data = fields.mapping(name)
        if data:
            inner = Fields(data, f"{name}.", fields.problems)
            parsed.append(_rope_variant(inner, theta, original, max_positions))
            inner.refuse_unread()
    if len(parsed) == 2 and parsed[0] != parsed[1]:
        fields.problem("rope_scaling", "contradicts rope_parameters")
    rope = parsed[0] if parsed else RopeConfig(theta=theta)
    if rope.theta <= 1:
        fields.problem("rope_theta", f"must be above 1, not {rope.theta:g}")
    return rope


def _rope_variant(fields: Fields, theta: float, original: int | None, max_positions: int) -> RopeConfig:
    old_kind, new_kind = fields.raw("type"), fields.raw("rope_type")
    kind = new_kind or old_kind or "default"
    fields.only("partial_rotary_factor", 1.0)
    theta = fields.number("rope_theta", theta)
    if kind not in ROPE_KINDS:
        name = "rope_type" if new_kind else "type"
        fields.problem(name, f"{kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        return RopeConfig(theta=theta)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind, theta, fields.number("factor"), max_positions if kind == "dynamic" else 0)
    trained = fields.integer("original_max_position_embeddings", max_positions)
    trained = original or trained  # the top-level field wins, as in transformers
    if kind == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if high <= low:
            fields.problem("high_freq_factor", f"must be above low_freq_factor {low:g}, not {high:g}")
        return RopeConfig(
            kind, theta, fields.number("factor"), trained, low_freq_factor=low, high_freq_factor=high
        )
    factor = fields.number("factor", max_positions / trained)
    mscale, mscale_all_dim = fields.optional_number("mscale"), fields.optional_number("mscale_all_dim")
    return RopeConfig(
        kind,
        theta,
        factor,
        trained,
        attention_factor=fields.optional_number("attention_factor")
        or yarn_attention_factor(factor, mscale, mscale_all_dim),
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        truncate=fields.boolean("truncate", True),
    )
