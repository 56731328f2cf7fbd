"""What the metadata of a GGUF file says of its model, in the fields of config.json, and what safetensors
files call its tensors.

From here on a model of a GGUF file is like any other: its family parses these fields and refuses what it does
not know, and the family's load rules read the tensors. What llama.cpp takes for granted, because the metadata
has no key for it, is written here beside its architecture. Sources: convert_hf_to_gguf.py and
src/llama-model.cpp of https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

import numpy as np

from penstock.runtime.errors import ConfigError, UnknownArchitecture
from penstock.runtime.loading.gguf import tensors as made
from penstock.runtime.loading.gguf.file import GgufFile, TensorInfo
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.load_rules import Tensor

Config: TypeAlias = dict[str, Any]
"""The fields of a config.json."""
Infos: TypeAlias = Mapping[str, TensorInfo]

_ROPE_FREQS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_READ_BEFORE = (_ROPE_FREQS, _LONG, _SHORT)
"""Tensors that are part of the configuration."""
_EMBEDDINGS, _HEAD = "token_embd.weight", "output.weight"
_HARMLESS = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
"""Keys of an architecture that change nothing: the number of tokens is that of the embeddings."""
_POOLING = (0, 3)
"""The numbers of poolings that are served: none, and the last token's."""
_MOST_EXPERTS = 1 << 12
_NEXT = "num_nextn_predict_layers"
_END_TOKENS = ("eos", "eot", "eom")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One architecture of llama.cpp.

    config: (its keys without the prefix, the stored tensors, fields of every model) -> what it adds to these
    fields, or puts in their place. names: for a layer, from the stored name to that of safetensors, in which
    {e} is the number of an expert. query_rows: how many rows of attn_q each channel of a query has; 0: heads
    are made of a latent, whose sizes `config` reads. turned: whether channels of queries and keys are stored
    in pairs. plus_one: whether one was added to the weights of norms.
    """

    config: Callable[[Fields, Infos, Config], Config]
    names: Mapping[str, str]
    query_rows: int = 1
    turned: bool = False
    plus_one: bool = False


def read_config(file: GgufFile) -> Config:
    """Read the fields of the config.json that the model would have. Raises UnknownArchitecture, or
    ConfigError with every key that cannot be served.
    """
    name, architecture = _architecture(file)
    prefix = f"{name}."
    own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    keys = Fields({key: _collapsed(key, value) for key, value in own.items()}, prefix)
    common = _common(keys, file) | _heads(keys, file.tensors, architecture)
    config = common | architecture.config(keys, file.tensors, common)
    keys.refuse_unread(_HARMLESS)
    if keys.problems:
        raise ConfigError(f"{file.path}: its metadata cannot be served: {'; '.join(keys.problems)}")
    return {key: value for key, value in config.items() if value is not None}


def find_tensors(file: GgufFile, config: Config) -> dict[str, Tensor]:
    """Find every tensor under the name that it has in a safetensors file. One that the architecture does not
    know keeps its name, under which the load rules refuse it.
    """
    _, architecture = _architecture(file)
    found: dict[str, Tensor] = {}
    heads = {name: config.get(f"num_{which}_heads") for name, which in _TURNED.items()}
    for stored, info in file.tensors.items():
        if stored in _READ_BEFORE or _is_further(stored, config):
            continue
        name, is_norm = _name(stored, architecture), "norm" in stored and "ssm_norm" not in stored
        part = stored.split(".")[-2] if "." in stored else stored
        if name in found or name.replace("{e}", "0") in found:
            raise ConfigError(f"{file.path}: tensor {stored} is there twice, under another name too: {name}")
        if architecture.turned and (num_heads := heads.get(part)):
            found[name] = made.turned_back(info, num_heads)
        elif "{e}" in name and len(info.shape) == 3 and info.shape[0] <= _MOST_EXPERTS:
            apart = enumerate(made.experts_apart(info))
            found |= {name.replace("{e}", str(expert)): tensor for expert, tensor in apart}
        elif part == "ffn_gate_inp_shexp" and len(info.shape) == 1:
            found[name] = made.as_row(info)
        elif architecture.plus_one and is_norm:
            found[name] = made.less_one(info)
        else:
            found[name] = made.whole(info)
    if config["model_type"] in ("qwen3_5_text", "qwen3_5_moe_text"):
        return _grouped_values(found, config)
    if config["model_type"] == "deepseek_v3":
        return _with_latents(found, config)
    return _fused(found, config) if config["model_type"] == "gpt_oss" else found


_TURNED = {"attn_q": "attention", "attn_k": "key_value"}


def _is_further(stored: str, config: Config) -> bool:
    """Say whether it is of a layer behind the others, which predicts further tokens and is not read."""
    layer = re.match(r"blk\.(\d+)\.", stored)
    return layer is not None and int(layer[1]) >= config["num_hidden_layers"] and config.get(_NEXT, 0) > 0


def _architecture(file: GgufFile) -> tuple[str, Architecture]:
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise ConfigError(f"{file.path}: general.type is {kind!r}: it is no model by itself")
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ConfigError(f"{file.path}: general.architecture must name the architecture, not {name!r}")
    if name not in ARCHITECTURES:
        similar = [*get_close_matches(name, ARCHITECTURES, n=1, cutoff=0.75), None][0]
        raise UnknownArchitecture(name, similar, where=" of a GGUF file")
    return name, ARCHITECTURES[name]


_BY_LAYER = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")


def _collapsed(key: str, value: object) -> object:
    """Return a value that is listed for each layer, but is the same for all, as one value."""
    if key in _BY_LAYER and isinstance(value, list) and value and value == value[:1] * len(value):
        return value[0]
    return value


def _common(keys: Fields, file: GgufFile) -> Config:
    """Read the fields that all models have."""
    keys.only("attention.causal", True)
    keys.only("pooling_type", *_POOLING)
    embeddings = file.tensors.get(_EMBEDDINGS)
    if embeddings is None:
        raise ConfigError(f"{file.path}: it has no tensor {_EMBEDDINGS}, so it is no model by itself")
    layers = keys.integer("block_count")
    if layers > len(file.tensors):
        keys.problem("block_count", f"the file has no tensors for {layers} layers")
    ends = [_token_id(file, f"tokenizer.ggml.{kind}_token_id") for kind in _END_TOKENS]
    return {
        "hidden_size": keys.integer("embedding_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": keys.integer("attention.head_count"),
        "intermediate_size": keys.integer("feed_forward_length", 1),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(keys, file),
        "vocab_size": embeddings.shape[0],
        "tie_word_embeddings": _HEAD not in file.tensors,
        "dtype": _dtype(file.tensors),
        "bos_token_id": _token_id(file, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
    }


def _heads(keys: Fields, infos: Infos, architecture: Architecture) -> Config:
    """Read the fields of heads of queries, keys and values. It is a problem unless there are as many channels
    as these heads have, before anything is computed for each of them.
    """
    if not architecture.query_rows:
        return {}
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    kv_heads = keys.integer("attention.head_count_kv", heads)
    head_dim = keys.integer("attention.key_length", max(1, hidden // heads))
    keys.only("attention.value_length", head_dim)
    rotated = keys.integer("rope.dimension_count", head_dim)
    rows = {"attn_q": architecture.query_rows * heads * head_dim}
    if "attn_qkv" in architecture.names and "attn_gate" not in architecture.names:
        rows["attn_qkv"] = (heads + 2 * kv_heads) * head_dim
    _check_rows(keys, infos, rows)
    return {
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "partial_rotary_factor": None if rotated == head_dim else rotated / head_dim,
    }


def _check_rows(keys: Fields, infos: Infos, rows: Mapping[str, int]) -> None:
    """Note a problem unless the file has one of these tensors, the first of which has so many rows."""
    endings = {f".{name}.weight": number for name, number in rows.items()}
    for name, info in infos.items():
        for ending, number in endings.items():
            if name.endswith(ending):
                if info.shape[0] != number:
                    has = f"{name} has {info.shape[0]} rows"
                    keys.problem("attention.head_count", f"{has}, not the {number} that all heads have")
                return
    keys.problem("attention.head_count", f"the file has no tensor {' or '.join(endings)} of any layer")


def _experts(keys: Fields, infos: Infos) -> int:
    """Tell how many experts there are, which the tensors must have."""
    count = keys.integer("expert_count")
    stacks = [info for name, info in infos.items() if name.endswith(".ffn_gate_exps.weight")]
    if not stacks or stacks[0].shape[0] != count or count > _MOST_EXPERTS:
        keys.problem("expert_count", f"no tensor ffn_gate_exps.weight is that of {count} experts")
        return 1
    return count


def _token_id(file: GgufFile, key: str) -> int | None:
    value = file.metadata.get(key)
    if value is None or value == (1 << 32) - 1:  # older converters write -1 for none
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{file.path}: {key} must be a token id, not {value!r}")
    return value


def _dtype(infos: Infos) -> str:
    """Say what the model is computed in unless the operator says otherwise: that of its matrices, or bfloat16
    if some are quantised.
    """
    kinds = {info.type.name for info in infos.values() if len(info.shape) > 1}
    if kinds <= {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def _rope_scaling(keys: Fields, file: GgufFile) -> Config | None:
    """Return the object rope_scaling. Llama 3.1's scaling is in no key: the file has what each frequency is
    divided by, which is the same in short and long contexts.
    """
    kind = keys.raw("rope.scaling.type")
    original = keys.optional_integer("rope.scaling.original_context_length")
    factor, scale = (keys.optional_number(f"rope.scaling.{name}") for name in ("factor", "attn_factor"))
    factors = {
        name: _factors(file, stored) for name, stored in (("long_factor", _LONG), ("short_factor", _SHORT))
    }
    if any(factors.values()):
        return {
            "rope_type": "longrope",
            "original_max_position_embeddings": original,
            "attention_factor": scale,
        } | factors
    if freqs := _factors(file, _ROPE_FREQS):
        if kind not in (None, "none"):
            keys.problem("rope.scaling.type", f"{kind!r} is not supported beside the tensor {_ROPE_FREQS}")
        context = keys.integer("context_length")
        same = {"short_factor": freqs, "long_factor": freqs}
        return {
            "rope_type": "longrope",
            "original_max_position_embeddings": context,
            "attention_factor": 1.0,
        } | same
    if kind == "none" or (kind is None and factor is None):
        return None
    if scale not in (None, 1.0):
        keys.problem("rope.scaling.attn_factor", f"{scale} is not supported with {kind}")
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        betas = {
            f"beta_{name}": keys.optional_number(f"rope.scaling.yarn_beta_{name}")
            for name in ("fast", "slow")
        }
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original} | betas
    keys.problem("rope.scaling.type", f"{kind!r} is not supported; supported: none, linear, yarn, longrope")
    return None


def _factors(file: GgufFile, stored: str) -> list[float] | None:
    """Read a short vector of a file, for the configuration."""
    info = file.tensors.get(stored)
    if info is None:
        return None
    if len(info.shape) != 1 or info.shape[0] > 1 << 12:
        raise ConfigError(f"{file.path}: tensor {stored} has shape {info.shape}")
    values: list[float] = made.whole(info)[0 : info.shape[0]].astype(np.float64).tolist()
    return values


def _name(stored: str, architecture: Architecture) -> str:
    """Return the name in safetensors files: "model.layers.3.self_attn.q_proj.weight" for
    "blk.3.attn_q.weight".
    """
    if stored in _TOP:
        return _TOP[stored]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+?)(?:\.(weight|bias))?", stored)
    if match is None or match[2] not in architecture.names:
        return stored
    name = f"model.layers.{int(match[1])}.{architecture.names[match[2]]}"
    return name if match[2] in _WHOLE_NAMES else f"{name}.{match[3]}"


_TOP = {
    _EMBEDDINGS: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    _HEAD: "lm_head.weight",
}
_WHOLE_NAMES = ("attn_sinks", "exp_probs_b", "ssm_a", "ssm_dt")
"""Tensors of which safetensors files have no .weight or .bias."""
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE = {**_ATTENTION, "ffn_norm": "post_attention_layernorm", **_MLP}
_SANDWICH = {
    **_ATTENTION,
    **_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def _llama(keys: Fields, infos: Infos, common: Config) -> Config:
    """Read Llama, Mistral and Mixtral, which share an architecture."""
    window = keys.optional_integer("attention.sliding_window", 0)
    chosen = keys.optional_integer("expert_used_count", 0)
    if keys.optional_integer("expert_count", 0):
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": _experts(keys, infos),
            "num_experts_per_tok": chosen,
            "sliding_window": window or None,
        }
    if window:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | _biases(infos)


def _biases(infos: Infos) -> Config:
    """Say whether there are biases, which no key says."""
    return {"attention_bias": "blk.0.attn_q.bias" in infos, "mlp_bias": "blk.0.ffn_down.bias" in infos}


def _qwen2(keys: Fields, infos: Infos, common: Config) -> Config:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def _qwen3(keys: Fields, infos: Infos, common: Config) -> Config:
    bias = _biases(infos)["attention_bias"]
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": bias}


def _qwen_experts(keys: Fields, infos: Infos) -> Config:
    return {
        "num_experts": _experts(keys, infos),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
    }


def _qwen2_moe(keys: Fields, infos: Infos, common: Config) -> Config:
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": keys.boolean("expert_weights_norm", False),
    } | _qwen_experts(keys, infos)


def _qwen3_moe(keys: Fields, infos: Infos, common: Config) -> Config:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": _biases(infos)["attention_bias"],
        "norm_topk_prob": keys.boolean("expert_weights_norm", True),
    } | _qwen_experts(keys, infos)


def _gemma(keys: Fields, common: Config, largest: int) -> Config:
    """Read what Gemma 2 and 3 have in common. largest: the number of layers of their 27B, in which alone
    scores are divided by another size than that of a head.
    """
    head_dim = common["head_dim"]
    if common["num_hidden_layers"] == largest:
        head_dim = common["hidden_size"] // common["num_attention_heads"]
    scale = keys.optional_number("attention.scale")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": head_dim if scale is None else scale**-2,
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "tie_word_embeddings": True,
    } | _layer_types(keys, common)


def _layer_types(keys: Fields, common: Config) -> Config:
    """Tell which layers have the sliding window, where a key says so: the others are every n-th one, or
    listed.
    """
    pattern, layers = keys.raw("attention.sliding_window_pattern"), common["num_hidden_layers"]
    if pattern is None:
        return {}
    if type(pattern) is int and pattern > 0:
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)]
    if not isinstance(pattern, list) or len(pattern) != layers or not set(map(type, pattern)) <= {bool}:
        keys.problem(
            "attention.sliding_window_pattern", f"must be a number, or true or false for {layers} layers"
        )
        return {}
    return {"layer_types": [f"{'sliding' if slides else 'full'}_attention" for slides in pattern]}


def _gemma2(keys: Fields, infos: Infos, common: Config) -> Config:
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    } | _gemma(keys, common, 46)


def _gemma3(keys: Fields, infos: Infos, common: Config) -> Config:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": keys.optional_number("final_logit_softcapping"),
    } | _gemma(keys, common, 62)


def _phi3(keys: Fields, infos: Infos, common: Config) -> Config:
    scaling = common["rope_scaling"]
    original = scaling and scaling.get("original_max_position_embeddings")
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "head_dim": None,  # transformers' Phi 3 knows no other than hidden_size / num_attention_heads
        "sliding_window": keys.optional_integer("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original,
    }


def _granite(keys: Fields, infos: Infos, common: Config) -> Config:
    return {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "attention_multiplier": keys.number("attention.scale", common["head_dim"] ** -0.5),
        "embedding_multiplier": keys.optional_number("embedding_scale"),
        "residual_multiplier": keys.optional_number("residual_scale"),
        "logits_scaling": keys.optional_number("logit_scale"),
    } | _biases(infos)


def _qwen35(keys: Fields, infos: Infos, common: Config) -> Config:
    """Read Qwen 3.5: three of four layers are recurrent, with several heads of values to one of keys."""
    value_heads, sections = keys.integer("ssm.time_step_rank"), keys.raw("rope.dimension_sections")
    further = keys.optional_integer("nextn_predict_layers", 0) or 0
    inner, known = keys.integer("ssm.inner_size"), sections if isinstance(sections, list) else []
    mrope = {"mrope_section": [size for size in known if size], "mrope_interleaved": True} if known else {}
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 0,  # the file has no such layers, which a config that says nothing has
        "num_hidden_layers": max(1, common["num_hidden_layers"] - further),
        _NEXT: further or None,
        "full_attention_interval": keys.integer("full_attention_interval", 4),
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": max(1, inner // value_heads),
        "rope_scaling": {**(common["rope_scaling"] or {"rope_type": "default"}), **mrope},
    }


def _qwen35_moe(keys: Fields, infos: Infos, common: Config) -> Config:
    return {
        **_qwen35(keys, infos, common),
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
    } | _qwen_experts(keys, infos)


def _grouped_values(found: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Arrange Qwen 3.5's tensors, with the heads of values that share a head of keys side by side."""
    groups, size = config["linear_num_key_heads"], config["linear_value_head_dim"]
    in_group = config["linear_num_value_heads"] // groups
    before = 2 * groups * config["linear_key_head_dim"]
    turned = dict(found)
    for name, tensor in found.items():
        if ".linear_attn." not in name or not isinstance(tensor, made.Stored):
            continue
        part = name.partition(".linear_attn.")[2]
        if part in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
            base = made.log_of_negated(tensor.info) if part == "A_log" else tensor
            turned[name] = made.grouped(base, groups, in_group, 1)
        elif part in ("in_proj_qkv.weight", "conv1d.weight"):
            by_head = made.grouped(tensor, groups, in_group, size, from_row=before)
            is_conv = part == "conv1d.weight" and len(tensor.shape) == 2
            turned[name] = made.with_middle_axis(by_head) if is_conv else by_head
        elif part == "in_proj_z.weight":
            turned[name] = made.grouped(tensor, groups, in_group, size)
        elif part == "out_proj.weight":
            turned[name] = made.grouped_columns(tensor, groups, in_group, size)
    return turned


def _grouped_experts(keys: Fields, infos: Infos, common: Config) -> Config:
    """Read what DeepSeek and GLM have in common. Layers that predict further tokens count as layers."""
    keys.only("expert_gating_func", 2)  # sigmoids
    further = keys.optional_integer("nextn_predict_layers", 0) or 0
    return {
        "num_hidden_layers": max(1, common["num_hidden_layers"] - further),
        _NEXT: further,
        "n_routed_experts": _experts(keys, infos),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_shared_experts": keys.integer("expert_shared_count"),
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
        "norm_topk_prob": keys.boolean("expert_weights_norm", False),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, minimum=0),
    }


def _glm4_moe(keys: Fields, infos: Infos, common: Config) -> Config:
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": _biases(infos)["attention_bias"],
        "use_qk_norm": "blk.0.attn_q_norm.weight" in infos,
    } | _grouped_experts(keys, infos, common)


def _deepseek2(keys: Fields, infos: Infos, common: Config) -> Config:
    """Read DeepSeek V3. Older files have sizes of whole heads where newer ones have those of latents."""
    heads, latent = common["num_attention_heads"], keys.integer("attention.kv_lora_rank")
    rotated, rank = keys.integer("rope.dimension_count"), keys.optional_integer("attention.q_lora_rank")
    is_newer = "attention.key_length_mla" in keys
    if is_newer:
        keys.only("attention.key_length", latent + rotated)
        keys.only("attention.value_length", latent)
    keys.only("attention.head_count_kv", 1 if is_newer else heads)
    suffix = "_mla" if is_newer else ""
    key, value = (keys.integer(f"attention.{name}_length{suffix}") for name in ("key", "value"))
    _check_rows(keys, infos, {"attn_q": heads * key} if rank is None else {"attn_q_b": heads * key})
    scaling, weight = common["rope_scaling"], keys.optional_number("rope.scaling.yarn_log_multiplier")
    if scaling is not None and weight is not None:
        scaling = scaling | {"mscale": 10 * weight, "mscale_all_dim": 10 * weight}
    return (
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "kv_lora_rank": latent,
            "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": max(1, key - rotated),
            "v_head_dim": value,
            "rope_scaling": scaling,
            "rope_interleave": True,
        }
        | _grouped_experts(keys, infos, common)
        | {"q_lora_rank": rank}
    )


def _with_latents(found: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Join keys and values of each layer of DeepSeek in one tensor, as its safetensors files have them."""
    joined = dict(found)
    for layer in range(config["num_hidden_layers"]):
        above = f"model.layers.{layer}.self_attn."
        keys, values = (found.get(f"{above}{name}_b.weight") for name in ("k", "v"))
        if (
            isinstance(keys, made.Stored)
            and isinstance(values, made.Stored)
            and len(keys.shape) == len(values.shape) == 3
            and (keys.shape[0], keys.shape[1]) == (values.shape[0], values.shape[2])
        ):
            del joined[f"{above}k_b.weight"], joined[f"{above}v_b.weight"]
            joined[f"{above}kv_b_proj.weight"] = made.keys_and_values(keys, values)
    return joined


def _gpt_oss(keys: Fields, infos: Infos, common: Config) -> Config:
    kinds = {info.type.name for name, info in infos.items() if name.endswith("_exps.weight")}
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": _experts(keys, infos),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "attention_bias": True,
        "rope_scaling": common["rope_scaling"] and {**common["rope_scaling"], "truncate": False},
        "quantization_config": {"quant_method": "mxfp4"} if kinds == {"MXFP4"} else None,
    }


def _fused(found: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Join gate and up of gpt-oss in one tensor, as its safetensors files have them."""
    joined = dict(found)
    for layer in range(config["num_hidden_layers"]):
        above = f"model.layers.{layer}.mlp.experts."
        for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            weights, vectors = ([f"{above}{part}.{kind}" for part in parts] for kind in ("weight", "bias"))
            matrices, added = (_alike(found, names, rank) for names, rank in ((weights, 3), (vectors, 2)))
            if matrices and added:
                for each in (*weights, *vectors):
                    del joined[each]
                joined[f"{above}{name}_bias"] = made.biases(added)
                if "quantization_config" in config:
                    joined[f"{above}{name}_blocks"], joined[f"{above}{name}_scales"] = made.mxfp4(matrices)
                else:
                    joined[f"{above}{name}"] = made.transposed(matrices)
    return joined


def _alike(found: Mapping[str, Tensor], names: list[str], rank: int) -> list[made.Stored]:
    """Return the tensors of these names, if all are there and have one shape; else none."""
    tensors = [tensor for name in names if isinstance(tensor := found.get(name), made.Stored)]
    shapes = {tensor.shape for tensor in tensors}
    is_whole = len(tensors) == len(names) and len(shapes) == 1 and len(tensors[0].shape) == rank
    return tensors if is_whole else []


_GROUPED = {
    **_PRE,
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_DEEPSEEK = {
    **_GROUPED,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b",
    "attn_v_b": "self_attn.v_b",
}
_QWEN35 = {
    **_PRE,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
}
_GPT_OSS = {
    **_ATTENTION,
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate",
    "ffn_up_exps": "mlp.experts.up",
    "ffn_down_exps": "mlp.experts.down",
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(config=_llama, names={**_PRE, **_MIXTRAL}, turned=True),
    "qwen2": Architecture(config=_qwen2, names=_PRE),
    "qwen3": Architecture(config=_qwen3, names=_PRE),
    "qwen2moe": Architecture(config=_qwen2_moe, names={**_PRE, **_EXPERTS}),
    "qwen3moe": Architecture(config=_qwen3_moe, names={**_PRE, **_EXPERTS}),
    "gemma2": Architecture(config=_gemma2, names=_SANDWICH, plus_one=True),
    "gemma3": Architecture(config=_gemma3, names=_SANDWICH, plus_one=True),
    "phi3": Architecture(
        config=_phi3, names={**_PRE, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    ),
    "qwen35": Architecture(config=_qwen35, names=_QWEN35, query_rows=2, plus_one=True),
    "qwen35moe": Architecture(config=_qwen35_moe, names={**_QWEN35, **_EXPERTS}, query_rows=2, plus_one=True),
    "granite": Architecture(config=_granite, names=_PRE, turned=True),
    "glm4moe": Architecture(
        config=_glm4_moe, names={**_GROUPED, "post_attention_norm": "post_attention_layernorm"}
    ),
    "deepseek2": Architecture(config=_deepseek2, names=_DEEPSEEK, query_rows=0),
    "gpt-oss": Architecture(config=_gpt_oss, names=_GPT_OSS),
}
"""llama.cpp's name to the architecture."""
