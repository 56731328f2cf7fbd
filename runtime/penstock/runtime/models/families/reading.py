"""What the config.json of most families have in common, read field by field.

A field that changes the computation is honoured or refused by name, never ignored. Both generations of the
format are read: `rope_parameters`, `dtype`, `layer_types` (transformers 5) and `rope_theta`, `rope_scaling`,
`torch_dtype` (transformers 4). Defaults are those of transformers' configuration classes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.runtime.models.config import DTYPES, LayerConfig, ModelConfig
from penstock.runtime.models.families.rotation import check_rotation, read_longrope, read_sections
from penstock.runtime.models.hf_fields import REQUIRED, Fields
from penstock.runtime.models.hf_harmless_fields import HARMLESS_FIELDS
from penstock.runtime.models.rope import ROPE_KINDS, RopeConfig, yarn_attention_factor


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that every decoder has."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int


def read_sizes(
    fields: Fields,
    *,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    max_positions: int | None = None,
) -> Sizes:
    """Read the sizes of heads. `head_dim`: the default where it is absent; None: hidden_size /
    num_attention_heads, which null always means. `kv_heads`: the default where num_key_value_heads is absent;
    0: as many as heads; None: it is required. Null always means as many as heads. `max_positions`: the
    default of max_position_embeddings; None: it is required.
    """
    hidden_size = fields.integer("hidden_size")
    num_layers = fields.num_layers()
    num_heads = fields.integer("num_attention_heads")
    absent = REQUIRED if kv_heads is None else kv_heads or num_heads
    num_kv_heads = fields.integer(
        "num_key_value_heads", num_heads if "num_key_value_heads" in fields else absent
    )
    if num_heads % num_kv_heads:
        fields.problem(
            "num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    size = fields.optional_integer("head_dim")
    if size is None and "head_dim" not in fields:
        size = head_dim
    if size is None:
        size = hidden_size // num_heads
        if hidden_size % num_heads:
            fields.problem(
                "head_dim", f"is absent and hidden_size {hidden_size} is no multiple of {num_heads} heads"
            )
    if size % 2 or size < 4:
        fields.problem("head_dim", f"must be even and at least 4, not {size}")
        size = 4
    max_positions = fields.integer("max_position_embeddings", max_positions or REQUIRED)
    return Sizes(hidden_size, num_layers, num_heads, num_kv_heads, size, max_positions)


def read_model(
    architecture: str,
    fields: Fields,
    sizes: Sizes,
    layers: Sequence[LayerConfig],
    *,
    eps: float = 1e-6,
    eps_name: str = "rms_norm_eps",
    tied: bool = False,
    **others: Any,
) -> ModelConfig:
    """Read the model of these layers, with what is read last: vocabulary, head, dtype and special tokens.
    This ends the reading: a field that nobody has read and that is not harmless is a problem.

    eps, tied: the family's defaults of rms_norm_eps, or of the field that it calls `eps_name`, and of
    tie_word_embeddings. others: further fields of `ModelConfig`.

    Raises ConfigError with all problems.
    """
    fields.only("is_encoder_decoder", False)
    for attention in dict.fromkeys(layer.attention for layer in layers):
        check_rotation(fields, attention)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=sizes.hidden_size,
        layers=tuple(layers),
        max_position_embeddings=sizes.max_positions,
        rms_norm_eps=fields.number(eps_name, eps),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", tied),
        dtype=read_dtype(fields),
        bos_token_id=fields.optional_integer("bos_token_id", minimum=0),
        eos_token_ids=fields.token_ids("eos_token_id"),
        **others,
    )
    fields.refuse_unread(HARMLESS_FIELDS)
    fields.finish()
    return config


def read_predictor(
    fields: Fields,
    layer: LayerConfig,
    *,
    names: Sequence[str] = ("num_nextn_predict_layers", "num_mtp_layers"),
    default: int = 0,
) -> LayerConfig | None:
    """Read whether a checkpoint has exactly one layer that predicts the token after the next one, which is
    like the given one; None if not. names: of the fields that say how many it has; default: where none does.
    """
    found = [fields.optional_integer(name, minimum=0) for name in names]
    counts = {count for count in found if count is not None} or {default}
    if len(counts) > 1:
        fields.problem(names[1], f"contradicts {names[0]}")
    return layer if counts == {1} else None


def read_dtype(fields: Fields) -> str | None:
    """Read the checkpoint's dtype."""
    new, old = fields.raw("dtype"), fields.raw("torch_dtype")
    name = "dtype" if new is not None else "torch_dtype"
    value = new if new is not None else old
    if value is None:
        return None
    value = str(value).removeprefix("torch.")
    if value not in DTYPES:
        fields.problem(name, f"{value!r} is not supported; supported: {', '.join(DTYPES)}")
        return None
    return value


def read_layer_types(
    fields: Fields, default: Sequence[str], supported: Collection[str] | None = None
) -> tuple[str, ...]:
    """Read the kind of attention of each layer: `layer_types`, or the default. `supported`: None for those of
    the default and "full_attention".
    """
    types = fields.raw("layer_types")
    if types is None:
        return tuple(default)
    if not isinstance(types, list) or len(types) != len(default):
        fields.problem(
            "layer_types", f"must list one type for each of the {len(default)} layers, not {types!r}"
        )
        return tuple(default)
    known = {*default, "full_attention"} if supported is None else supported
    unknown = sorted({str(t) for t in types} - set(known))
    if unknown:
        fields.problem("layer_types", f"{', '.join(unknown)} is not supported")
        return tuple(default)
    return tuple(types)


def read_windows(fields: Fields, default_types: Sequence[str], default: int | None) -> tuple[int | None, ...]:
    """Read the sliding window of each layer, where `layer_types` decides which layers have one.
    default_types: of the layers, where the field is absent; default: of sliding_window.
    """
    types = read_layer_types(fields, default_types, ("full_attention", "sliding_attention"))
    window = fields.optional_integer("sliding_window")
    if "sliding_window" not in fields:
        window = default
    if window is None and "sliding_attention" in types:
        fields.problem("sliding_window", "is null, but layers have sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def every(interval: int, num_layers: int) -> tuple[str, ...]:
    """Return layer_types in which each `interval`-th layer has full attention, and the others slide."""
    kinds = ("full_attention", "sliding_attention")
    return tuple(kinds[bool((layer + 1) % interval)] for layer in range(num_layers))


def read_ropes(
    fields: Fields, max_positions: int, bases: Mapping[str, tuple[str, float]]
) -> Mapping[str, RopeConfig]:
    """Read RoPE by type of attention. rope_parameters has an object for each; in transformers 4, rope_scaling
    is that of full_attention, and other types have none. bases: from each type to the field of transformers 4
    that has its rope_theta, and the default.
    """
    parameters = Fields(fields.mapping("rope_parameters"), "rope_parameters.", fields.problems)
    scaling = fields.mapping("rope_scaling")
    ropes: dict[str, RopeConfig] = {}
    for kind, (name, default) in bases.items():
        theta = fields.number(name, default)
        objects = {f"rope_parameters.{kind}": parameters.mapping(kind)}
        if kind == "full_attention":
            objects["rope_scaling"] = scaling
        ropes[kind] = _one_rope(fields, objects, theta, None, max_positions)
    parameters.refuse_unread()
    return ropes


def read_rope(
    fields: Fields,
    max_positions: int,
    *,
    theta: float = 10_000.0,
    partial: float | None = None,
    original: int | None = None,
    others: Collection[str] = (),
    mrope: RopeConfig | None = None,
) -> RopeConfig:
    """Read RoPE from rope_parameters, or from rope_scaling with the top-level rope_theta.

    theta: the family's default of rope_theta. partial: its default of partial_rotary_factor; None: it rotates
    all channels and knows no such field. original: its default of original_max_position_embeddings, which
    wins over that of the objects. others: further fields of the objects, which the family reads. mrope: the
    family's M-RoPE, whose sections are the default; None: it has none.
    """
    theta = fields.number("rope_theta", theta)
    original = fields.optional_integer("original_max_position_embeddings") or original
    share = _partial(fields, 1.0 if partial is None else partial, known=partial is not None)
    objects = {name: fields.mapping(name) for name in ("rope_scaling", "rope_parameters")}
    known = partial is not None
    return _one_rope(
        fields, objects, theta, original, max_positions, share, partial=known, others=others, mrope=mrope
    )


def _one_rope(
    fields: Fields,
    objects: Mapping[str, Mapping[str, object]],
    theta: float,
    original: int | None,
    max_positions: int,
    share: float = 1.0,
    *,
    partial: bool = False,
    others: Collection[str] = (),
    mrope: RopeConfig | None = None,
) -> RopeConfig:
    """Return what all objects say that are not empty, from their names to them."""
    parsed: list[RopeConfig] = []
    for name, data in objects.items():
        if data:
            inner = Fields(data, f"{name}.", fields.problems)
            variant = read_rope_variant(inner, theta, original, max_positions, share, partial=partial)
            parsed.append(variant if mrope is None else read_sections(inner, variant, mrope))
            inner.ignore(others)
            inner.refuse_unread()
    if len(parsed) == 2 and parsed[0] != parsed[1]:
        fields.problem("rope_scaling", "contradicts rope_parameters")
    plain = RopeConfig(theta=theta, partial_rotary_factor=share)
    if mrope is not None:
        plain = replace(plain, sections=mrope.sections, interleaved=mrope.interleaved)
    rope = parsed[0] if parsed else plain
    if rope.theta <= 1:
        fields.problem("rope_theta", f"must be above 1, not {rope.theta:g}")
    return rope


def _partial(fields: Fields, default: float, *, known: bool) -> float:
    if not known:
        fields.only("partial_rotary_factor", 1.0)
        return 1.0
    share = fields.number("partial_rotary_factor", default)
    if share > 1:
        fields.problem("partial_rotary_factor", f"must be at most 1, not {share:g}")
        return 1.0
    return share


def read_rope_variant(
    fields: Fields,
    theta: float,
    original: int | None,
    max_positions: int,
    share: float = 1.0,
    *,
    partial: bool = False,
) -> RopeConfig:
    """Read one object of RoPE's parameters. `share` is the default of its partial_rotary_factor, which must
    be 1 unless `partial`.
    """
    old_kind, new_kind = fields.raw("type"), fields.raw("rope_type")
    kind = new_kind or old_kind or "default"
    kind = "longrope" if kind == "su" else "default" if kind == "mrope" else kind  # names in older files
    share = _partial(fields, share, known=partial or kind == "proportional")
    theta = fields.number("rope_theta", theta)
    if kind not in ROPE_KINDS:
        name = "rope_type" if new_kind else "type"
        fields.problem(name, f"{kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        return RopeConfig(theta=theta)
    values: Mapping[str, Any] = {"theta": theta, "partial_rotary_factor": share}
    if kind == "default":
        return RopeConfig(**values)
    if kind == "proportional":
        return RopeConfig(kind, factor=fields.number("factor", 1.0), **values)
    if kind in ("linear", "dynamic"):
        trained = max_positions if kind == "dynamic" else 0
        return RopeConfig(kind, factor=fields.number("factor"), original_max_positions=trained, **values)
    if kind == "longrope":
        return read_longrope(fields, original, max_positions, values)
    trained = fields.integer("original_max_position_embeddings", max_positions)
    trained = original or trained  # the top-level field wins, as in transformers
    if kind == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if high < low:
            fields.problem("high_freq_factor", f"must not be below low_freq_factor {low:g}, but is {high:g}")
        return RopeConfig(
            kind,
            factor=fields.number("factor"),
            original_max_positions=trained,
            low_freq_factor=low,
            high_freq_factor=high,
            **values,
        )
    factor = fields.number("factor", max_positions / trained)
    mscale, mscale_all_dim = fields.optional_number("mscale"), fields.optional_number("mscale_all_dim")
    return RopeConfig(
        kind,
        factor=factor,
        original_max_positions=trained,
        attention_factor=fields.optional_number("attention_factor")
        or yarn_attention_factor(factor, mscale, mscale_all_dim),
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        truncate=fields.boolean("truncate", True),
        **values,
    )
