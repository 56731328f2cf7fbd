"""Decoders whose hidden states pass layer norms: BLOOM, Cohere, Falcon, GPT-2, GPTBigCode, GPT-J, GPT-NeoX,
MPT, Nemotron, OLMo, OPT, Phi, StableLM, StarCoder 2.

In some, attention and MLP read the same hidden states. The older ones have MLPs without a gate, biases,
learned positions, and one tensor of queries, keys and values.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from penstock.runtime.models.config import (
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    PlainActivation,
)
from penstock.runtime.models.configs.tensor_names import TensorNames
from penstock.runtime.models.families.family import (
    PRE_NORMS,
    ModelFamily,
    pairs_apart,
    tensor_name,
    tied_head,
)
from penstock.runtime.models.families.reading import (
    Sizes,
    every,
    read_model,
    read_rope,
    read_sizes,
    read_windows,
)
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.hf_harmless_fields import HARMLESS_FIELDS
from penstock.runtime.models.load_rules import ParamPath, Rows, Source, Stored, StoredAt
from penstock.runtime.models.rope import RopeConfig

_ACTIVATIONS: Mapping[str, PlainActivation] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
_GPT_FIELDS: Mapping[str, str] = {
    "hidden_act": "activation_function",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""What GPT-2 and its descendants call fields."""
_GPT2_NAMES: Mapping[str, str] = {
    "embed_tokens": "wte",
    "embed_positions": "wpe",
    "layers": "h",
    "attention_norm": "ln_1",
    "self_attn": "attn",
    "o_proj": "c_proj",
    "mlp_norm": "ln_2",
    "up_proj": "c_fc",
    "down_proj": "c_proj",
    "norm": "ln_f",
}


def _attention(sizes: Sizes, rope: RopeConfig | None, **others: Any) -> AttentionConfig:
    return AttentionConfig(
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        scale=sizes.head_dim**-0.5,
        rope=rope,
        **others,
    )


def _mlp(fields: Fields, sizes: Sizes, default: str, *, bias: bool) -> MLPConfig:
    """Read an MLP without a gate, four times as wide as the model where the file does not say. default: of
    hidden_act.
    """
    fields.only("hidden_act", *_ACTIVATIONS)
    name = fields.raw("hidden_act") or default
    inner = fields.integer("intermediate_size", 4 * sizes.hidden_size)
    return MLPConfig(intermediate_size=inner, plain=_ACTIVATIONS.get(str(name), "gelu"), bias=bias)


def _model(
    architecture: str, fields: Fields, sizes: Sizes, layer: LayerConfig, eps_name: str, **others: Any
) -> ModelConfig:
    """Return the model whose layers are all `layer`, with layer norms that have weight and bias."""
    layers = [layer] * sizes.num_layers
    return read_model(
        architecture, fields, sizes, layers, eps=1e-5, eps_name=eps_name, norm="layer", **others
    )


def _parse_gpt2(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "gpt2")
    fields.call(_GPT_FIELDS)
    fields.only("scale_attn_weights", True)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    sizes = read_sizes(fields, kv_heads=0)
    return _gpt2(architecture, fields, sizes, "gelu_new")


def _parse_gpt_bigcode(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "gpt_bigcode")
    fields.call(_GPT_FIELDS)
    fields.only("scale_attn_weights", True)
    heads = 1 if fields.boolean("multi_query", True) else fields.integer("num_attention_heads")
    fields.only("num_key_value_heads", heads)
    return _gpt2(architecture, fields, read_sizes(fields, kv_heads=heads), "gelu_pytorch_tanh")


def _gpt2(architecture: str, fields: Fields, sizes: Sizes, activation: str) -> ModelConfig:
    fields.only("add_cross_attention", False)
    layer = LayerConfig(
        attention=_attention(sizes, None, qkv_bias=True, o_bias=True),
        mlp=_mlp(fields, sizes, activation, bias=True),
    )
    return _model(
        architecture,
        fields,
        sizes,
        layer,
        "layer_norm_epsilon",
        tied=True,
        positions_from=0,
        names=TensorNames(decoder="transformer.", table="wte.weight"),
    )


def _parse_bloom(architecture: str, fields: Fields) -> ModelConfig:
    """Parse BLOOM: ALiBi, and a norm of the embeddings."""
    fields.only("model_type", "bloom")
    fields.call(
        {
            "hidden_size": "n_embed",
            "max_position_embeddings": "seq_length",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        }
    )
    fields.only("apply_residual_connection_post_layernorm", False)
    sizes = read_sizes(fields, kv_heads=0, max_positions=2048)
    layer = LayerConfig(
        attention=_attention(sizes, None, alibi=8.0, qkv_bias=True, o_bias=True),
        mlp=MLPConfig(intermediate_size=4 * sizes.hidden_size, plain="gelu_tanh", bias=True),
    )
    return _model(
        architecture,
        fields,
        sizes,
        layer,
        "layer_norm_epsilon",
        tied=True,
        embed_norm=True,
        names=TensorNames(decoder="transformer.", table="word_embeddings.weight"),
    )


def _parse_mpt(architecture: str, fields: Fields) -> ModelConfig:
    """Parse MPT: ALiBi, and no biases. An MLP is four times as wide as the model, whatever expansion_ratio
    says.
    """
    fields.only("model_type", "mpt")
    fields.only("norm_type", "low_precision_layernorm")
    fields.only("no_bias", True)
    fields.only("logit_scale", None)
    fields.call(
        {
            "hidden_size": "d_model",
            "max_position_embeddings": "max_seq_len",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
        }
    )
    inner = Fields(fields.mapping("attn_config"), "attn_config.", fields.problems)
    for name, value in (
        ("alibi", True),
        ("alibi_bias_max", 8),
        ("attn_type", "multihead_attention"),
        ("attn_uses_sequence_id", False),
        ("prefix_lm", False),
        ("qk_ln", False),
    ):
        inner.only(name, value)
    inner.ignore(("attn_impl", "dtype"))
    sizes = read_sizes(fields, kv_heads=0, max_positions=2048)
    attention = _attention(sizes, None, alibi=8.0, clip=inner.optional_number("clip_qkv"))
    scale = inner.optional_number("softmax_scale")
    inner.refuse_unread(HARMLESS_FIELDS)
    layer = LayerConfig(
        attention=attention if scale is None else dataclasses.replace(attention, scale=scale),
        mlp=MLPConfig(intermediate_size=4 * sizes.hidden_size, plain="gelu"),
    )
    return read_model(
        architecture,
        fields,
        sizes,
        [layer] * sizes.num_layers,
        eps=1e-5,
        eps_name="layer_norm_epsilon",
        tied=True,
        norm="layer_without_bias",
        names=TensorNames(decoder="transformer.", table="wte.weight"),
    )


def _parse_gptj(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "gptj")
    fields.call(_GPT_FIELDS)
    sizes = read_sizes(fields, kv_heads=0)
    turned = fields.integer("rotary_dim", 64)
    if turned % 2 or turned > sizes.head_dim:
        fields.problem("rotary_dim", f"must be even and at most {sizes.head_dim}, not {turned}")
        turned = sizes.head_dim
    rope = RopeConfig(theta=10_000.0, partial_rotary_factor=_share(turned, sizes.head_dim))
    layer = LayerConfig(
        attention=_attention(sizes, rope),
        mlp=_mlp(fields, sizes, "gelu_new", bias=True),
        norms="parallel_shared",
    )
    return _model(
        architecture,
        fields,
        sizes,
        layer,
        "layer_norm_epsilon",
        head_bias=True,
        names=TensorNames(decoder="transformer.", table="wte.weight"),
    )


def _share(turned: int, head_dim: int) -> float:
    """Return the share of so many channels of a head."""
    share = turned / head_dim
    return share if int(head_dim * share) == turned else math.nextafter(share, 1.0)  # 60 of 176 would be 59


def _parse_gpt_neox(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "gpt_neox")
    fields.call({"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"})
    sizes = read_sizes(fields, kv_heads=0)
    sizes = dataclasses.replace(sizes, num_kv_heads=sizes.num_heads)  # whatever num_key_value_heads says
    bias = fields.boolean("attention_bias", True)
    rope = read_rope(fields, sizes.max_positions, partial=0.25)
    turned = int(sizes.head_dim * rope.partial_rotary_factor)
    if turned % 2 and rope.kind in ("default", "linear"):
        # One channel more is rotated, but exponents are of the smaller number, as if the base were another.
        rope = dataclasses.replace(
            rope,
            theta=rope.theta ** ((turned + 1) / turned),
            partial_rotary_factor=_share(turned + 1, sizes.head_dim),
        )
    layer = LayerConfig(
        attention=_attention(sizes, rope, qkv_bias=bias, o_bias=bias),
        mlp=_mlp(fields, sizes, "gelu", bias=True),
        norms="parallel" if fields.boolean("use_parallel_residual", True) else "pre",
    )
    return _model(
        architecture,
        fields,
        sizes,
        layer,
        "layer_norm_eps",
        names=TensorNames(decoder="gpt_neox.", head="embed_out.", table="embed_in.weight"),
    )


def _parse_opt(architecture: str, fields: Fields) -> ModelConfig:
    """Parse OPT, whose positions begin at entry 2 of their table."""
    fields.only("model_type", "opt")
    fields.call({"hidden_act": "activation_function", "intermediate_size": "ffn_dim"})
    fields.only("do_layer_norm_before", True)
    fields.only("_remove_final_layer_norm", False)
    fields.only("layer_norm_elementwise_affine", True)
    sizes = read_sizes(fields, kv_heads=0)
    fields.only("word_embed_proj_dim", sizes.hidden_size)
    bias = fields.boolean("enable_bias", True)
    layer = LayerConfig(
        attention=_attention(sizes, None, qkv_bias=bias, o_bias=bias),
        mlp=_mlp(fields, sizes, "relu", bias=bias),
    )
    layers = [layer] * sizes.num_layers
    return read_model(
        architecture, fields, sizes, layers, eps=1e-5, tied=True, norm="layer", positions_from=2
    )


def _parse_falcon(architecture: str, fields: Fields) -> ModelConfig:
    """Parse Falcon 7B (one head of keys, one norm for attention and MLP) and its successors (groups, two
    norms).
    """
    fields.only("model_type", "falcon")
    fields.only("alibi", False)
    fields.only("apply_residual_connection_post_layernorm", False)
    fields.call(
        {
            "hidden_act": "activation",
            "intermediate_size": "ffn_hidden_size",
            "num_key_value_heads": "num_kv_heads",
        }
    )
    grouped = fields.boolean("new_decoder_architecture", False)
    heads = fields.integer("num_attention_heads")
    if not grouped:
        fields.ignore(("num_key_value_heads",))
    several = fields.integer("num_key_value_heads", heads) if grouped else heads
    kv_heads = 1 if not grouped and fields.boolean("multi_query", True) else several
    fields.ignore(("multi_query",))
    sizes = read_sizes(fields, kv_heads=0, max_positions=2048)
    sizes = dataclasses.replace(sizes, num_kv_heads=kv_heads)
    num_norms = fields.optional_integer("num_ln_in_parallel_attn") or (2 if grouped else 1)
    norms: Literal["pre", "parallel", "parallel_shared"] = "parallel" if num_norms == 2 else "parallel_shared"
    if not fields.boolean("parallel_attn", True):
        norms = "pre"
        if grouped:
            fields.problem("parallel_attn", "false is not supported with new_decoder_architecture")
    bias = fields.boolean("bias", False)
    layer = LayerConfig(
        attention=_attention(sizes, read_rope(fields, sizes.max_positions), qkv_bias=bias, o_bias=bias),
        mlp=_mlp(fields, sizes, "gelu", bias=bias),
        norms=norms,
    )
    return _model(
        architecture,
        fields,
        sizes,
        layer,
        "layer_norm_epsilon",
        tied=True,
        names=TensorNames(decoder="transformer.", table="word_embeddings.weight"),
    )


def _parse_phi(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "phi")
    fields.only("qk_layernorm", False)
    sizes = read_sizes(fields, kv_heads=0)
    rope = read_rope(fields, sizes.max_positions, partial=0.5)
    layer = LayerConfig(
        attention=_attention(sizes, rope, qkv_bias=True, o_bias=True),
        mlp=_mlp(fields, sizes, "gelu_new", bias=True),
        norms="parallel_shared",
    )
    return _model(architecture, fields, sizes, layer, "layer_norm_eps", head_bias=True)


def _parse_starcoder2(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "starcoder2")
    fields.only("mlp_type", "default")
    fields.only("norm_type", "layer_norm")
    sizes = read_sizes(fields, kv_heads=2)
    bias, rope = fields.boolean("use_bias", True), read_rope(fields, sizes.max_positions)
    window = fields.optional_integer("sliding_window")
    layer = LayerConfig(
        attention=_attention(sizes, rope, window=window, qkv_bias=bias, o_bias=bias),
        mlp=_mlp(fields, sizes, "gelu_pytorch_tanh", bias=bias),
    )
    return _model(architecture, fields, sizes, layer, "norm_epsilon", tied=True)


def _parse_nemotron(architecture: str, fields: Fields) -> ModelConfig:
    """Parse Nemotron, whose norms are stored as differences from one."""
    fields.only("model_type", "nemotron")
    sizes = read_sizes(fields, kv_heads=0)
    bias = fields.boolean("attention_bias", False)
    rope = read_rope(fields, sizes.max_positions, partial=0.5)
    layer = LayerConfig(
        attention=_attention(sizes, rope, qkv_bias=bias, o_bias=bias),
        mlp=_mlp(fields, sizes, "relu2", bias=fields.boolean("mlp_bias", False)),
    )
    return _model(architecture, fields, sizes, layer, "norm_eps", norm_offset=1.0)


def _gated(fields: Fields) -> MLPConfig:
    fields.only("hidden_act", "silu")
    return MLPConfig(intermediate_size=fields.integer("intermediate_size"))


def _parse_stablelm(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "stablelm")
    sizes = read_sizes(fields, kv_heads=32)
    layer = LayerConfig(
        attention=_attention(
            sizes,
            read_rope(fields, sizes.max_positions, partial=0.25),
            qkv_bias=fields.boolean("use_qkv_bias", False),
            qk_norm="layer" if fields.boolean("qk_layernorm", False) else "none",
        ),
        mlp=_gated(fields),
        norms="parallel_shared" if fields.boolean("use_parallel_residual", False) else "pre",
    )
    return _model(architecture, fields, sizes, layer, "layer_norm_eps")


def _parse_olmo(architecture: str, fields: Fields) -> ModelConfig:
    """Parse the first OLMo: norms without weights, and bounded queries, keys and values."""
    fields.only("model_type", "olmo")
    sizes = read_sizes(fields, kv_heads=0)
    bias, rope = fields.boolean("attention_bias", False), read_rope(fields, sizes.max_positions)
    clip = fields.optional_number("clip_qkv")
    layer = LayerConfig(
        attention=_attention(sizes, rope, qkv_bias=bias, o_bias=bias, clip=clip), mlp=_gated(fields)
    )
    return read_model(architecture, fields, sizes, [layer] * sizes.num_layers, eps=1e-5, norm="layer_alone")


def _parse_cohere(architecture: str, fields: Fields) -> ModelConfig:
    """Parse Command-R."""
    fields.only("model_type", "cohere")
    sizes = read_sizes(fields, kv_heads=0)
    bias = fields.boolean("attention_bias", False)
    attention = _attention(
        sizes,
        read_rope(fields, sizes.max_positions, theta=500_000.0),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="layer" if fields.boolean("use_qk_norm", False) else "none",
    )
    return _cohere(architecture, fields, sizes, [attention] * sizes.num_layers)


def _parse_cohere2(architecture: str, fields: Fields) -> ModelConfig:
    """Parse Command-A and R7B: only layers with a window are rotated."""
    fields.only("model_type", "cohere2")
    fields.only("order_of_interleaved_layers", "local_attn_first")
    fields.only("position_embedding_type", "rope_gptj")
    fields.only("rotary_pct", 1.0)
    for name in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block"):
        fields.only(name, True)
    sizes = read_sizes(fields, kv_heads=0)
    bias, rope = fields.boolean("attention_bias", False), read_rope(fields, sizes.max_positions)
    pattern = every(fields.integer("sliding_window_pattern", 4), sizes.num_layers)
    attentions = [
        _attention(sizes, rope if window is not None else None, window=window, qkv_bias=bias, o_bias=bias)
        for window in read_windows(fields, pattern, 4096)
    ]
    return _cohere(architecture, fields, sizes, attentions)


def _cohere(
    architecture: str, fields: Fields, sizes: Sizes, attentions: list[AttentionConfig]
) -> ModelConfig:
    mlp = _gated(fields)
    layers = [LayerConfig(attention=one, mlp=mlp, norms="parallel_shared") for one in attentions]
    return read_model(
        architecture,
        fields,
        sizes,
        layers,
        eps=1e-5,
        eps_name="layer_norm_eps",
        tied=True,
        norm="layer_without_bias",
        logits_scale=fields.number("logit_scale", 0.0625),
    )


_HUGE_NAMES: Mapping[str, str] = {
    "embed_tokens": "word_embeddings",
    "layers": "h",
    "self_attn": "self_attention",
    "o_proj": "dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "norm": "ln_f",
}
"""What BLOOM and Falcon call parts."""


def _falcon_names(config: ModelConfig) -> Mapping[str, str]:
    two = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    return {**_HUGE_NAMES, **(two if config.layers[0].norms == "parallel" else PRE_NORMS)}


def _family(
    parse: Callable[[str, Fields], ModelConfig],
    names: Callable[[ModelConfig], Mapping[str, str]] | Mapping[str, str],
    *,
    interleaved: bool = False,
    fused: str = "",
    by_rows: bool = False,
    transposed: bool = False,
    **others: Any,
) -> ModelFamily:
    """Make a family. names: of the parts of paths. interleaved: the two channels of each rotated pair lie
    side by side in the checkpoint. fused: the tensor that has queries, keys and values: those of each head of
    keys together, or, `by_rows`, all queries, all keys, and all values. transposed: so are the matrices of
    layers.
    """

    def of_parts(config: ModelConfig) -> Mapping[str, str]:
        return names(config) if callable(names) else names

    def stored(config: ModelConfig) -> StoredAt:
        return functools.partial(
            _stored,
            config,
            of_parts(config),
            interleaved=interleaved,
            fused=fused,
            by_rows=by_rows,
            transposed=transposed,
        )

    def copies(config: ModelConfig) -> Mapping[str, str]:
        table = f"model.{of_parts(config).get('embed_tokens', 'embed_tokens')}.weight"
        return dict.fromkeys(tied_head(config), table)

    return ModelFamily(parse=parse, stored=stored, copies=copies, **others)


def _stored(
    config: ModelConfig,
    names: Mapping[str, str],
    path: ParamPath,
    shape: tuple[int, ...],
    *,
    interleaved: bool,
    fused: str,
    by_rows: bool,
    transposed: bool,
) -> Stored:
    part = path[-2]
    name = tensor_name(path, names).replace("..", ".")
    if path[0] != "layers":
        return Stored((Source(name, shape),))
    attention = config.layers[int(path[1])].attention
    assert isinstance(attention, AttentionConfig)
    dim, turned = attention.head_dim, attention.rotary_dim if interleaved else 0
    if isinstance(part, int):  # the norm of a head
        above = tensor_name(path[:-2], names)
        if "q_norm" in names:
            return Stored((Source(f"{above}.norms.{part}.weight", shape),))
        heads = attention.num_heads if path[-3] == "q_norm" else attention.num_kv_heads
        return Stored((Source(f"{above}.weight", (heads, dim), (part,), order=pairs_apart(1, dim, turned)),))
    if part in ("q_proj", "k_proj", "v_proj") and fused:
        name = tensor_name((*path[:-2], fused, path[-1]), names)
        return _of_fused(name, str(part), shape, attention, by_rows=by_rows, transposed=transposed)
    if transposed and len(shape) == 2:
        return Stored((Source(name, shape[::-1], axis=1),))
    if turned and part in ("q_proj", "k_proj"):
        return Stored((Source(name, shape, order=pairs_apart(shape[0] // dim, dim, turned)),))
    return Stored((Source(name, shape),))


def _of_fused(
    name: str,
    part: str,
    shape: tuple[int, ...],
    attention: AttentionConfig,
    *,
    by_rows: bool,
    transposed: bool,
) -> Stored:
    """Tell where a tensor of queries, keys and values has one of them."""
    heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    rows, rest = (heads + 2 * kv_heads) * dim, shape[1:]
    if by_rows:
        begin = {"q_proj": 0, "k_proj": heads * dim, "v_proj": (heads + kv_heads) * dim}[part]
        whole = (*rest, rows) if transposed else (rows, *rest)
        return Stored((Source(name, whole, begin=begin, axis=len(rest) if transposed else 0),))
    group = heads // kv_heads
    first, num = {"q_proj": (0, group), "k_proj": (group, 1), "v_proj": (group + 1, 1)}[part]
    order: Rows = tuple(
        (key_head * (group + 2) + head) * dim + row
        for key_head in range(kv_heads)
        for head in range(first, first + num)
        for row in range(dim)
    )
    return Stored((Source(name, (rows, *rest), order=order),))


_MASKS = (r"\.(attn|attention)\.(masked_)?bias$",)
"""Masks that old versions of transformers stored."""
_SUMMARIES = (
    "n_ctx",
    "reorder_and_upcast_attn",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
)
"""Fields of GPT-2's other heads, and of how it was computed in float16."""
_MPT = _family(
    _parse_mpt,
    {
        "embed_tokens": "wte",
        "layers": "blocks",
        "attention_norm": "norm_1",
        "self_attn": "attn",
        "o_proj": "out_proj",
        "mlp_norm": "norm_2",
        "mlp": "ffn",
        "norm": "norm_f",
    },
    fused="Wqkv",
    by_rows=True,
    ignored=(
        "auto_map",
        "emb_pdrop",
        "embedding_fraction",
        "expansion_ratio",
        "init_config",
        "init_device",
        "learned_pos_emb",
        "tokenizer_name",
        "verbose",
    ),
)
FAMILIES: Mapping[str, ModelFamily] = {
    "BloomForCausalLM": _family(
        _parse_bloom,
        {**_HUGE_NAMES, **PRE_NORMS, "embed_norm": "word_embeddings_layernorm"},
        fused="query_key_value",
        ignored=(
            "attention_softmax_in_fp32",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "offset_alibi",
            "pretraining_tp",
            "skip_bias_add",
            "skip_bias_add_qkv",
            "slow_but_exact",
        ),
    ),
    "CohereForCausalLM": _family(_parse_cohere, {"attention_norm": "input_layernorm"}, interleaved=True),
    "Cohere2ForCausalLM": _family(
        _parse_cohere2,
        {"attention_norm": "input_layernorm"},
        interleaved=True,
        ignored=("layer_switch", "use_parallel_embedding"),
    ),
    "FalconForCausalLM": _family(
        _parse_falcon,
        _falcon_names,
        fused="query_key_value",
        ignored=("auto_map",),
    ),
    "GPT2LMHeadModel": _family(
        _parse_gpt2,
        _GPT2_NAMES,
        fused="c_attn",
        by_rows=True,
        transposed=True,
        harmless=_MASKS,
        ignored=_SUMMARIES,
    ),
    "GPTBigCodeForCausalLM": _family(
        _parse_gpt_bigcode,
        _GPT2_NAMES,
        fused="c_attn",
        harmless=_MASKS,
        ignored=(
            *_SUMMARIES,
            "attention_softmax_in_fp32",
            "inference_runner",
            "pad_key_length",
            "scale_attention_softmax_in_fp32",
            "validate_runner_input",
        ),
    ),
    "GPTJForCausalLM": _family(
        _parse_gptj,
        {**_GPT2_NAMES, "o_proj": "out_proj", "up_proj": "fc_in", "down_proj": "fc_out"},
        interleaved=True,
        harmless=_MASKS,
        ignored=(*_SUMMARIES, "rotary", "scale_attn_weights"),
    ),
    "GPTNeoXForCausalLM": _family(
        _parse_gpt_neox,
        {
            **PRE_NORMS,
            "embed_tokens": "embed_in",
            "self_attn": "attention",
            "o_proj": "dense",
            "up_proj": "dense_h_to_4h",
            "down_proj": "dense_4h_to_h",
            "norm": "final_layer_norm",
        },
        fused="query_key_value",
        harmless=_MASKS,
        ignored=("classifier_dropout", "is_decoder", "num_key_value_heads"),
    ),
    "MptForCausalLM": _MPT,
    "MPTForCausalLM": _MPT,  # as its makers' files call it
    "NemotronForCausalLM": _family(_parse_nemotron, PRE_NORMS),
    "OlmoForCausalLM": _family(_parse_olmo, PRE_NORMS),
    "OPTForCausalLM": _family(
        _parse_opt,
        {
            "attention_norm": "self_attn_layer_norm",
            "o_proj": "out_proj",
            "mlp_norm": "final_layer_norm",
            "mlp": "",
            "up_proj": "fc1",
            "down_proj": "fc2",
            "norm": "final_layer_norm",
        },
        ignored=("activation_dropout", "init_std", "layerdrop"),
    ),
    "PhiForCausalLM": _family(
        _parse_phi,
        {
            "attention_norm": "input_layernorm",
            "o_proj": "dense",
            "up_proj": "fc1",
            "down_proj": "fc2",
            "norm": "final_layernorm",
        },
    ),
    "StableLmForCausalLM": _family(
        _parse_stablelm, {**PRE_NORMS, "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
    ),
    "Starcoder2ForCausalLM": _family(
        _parse_starcoder2,
        {**PRE_NORMS, "up_proj": "c_fc", "down_proj": "c_proj"},
        ignored=(
            "activation_function",
            "attention_softmax_in_fp32",
            "layer_norm_epsilon",
            "rms_norm_eps",
            "scale_attention_softmax_in_fp32",
            "scale_attn_weights",
        ),
    ),
}
