"""Gemma 1 to 3 and VaultGemma: scaled embeddings, and norms whose weights are stored as differences from one.

Gemma 2 and 3 have norms before and after attention and MLP, and sliding windows in most layers. Gemma 2 and
VaultGemma, which has no norms after them, soft-cap scores and logits. Gemma 3 normalises queries and keys
instead, and its two kinds of layers turn with different bases.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from penstock.runtime.models.config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, Norms
from penstock.runtime.models.configs.encoder import EncoderConfig
from penstock.runtime.models.encoder import Encoder
from penstock.runtime.models.families.family import SANDWICH_NORMS, ModelFamily, stored_plainly
from penstock.runtime.models.families.reading import (
    every,
    read_model,
    read_rope,
    read_ropes,
    read_sizes,
    read_windows,
)
from penstock.runtime.models.hf_fields import Fields


def _parse_gemma(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "gemma")
    # The first releases said "gelu" and meant its form with a tanh, which transformers takes it for, too.
    for name in ("hidden_act", "hidden_activation"):
        fields.only(name, "gelu", "gelu_pytorch_tanh")
    fields.only("use_bidirectional_attention", False)
    sizes = read_sizes(fields, head_dim=256, kv_heads=16)
    bias = fields.boolean("attention_bias", False)
    layer = LayerConfig(
        attention=AttentionConfig(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            scale=sizes.head_dim**-0.5,
            rope=read_rope(fields, sizes.max_positions),
            qkv_bias=bias,
            o_bias=bias,
        ),
        mlp=MLPConfig(intermediate_size=fields.integer("intermediate_size"), activation="gelu_tanh"),
    )
    return read_model(
        architecture,
        fields,
        sizes,
        [layer] * sizes.num_layers,
        tied=True,
        norm_offset=1.0,
        embedding_scale=sizes.hidden_size**0.5,
    )


def _parse_gemma2(architecture: str, fields: Fields, *, model_type: str, norms: Norms) -> ModelConfig:
    """Parse Gemma 2, and VaultGemma, which has fewer norms."""
    fields.only("use_bidirectional_attention", False)
    fields.only("model_type", model_type)
    sizes = read_sizes(fields, head_dim=256)
    rope = read_rope(fields, sizes.max_positions)
    scale, bias, mlp = _shared(fields)
    softcap = _softcap(fields, "attn_logit_softcapping", 50.0)
    layers = [
        LayerConfig(
            attention=AttentionConfig(
                num_heads=sizes.num_heads,
                num_kv_heads=sizes.num_kv_heads,
                head_dim=sizes.head_dim,
                scale=scale,
                rope=rope,
                window=window,
                softcap=softcap,
                qkv_bias=bias,
                o_bias=bias,
            ),
            mlp=mlp,
            norms=norms,
        )
        for window in read_windows(fields, every(2, sizes.num_layers), 4096)
    ]
    return read_model(
        architecture,
        fields,
        sizes,
        layers,
        tied=True,
        norm_offset=1.0,
        embedding_scale=sizes.hidden_size**0.5,
        logits_softcap=_softcap(fields, "final_logit_softcapping", 30.0),
    )


def _parse_gemma3(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "gemma3_text")
    looks_both_ways = architecture == "Gemma3TextModel"
    if not looks_both_ways:
        fields.only("use_bidirectional_attention", False)
    if looks_both_ways and not fields.boolean("use_bidirectional_attention", False):
        fields.problem("use_bidirectional_attention", "must be true: a decoder is a Gemma3ForCausalLM")
    sizes = read_sizes(fields, head_dim=256)
    bases = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}
    ropes = read_ropes(fields, sizes.max_positions, bases)
    scale, bias, mlp = _shared(fields)
    # transformers has this field, and its Gemma 3 makes no use of it.
    fields.only("attn_logit_softcapping", None)
    pattern = every(fields.integer("sliding_window_pattern", 6), sizes.num_layers)
    layers = [
        LayerConfig(
            attention=AttentionConfig(
                num_heads=sizes.num_heads,
                num_kv_heads=sizes.num_kv_heads,
                head_dim=sizes.head_dim,
                scale=scale,
                rope=ropes["full_attention" if window is None else "sliding_attention"],
                window=window // 2 + 1 if looks_both_ways and window is not None else window,
                qkv_bias=bias,
                o_bias=bias,
                qk_norm="head",
            ),
            mlp=mlp,
            norms="sandwich",
        )
        for window in read_windows(fields, pattern, 4096)
    ]
    return read_model(
        architecture,
        fields,
        sizes,
        layers,
        tied=True,
        norm_offset=1.0,
        embedding_scale=sizes.hidden_size**0.5,
        logits_softcap=_softcap(fields, "final_logit_softcapping", None),
        encoder=_BOTH_WAYS if looks_both_ways else None,
    )


def _shared(fields: Fields) -> tuple[float, bool, MLPConfig]:
    """Read what both read alike: the scale of scores, whether attention has biases, and the MLP."""
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    scale = fields.number("query_pre_attn_scalar", 256.0) ** -0.5
    mlp = MLPConfig(intermediate_size=fields.integer("intermediate_size"), activation="gelu_tanh")
    return scale, fields.boolean("attention_bias", False), mlp


def _softcap(fields: Fields, name: str, default: float | None) -> float | None:
    """Read a soft cap; null means none."""
    value = fields.optional_number(name)
    return value if name in fields else default


_BOTH_WAYS = EncoderConfig(norm_embeddings=False, final_norm=True)
_STORED = stored_plainly(SANDWICH_NORMS)
_IGNORED = ("hidden_act",)
"""Both look at hidden_activation instead."""

FAMILIES: Mapping[str, ModelFamily] = {
    "GemmaForCausalLM": ModelFamily(parse=_parse_gemma),
    "Gemma2ForCausalLM": ModelFamily(
        parse=functools.partial(_parse_gemma2, model_type="gemma2", norms="sandwich"),
        stored=_STORED,
        ignored=(*_IGNORED, "sliding_window_size"),
    ),
    "VaultGemmaForCausalLM": ModelFamily(
        parse=functools.partial(_parse_gemma2, model_type="vaultgemma", norms="pre"),
        stored=_STORED,
        ignored=_IGNORED,
    ),
    "Gemma3ForCausalLM": ModelFamily(
        parse=_parse_gemma3, stored=_STORED, ignored=(*_IGNORED, "_sliding_window_pattern")
    ),
    "Gemma3TextModel": ModelFamily(
        parse=_parse_gemma3,
        stored=_STORED,
        ignored=(*_IGNORED, "_sliding_window_pattern"),
        copies=lambda config: {},
        build=Encoder,
    ),
}
