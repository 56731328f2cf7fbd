"""Models with Mamba-2 mixers: Mamba 2 itself, Bamba, Falcon-H1 and Nemotron-H; and what config.json and
checkpoints of all models with such mixers have in common.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from penstock.runtime.models.config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig
from penstock.runtime.models.configs.recurrent import MambaConfig
from penstock.runtime.models.configs.tensor_names import TensorNames
from penstock.runtime.models.families.family import ModelFamily, tensor_name, tied_head
from penstock.runtime.models.families.mixture_fields import read_layer_numbers
from penstock.runtime.models.families.reading import Sizes, read_model, read_rope, read_sizes
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.load_rules import ParamPath, Source, Stored, StoredAt

_MOST_POSITIONS = 262144
"""The longest context of a model that only has state, whose file gives none: no state grows with it."""
_SHORT_NAMES: Mapping[str, str] = {
    "mamba_conv_bias": "use_conv_bias",
    "mamba_d_conv": "conv_kernel",
    "mamba_d_state": "state_size",
    "mamba_expand": "expand",
    "mamba_n_groups": "n_groups",
    "mamba_proj_bias": "use_bias",
}
"""What files call the fields of a mixer that they give no prefix."""
_BACKBONE = TensorNames(decoder="backbone.", table="embeddings.weight")
_TRAINED = ("rescale_prenorm_residual", "time_step_floor", "time_step_max")
"""How weights were drawn."""


def read_mamba(
    fields: Fields, inner: int, inner_name: str, *, heads: int = 128, state_dim: int = 256, groups: int = 1
) -> MambaConfig:
    """Read the mixer whose heads have `inner` channels together, which `inner_name` tells. heads, state_dim,
    groups: defaults.
    """
    heads, groups = fields.integer("mamba_n_heads", heads), fields.integer("mamba_n_groups", groups)
    fits = inner // heads
    head_dim = fits if fields.raw("mamba_d_head") in ("auto", None) else fields.integer("mamba_d_head")
    if heads * head_dim != inner:
        fields.problem(
            "mamba_n_heads", f"{heads} heads of mamba_d_head {head_dim} are not {inner_name} {inner}"
        )
    if heads % groups:
        fields.problem("mamba_n_groups", f"{groups} does not divide mamba_n_heads {heads}")
    return MambaConfig(
        num_heads=heads,
        head_dim=head_dim,
        state_dim=fields.integer("mamba_d_state", state_dim),
        num_groups=groups,
        num_taps=fields.integer("mamba_d_conv", 4, minimum=2),
        conv_bias=fields.boolean("mamba_conv_bias", True),
        bias=fields.boolean("mamba_proj_bias", False),
        step_limit=_step_limit(fields),
    )


def _step_limit(fields: Fields) -> tuple[float, float]:
    """Read the least and the largest time step. JSON has no infinity, so files write it in several ways."""
    value = fields.raw("time_step_limit")
    if value is None:
        return (0.0, math.inf)
    limits = [_number(bound) for bound in value] if isinstance(value, list) else []
    if len(limits) != 2 or not 0 <= limits[0] <= limits[1]:  # not even where one is NaN
        fields.problem("time_step_limit", f"must be two numbers, the least and the largest, not {value!r}")
        return (0.0, math.inf)
    return (limits[0], limits[1])


def _number(value: object) -> float:
    """Return a number, or NaN for what is none."""
    if isinstance(value, dict):
        value = value.get("__float__")
    if value == "Infinity":
        return math.inf
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def source_of_mamba(
    mamba: MambaConfig, layer: ParamPath, path: ParamPath, shape: tuple[int, ...], names: Mapping[str, str]
) -> Source:
    """Tell where a checkpoint has the parameter of a mixer at `path`, the last parts of its path. What the
    hidden states are multiplied by are rows of one tensor. layer: the first parts of the tensor's path.
    """
    part = path[0]
    begins = {
        "in_proj_gate": 0,
        "in_proj_inputs": mamba.channels,
        "in_proj_steps": mamba.channels + mamba.conv_channels,
    }
    if part not in begins:
        return Source(tensor_name((*layer, *path), names), shape)
    rows = mamba.channels + mamba.conv_channels + mamba.num_heads
    name = tensor_name((*layer, "in_proj", *path[1:]), names)
    return Source(name, (rows, *shape[1:]), begin=begins[str(part)])


def _parse_mamba2(architecture: str, fields: Fields) -> ModelConfig:
    """Parse Mamba-2: mixers and nothing else."""
    fields.only("model_type", "mamba2")
    fields.only("hidden_act", "silu")
    fields.call({**_SHORT_NAMES, "mamba_d_head": "head_dim", "mamba_n_heads": "num_heads"})
    hidden, num_layers = fields.integer("hidden_size"), fields.num_layers()
    inner = fields.integer("mamba_expand", 2) * hidden
    fields.only("intermediate_size", inner)
    fields.only("rms_norm", True)
    mamba = read_mamba(fields, inner, "expand * hidden_size", state_dim=128, groups=8)
    longest = fields.integer("max_position_embeddings", _MOST_POSITIONS)
    sizes = Sizes(hidden, num_layers, mamba.num_heads, mamba.num_heads, mamba.head_dim, longest)
    layer = LayerConfig(attention=mamba, mlp=None)
    return read_model(
        architecture,
        fields,
        sizes,
        [layer] * num_layers,
        eps=1e-5,
        eps_name="layer_norm_epsilon",
        names=_BACKBONE,
    )


def _parse_bamba(architecture: str, fields: Fields) -> ModelConfig:
    """Parse Bamba: mixers in the place of most attention."""
    fields.only("model_type", "bamba")
    fields.only("hidden_act", "silu")
    fields.only("mlp_bias", False)
    sizes = read_sizes(fields, kv_heads=8, max_positions=_MOST_POSITIONS)
    fields.only("attn_rotary_emb", sizes.head_dim // 2)
    bias = fields.boolean("attention_bias", False)
    attention = AttentionConfig(
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        scale=sizes.head_dim**-0.5,
        rope=read_rope(fields, sizes.max_positions, partial=0.5),
        qkv_bias=bias,
        o_bias=bias,
    )
    inner = fields.integer("mamba_expand", 2) * sizes.hidden_size
    mamba = read_mamba(fields, inner, "mamba_expand * hidden_size")
    mlp = MLPConfig(intermediate_size=fields.integer("intermediate_size", 14336))
    attending = read_layer_numbers(fields, "attn_layer_indices", sizes.num_layers) or ()
    layers = [
        LayerConfig(attention=attention if layer in attending else mamba, mlp=mlp)
        for layer in range(sizes.num_layers)
    ]
    return read_model(architecture, fields, sizes, layers, eps=1e-5)


def _parse_falcon_h1(architecture: str, fields: Fields) -> ModelConfig:
    """Parse Falcon-H1: in each layer attention and a mixer read the same, and both are added. What multiplies
    keys and what attention reads is a part of the scores' scale, and of what attention gives.
    """
    fields.only("model_type", "falcon_h1")
    fields.only("hidden_act", "silu")
    for name in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        fields.only(name, False)
    fields.only("mamba_use_mlp", True)
    sizes = read_sizes(fields, kv_heads=8, max_positions=8192)
    of_input, of_keys = (fields.number(f"{name}_multiplier", 1.0) for name in ("attention_in", "key"))
    attention = AttentionConfig(
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        scale=sizes.head_dim**-0.5 * of_keys * of_input**2,
        rope=read_rope(fields, sizes.max_positions),
    )
    inner = fields.optional_integer("mamba_d_ssm") if "mamba_d_ssm" in fields else 1024
    expanded = fields.integer("mamba_expand", 2) * sizes.hidden_size
    normed = fields.boolean("mamba_rms_norm", False)
    if normed and fields.boolean("mamba_norm_before_gate", True):
        fields.problem("mamba_norm_before_gate", "true is not supported with mamba_rms_norm")
    fields.ignore(("mamba_norm_before_gate",))
    of_mixer = fields.number("ssm_in_multiplier", 1.0)
    mamba = replace(
        read_mamba(fields, inner or expanded, "mamba_d_ssm"),
        normed=normed,
        multipliers=tuple(of_mixer * each for each in _multipliers(fields, "ssm_multipliers", 5)),
    )
    gate, down = _multipliers(fields, "mlp_multipliers", 2)
    layer = LayerConfig(
        attention=attention,
        beside=mamba,
        mlp=MLPConfig(intermediate_size=fields.integer("intermediate_size", 14336), gate_multiplier=gate),
        residual_multiplier=fields.number("attention_out_multiplier", 1.0) * of_input,
        beside_multiplier=fields.number("ssm_out_multiplier", 1.0),
        mlp_multiplier=down,
    )
    return read_model(
        architecture,
        fields,
        sizes,
        [layer] * sizes.num_layers,
        eps=1e-5,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logits_scale=fields.number("lm_head_multiplier", 1.0),
    )


def _multipliers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    """Read so many numbers; 1, if the field is absent."""
    value = fields.raw(name)
    values = value if isinstance(value, list) else [1.0] * count if value is None else []
    numbers = tuple(map(_number, values))
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        fields.problem(name, f"must be {count} finite numbers, not {value!r}")
        return (1.0,) * count
    return numbers


_LETTERS: Mapping[str, str] = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLDER_KINDS: Mapping[str, str] = {"mamba": "linear_attention", "attention": "full_attention"}


def _parse_nemotron_h(architecture: str, fields: Fields) -> ModelConfig:
    """Parse Nemotron-H, each of whose blocks is a mixer, attention or an MLP. Here a layer is one of the
    first two, and the MLP behind it if there is one.
    """
    fields.only("model_type", "nemotron_h")
    fields.only("mamba_hidden_act", "silu")
    fields.only("mlp_hidden_act", "relu2")
    fields.only("sliding_window", None)
    fields.only("num_nextn_predict_layers", 0)
    for name in ("attention_bias", "mamba_proj_bias", "mlp_bias", "use_bias"):
        fields.only(name, False)
    fields.call(
        {
            **{
                usual: own
                for usual, own in _SHORT_NAMES.items()
                if usual in ("mamba_conv_bias", "mamba_d_conv")
            },
            "mamba_d_head": "mamba_head_dim",
            "mamba_d_state": "ssm_state_size",
            "mamba_n_groups": "n_groups",
            "mamba_n_heads": "mamba_num_heads",
            "head_dim": "attention_head_dim",
        }
    )
    fields.only("rms_norm_eps", fields.number("layer_norm_epsilon", 1e-5))
    blocks = _blocks(fields)
    sizes = Sizes(
        fields.integer("hidden_size"),
        len(blocks),
        fields.integer("num_attention_heads", 32),
        fields.integer("num_key_value_heads", 8),
        fields.integer("head_dim", 128),
        fields.integer("max_position_embeddings", 4096),
    )
    if sizes.num_heads % sizes.num_kv_heads:
        fields.problem("num_key_value_heads", f"{sizes.num_kv_heads} does not divide {sizes.num_heads} heads")
    heads, head_dim = fields.integer("mamba_n_heads", 128), fields.integer("mamba_d_head", 64)
    mixer = read_mamba(fields, heads * head_dim, "", state_dim=128, groups=8)
    kinds: Mapping[str, AttentionConfig | MambaConfig] = {
        "linear_attention": replace(mixer, step_limit=(fields.number("time_step_min", 0.001), math.inf)),
        "full_attention": AttentionConfig(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            scale=sizes.head_dim**-0.5,
        ),
    }
    mlp = MLPConfig(intermediate_size=fields.integer("intermediate_size", 21504), plain="relu2")
    layers = [
        LayerConfig(attention=kinds[block], mlp=mlp if following == "mlp" else None)
        for block, following in zip(blocks, [*blocks[1:], ""], strict=True)
        if block != "mlp"
    ]
    return read_model(
        architecture,
        fields,
        sizes,
        layers,
        eps=1e-5,
        eps_name="layer_norm_epsilon",
        names=_BACKBONE,
    )


def _blocks(fields: Fields) -> list[str]:
    """Read the kinds of the blocks, from either of the fields that have them."""
    pattern, listed = fields.raw("hybrid_override_pattern"), fields.raw("layers_block_type")
    name = "hybrid_override_pattern" if listed is None else "layers_block_type"
    if isinstance(pattern, str) and listed is None:
        listed = [_LETTERS.get(letter, letter) for letter in pattern]
    kinds = [_OLDER_KINDS.get(str(kind), str(kind)) for kind in listed] if isinstance(listed, list) else []
    fields.only("num_hidden_layers", len(kinds))
    if "moe" in kinds:
        fields.problem(name, "names experts, which are not supported here, because they have no gate")
        kinds = ["mlp" if kind == "moe" else kind for kind in kinds]
    unknown = sorted(set(kinds) - set(_LETTERS.values()))
    twice = any(one == other == "mlp" for one, other in zip(["mlp", *kinds], kinds, strict=False))
    if unknown or twice or not kinds:
        fields.problem(
            name,
            f"must list {', '.join(_LETTERS.values())} for each layer, and no mlp at first or behind "
            f"another, not {listed!r}",
        )
        return ["linear_attention"]
    return kinds


_NAMES_BAMBA: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "pre_ff_layernorm",
    "mlp": "feed_forward",
    "norm": "final_layernorm",
    "gated_norm": "norm.weight",
}
_NAMES_BACKBONE: Mapping[str, str] = {
    "embed_tokens": "embeddings",
    "attention_norm": "norm",
    "self_attn": "mixer",
    "mlp_norm": "norm",
    "mlp": "mixer",
    "norm": "norm_f",
    "gated_norm": "norm.weight",
}


def _stored(config: ModelConfig) -> StoredAt:
    """Say where parameters are stored: Bamba's and Falcon-H1's mixers stand beside attention, by their
    name.
    """

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        if path[2:3] in (("self_attn",), ("beside",)):
            layer = config.layers[int(path[1])]
            mixer = layer.attention if path[2] == "self_attn" else layer.beside
            if isinstance(mixer, MambaConfig):
                above = (*path[:2], "mamba")
                return Stored((source_of_mamba(mixer, above, path[3:], shape, _NAMES_BAMBA),))
        return Stored((Source(tensor_name(path, _NAMES_BAMBA), shape),))

    return stored


def _head_as_table(config: ModelConfig) -> Mapping[str, str]:
    """See `tied_head`, by the name of a backbone's table."""
    return dict.fromkeys(tied_head(config), tensor_name(("embed_tokens", "weight"), _NAMES_BACKBONE))


def _stored_as_blocks(config: ModelConfig) -> StoredAt:
    """Say where parameters are stored: each mixer, attention and MLP is a block with a number of its own."""
    begins = [0]
    for layer in config.layers:
        begins.append(begins[-1] + (1 if layer.mlp is None else 2))

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        if path[0] != "layers":
            return Stored((Source(tensor_name(path, _NAMES_BACKBONE), shape),))
        number, part = int(path[1]), str(path[2])
        layer = config.layers[number]
        path = ("layers", begins[number] + part.startswith("mlp"), *path[2:])
        if part == "self_attn" and isinstance(layer.attention, MambaConfig):
            mixer = layer.attention
            return Stored((source_of_mamba(mixer, path[:3], path[3:], shape, _NAMES_BACKBONE),))
        return Stored((Source(tensor_name(path, _NAMES_BACKBONE), shape),))

    return stored


FAMILIES: Mapping[str, ModelFamily] = {
    "Mamba2ForCausalLM": ModelFamily(
        parse=_parse_mamba2,
        ignored=(
            *_TRAINED,
            "chunk_size",
            "norm_before_gate",  # of the first files; transformers never asks it
            "residual_in_fp32",
            "time_step_init_scheme",
            "time_step_min",
            "time_step_rank",
            "time_step_scale",
        ),
        stored=_stored_as_blocks,
        copies=_head_as_table,
    ),
    "BambaForCausalLM": ModelFamily(
        parse=_parse_bamba,
        ignored=("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"),
        stored=_stored,
    ),
    "FalconH1ForCausalLM": ModelFamily(
        parse=_parse_falcon_h1,
        ignored=("attn_layer_indices", "mamba_chunk_size", "mlp_expansion_factor", "num_logits_to_keep"),
        stored=_stored,
    ),
    "NemotronHForCausalLM": ModelFamily(
        parse=_parse_nemotron_h,
        ignored=(
            *_TRAINED,
            "auto_map",
            "chunk_size",
            "expand",
            "mamba_ssm_cache_dtype",
            "moe_intermediate_size",
            "moe_latent_size",
            "moe_shared_expert_intermediate_size",
            "moe_shared_expert_overlap",
            "mtp_layers_block_type",
            "n_group",
            "n_routed_experts",
            "n_shared_experts",
            "norm_topk_prob",
            "num_experts_per_tok",
            "num_logits_to_keep",
            "residual_in_fp32",
            "routed_scaling_factor",
            "time_step_rank",
            "topk_group",
            "use_mamba_kernels",
        ),
        stored=_stored_as_blocks,
        copies=_head_as_table,
    ),
}
