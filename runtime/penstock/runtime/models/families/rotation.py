"""LongRoPE's and M-RoPE's fields, and what must be so of any RoPE that a config.json describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.runtime.models.config import AttentionConfig, LatentConfig
from penstock.runtime.models.configs.recurrent import RecurrentConfig
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.rope import RopeConfig, longrope_attention_factor


def read_longrope(
    fields: Fields, original: int | None, max_positions: int, values: Mapping[str, Any]
) -> RopeConfig:
    """Read LongRoPE. `original`: original_max_position_embeddings of config.json, which wins; `values`: of
    all kinds.
    """
    inner = fields.optional_integer("original_max_position_embeddings", minimum=2)
    trained = original or inner or max_positions
    if original is None and inner is None:
        fields.problem("original_max_position_embeddings", "is required")
    factor = fields.optional_number("factor") or max_positions / trained
    return RopeConfig(
        "longrope",
        original_max_positions=trained,
        attention_factor=fields.optional_number("attention_factor")
        or longrope_attention_factor(factor, max(trained, 2)),
        short_factors=_factors(fields, "short_factor"),
        long_factors=_factors(fields, "long_factor"),
        **values,
    )


def _factors(fields: Fields, name: str) -> tuple[float, ...]:
    """Read one factor above zero for each pair of channels that is rotated."""
    listed = fields.raw(name)
    values = listed if isinstance(listed, list) else []
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if not values or len(numbers) < len(values) or not all(0 < v < float("inf") for v in numbers):
        fields.problem(name, "must be a list of finite numbers above 0")
        return (1.0,)
    return tuple(float(v) for v in numbers)


def read_sections(fields: Fields, rope: RopeConfig, family: RopeConfig) -> RopeConfig:
    """Read the RoPE with M-RoPE's sections. `family`: whose sections are the default, and which says whether
    they are interleaved.
    """
    if rope.kind not in ("default", "linear", "yarn", "llama3"):
        fields.problem("rope_type", f"{rope.kind!r} is not supported with mrope_section")
    if fields.boolean("mrope_interleaved", family.interleaved) != family.interleaved:
        fields.problem("mrope_interleaved", f"must be {str(family.interleaved).lower()} in this family")
    listed = fields.raw("mrope_section")
    sections = family.sections if listed is None else listed
    if (
        not isinstance(sections, list | tuple)
        or len(sections) != 3
        or not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sections)
    ):
        fields.problem("mrope_section", f"must be three numbers of pairs of channels, not {sections!r}")
        return rope
    return replace(rope, sections=tuple(sections), interleaved=family.interleaved)


def check_rotation(fields: Fields, attention: AttentionConfig | LatentConfig | RecurrentConfig) -> None:
    """Note a problem unless whole pairs of channels are rotated, each of which has its factors."""
    if not isinstance(attention, AttentionConfig) or attention.rope is None:
        return
    pairs, rest = divmod(attention.rotary_dim, 2)
    if rest or not pairs:
        fields.problem("partial_rotary_factor", f"rotates {attention.rotary_dim} channels of a head")
    sections = () if attention.rope.interleaved else attention.rope.sections
    if sections and sum(sections) != pairs:
        fields.problem("mrope_section", f"must have {pairs} pairs together, not {sum(sections)}")
    if attention.rope.kind != "longrope":
        return
    for name, factors in (
        ("short_factor", attention.rope.short_factors),
        ("long_factor", attention.rope.long_factors),
    ):
        if len(factors) != pairs:
            fields.problem(name, f"must have {pairs} factors, not {len(factors)}")
