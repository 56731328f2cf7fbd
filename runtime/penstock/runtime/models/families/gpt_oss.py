"""gpt-oss: attention sinks, alternating windows, and experts whose weights are mostly published in MXFP4.

The experts of a layer are stacked in one tensor, in which rows of gate and up alternate. In floats each
expert's matrix is transposed; in MXFP4 (`mxfp4`) it is not, and has its scales in a second tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from penstock.runtime.models.config import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    ModelConfig,
    RouterConfig,
)
from penstock.runtime.models.families.family import PRE_NORMS, ModelFamily, tensor_name
from penstock.runtime.models.families.mixture_fields import read_experts_and_choices
from penstock.runtime.models.families.mxfp4 import BLOCK, decode
from penstock.runtime.models.families.reading import every, read_model, read_rope, read_sizes, read_windows
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.load_rules import ParamPath, Source, Stored, StoredAt
from penstock.runtime.models.quantised import float_form
from penstock.runtime.models.rope import RopeConfig, yarn_attention_factor

_ROPE = RopeConfig(
    "yarn",
    theta=150_000.0,
    factor=32.0,
    original_max_positions=4096,
    attention_factor=yarn_attention_factor(32.0),
    truncate=False,
)
"""That of a config.json that says nothing of RoPE but its base."""
_PLAIN_MODULES = {"model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"}
"""What quantization_config may say is not quantized: everything but the experts."""
_PARTS = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", None)}
"""The tensor that has a layer of the experts, and which of two alternating rows are its own."""


def _parse(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "gpt_oss")
    fields.only("hidden_act", "silu")
    fields.only("swiglu_alpha", 1.702)
    sizes = read_sizes(fields, head_dim=64, kv_heads=8)
    rope = read_rope(fields, sizes.max_positions, theta=_ROPE.theta)
    if not any(fields.mapping(name) for name in ("rope_parameters", "rope_scaling")):
        rope = dataclasses.replace(_ROPE, theta=rope.theta)
    bias = fields.boolean("attention_bias", True)
    experts = _experts(fields, sizes.hidden_size)
    layers = [
        LayerConfig(
            attention=AttentionConfig(
                num_heads=sizes.num_heads,
                num_kv_heads=sizes.num_kv_heads,
                head_dim=sizes.head_dim,
                scale=sizes.head_dim**-0.5,
                rope=rope,
                window=window,
                sinks=True,
                qkv_bias=bias,
                o_bias=bias,
            ),
            mlp=experts,
        )
        for window in read_windows(fields, every(2, sizes.num_layers), 128)
    ]
    config = read_model(architecture, fields, sizes, layers, eps=1e-5)
    if experts.stored_as == "mxfp4" and config.dtype is None:  # such files leave out what the rest is in
        return dataclasses.replace(config, dtype="bfloat16")
    return config


def _experts(fields: Fields, hidden_size: int) -> ExpertsConfig:
    count, chosen = read_experts_and_choices(fields, ("num_local_experts", "num_experts"), 128, 4)
    # Older files repeat the number of chosen experts under another name.
    fields.only("experts_per_token", chosen)
    inner = fields.integer("intermediate_size", 2880)
    quantized = _is_mxfp4(fields)
    if quantized and (hidden_size % BLOCK or inner % BLOCK):
        fields.problem(
            "quantization_config", f"sizes {hidden_size} and {inner} are not multiples of {BLOCK} as in MXFP4"
        )
    return ExpertsConfig(
        num_experts=count,
        per_token=chosen,
        intermediate_size=inner,
        router=RouterConfig(bias=True),
        activation="gpt_oss",
        limit=fields.number("swiglu_limit", 7.0),
        bias=True,
        stored_as="mxfp4" if quantized else "floats",
    )


def _is_mxfp4(fields: Fields) -> bool:
    """Say whether the experts are in MXFP4; a problem for any other quantization."""
    data = fields.mapping("quantization_config")
    if not data:
        return False
    inner = Fields(data, "quantization_config.", fields.problems)
    if inner.raw("quant_method") != "mxfp4":
        inner.problem("quant_method", f"{inner.raw('quant_method')!r} is not supported; supported: 'mxfp4'")
    plain = inner.raw("modules_to_not_convert")
    if plain is not None and (not isinstance(plain, list) or set(map(str, plain)) != _PLAIN_MODULES):
        inner.problem("modules_to_not_convert", f"must name all but the experts, not {plain!r}")
    inner.ignore(("dequantize",))  # tells transformers whether to compute in MXFP4
    inner.refuse_unread()
    return True


def _stored(config: ModelConfig) -> StoredAt:
    names = {**PRE_NORMS}
    experts = config.layers[0].mlp
    assert isinstance(experts, ExpertsConfig)

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        if "experts" not in path:
            return Stored((Source(tensor_name(path, names), shape),))
        *above, expert, part, kind = path
        assert isinstance(expert, int)
        tensor, first = _PARTS[str(part)]
        name = tensor_name((*above, tensor), names)
        return _expert(experts, name, expert, shape, None if first is None else first, str(kind))

    return stored


def _expert(
    experts: ExpertsConfig, name: str, expert: int, shape: tuple[int, ...], first: int | None, kind: str
) -> Stored:
    """Return a parameter of one expert. first: which of two alternating rows are its own; None: all are."""
    count = experts.num_experts
    rows = shape[0] if first is None else 2 * shape[0]
    order = None if first is None else range(first, rows, 2)
    if kind == "bias":
        return Stored((Source(f"{name}_bias", (count, rows), (expert,), order=order),))
    columns = shape[1]
    if experts.stored_as == "floats":
        return Stored((Source(name, (count, columns, rows), (expert,), axis=1, order=order),))
    uint8, blocks = np.dtype(np.uint8), columns // BLOCK
    return Stored(
        (
            Source(f"{name}_blocks", (count, rows, blocks, BLOCK // 2), (expert,), order=order, dtype=uint8),
            Source(f"{name}_scales", (count, rows, blocks), (expert,), order=order, dtype=uint8),
        ),
        decode,
        float_form(4, BLOCK),
    )


FAMILIES: Mapping[str, ModelFamily] = {
    "GptOssForCausalLM": ModelFamily(
        parse=_parse, stored=_stored, ignored=("initial_context_length", "swiglu_beta")
    )
}
