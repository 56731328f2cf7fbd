"""Checkpoints as GGUF files, written by the package `gguf`: an independent witness of names and layouts.

What llama.cpp's converter does beside it is done here: channels in pairs, norms plus one, stacks of experts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.runtime.loading.safetensors_files import find_tensors
from tests.support import gguf_package  # noqa: F401 -- skips tests where the package is missing

import gguf  # isort: skip

Array = npt.NDArray[Any]
Config = Mapping[str, Any]
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "glm4_moe": "glm4moe",
    "deepseek_v3": "deepseek2",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
"""model_type to llama.cpp's name."""
_NORMS_PLUS_ONE = ("gemma2", "gemma3", "qwen35", "qwen35moe")


_FACTORS = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_XS": (0,),
}
"""Where a block of types that the package reads and does not write has its float16."""
_OFFSETS = {"Q4_1": (0, 2), "Q5_1": (0, 2)}
"""The same for types with a scale and an offset, which it writes, too."""


def random_blocks(rng: np.random.Generator, kind: str, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Make a matrix of any codes and scales, with factors below 1: uint8 [rows, bytes]."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    for at in (_FACTORS | _OFFSETS).get(kind, (0,)):
        factors = np.exp2(rng.uniform(-9, 0, (*blocks.shape[:2], 1))).astype(np.float16)
        blocks[:, :, at : at + 2] = factors.view(np.uint8)
    return blocks.reshape(rows, -1)


def write_gguf(
    folder: Path,
    path: Path,
    *,
    kind: str = "F32",
    kinds: Mapping[str, str] | None = None,
    keys: Mapping[str, Any] | None = None,
    parts: int = 0,
) -> None:
    """Write the checkpoint of a folder. kind: the type of its matrices; those of types that the package
    cannot write are random. kinds: other types, by what the names of their matrices have. keys: further
    metadata, such as a tokenizer. parts: how many tensors each part has; 0: there is one file.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=parts)
    _write_config(writer, config)
    _write_keys(writer, keys or {})
    for name, values in _converted(folder, architecture, config).items():
        own = next((other for part, other in (kinds or {}).items() if part in name), kind)
        chosen = gguf.GGMLQuantizationType[own if values.ndim > 1 else "F32"]
        if chosen.name in _FACTORS:
            blocks = random_blocks(np.random.default_rng(len(name)), chosen.name, *values.shape)
        else:
            blocks = gguf.quants.quantize(np.ascontiguousarray(values), chosen)
        writer.add_tensor(name, blocks, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_keys(writer: Any, keys: Mapping[str, Any]) -> None:
    for key, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        if key not in writer.kv_data[0]:
            add[type(value)](key, value)


def _write_config(writer: Any, config: Config) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    if "kv_lora_rank" in config:
        _write_latents(writer, config)
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        share = config["rope_parameters"].get("partial_rotary_factor", 1)
        writer.add_rope_dimension_count(int(head_dim * share))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    for part, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id)):
        if config[f"{part}_token_id"] is not None:
            add(config[f"{part}_token_id"])
    rope = config["rope_parameters"]
    _write_rope(writer, rope.get("full_attention", rope))
    for field, add in (
        ("sliding_window", writer.add_sliding_window),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("num_local_experts", writer.add_expert_count),
        ("num_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("n_routed_experts", writer.add_expert_count),
        ("n_shared_experts", writer.add_expert_shared_count),
        ("n_group", writer.add_expert_group_count),
        ("topk_group", writer.add_expert_group_used_count),
        ("norm_topk_prob", writer.add_expert_weights_norm),
        ("routed_scaling_factor", writer.add_expert_weights_scale),
        ("first_k_dense_replace", writer.add_leading_dense_block_count),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("attention_multiplier", writer.add_attention_scale),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
    ):
        if config.get(field) and not (config["model_type"] == "qwen3_moe" and field == "norm_topk_prob"):
            add(config[field])
    if "n_routed_experts" in config:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config["model_type"] == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if "linear_num_key_heads" in config:
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
        writer.add_rope_dimension_sections([*config["rope_parameters"]["mrope_section"], 0])
    if "query_pre_attn_scalar" in config:
        writer.add_attention_scale(config["query_pre_attn_scalar"] ** -0.5)


def _write_latents(writer: Any, config: Config) -> None:
    """Write the sizes as the model attends to latents, and those of heads beside them."""
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])


def _write_rope(writer: Any, rope: Config) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _converted(folder: Path, architecture: str, config: Config) -> dict[str, Array]:
    """Map stored names to values."""
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        config["num_hidden_layers"],
    )
    found = {
        name: entry[0 : entry.shape[0]].astype(np.float32) for name, entry in find_tensors(folder).items()
    }
    converted: dict[str, Array] = {}
    for name, values in _stacked(found).items():
        if ".linear_attn." in name:
            converted |= _recurrent(name, values, config)
            continue
        if architecture in _NORMS_PLUS_ONE and name.endswith("norm.weight"):
            values = values + 1
        for projection, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            if architecture in ("llama", "granite") and f".{projection}_proj." in name:
                turned = values.reshape(config[heads], 2, -1, *values.shape[1:]).swapaxes(1, 2)
                values = turned.reshape(values.shape)
        if name.endswith("shared_expert_gate.weight"):
            values = values[0]
        if name.endswith("kv_b_proj.weight"):
            converted |= _latents(name, values, config)
            continue
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        base, kind = (name, "weight") if name.endswith(".sinks") else name.rsplit(".", 1)
        stored = names.get_name(base)
        assert stored is not None, name
        converted[f"{stored}.{kind}"] = values
    if config["rope_parameters"].get("rope_type") == "llama3":
        converted["rope_freqs.weight"] = _llama3_factors(config)
    return converted


def _recurrent(name: str, values: Array, config: Config) -> dict[str, Array]:
    """Return a tensor of Qwen 3.5's recurrent layers: what has values comes with the first head of each group
    of values first (llama.cpp's converter, _LinearAttentionVReorderBase).
    """
    layer, part = name.split(".")[2], name.partition(".linear_attn.")[2]
    groups, size = config["linear_num_key_heads"], config["linear_value_head_dim"]
    before = 2 * groups * config["linear_key_head_dim"]
    in_group = config["linear_num_value_heads"] // groups

    def tiled(rows: Array, size: int) -> Array:
        return rows.reshape(groups, in_group, size, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    if part == "conv1d.weight":
        values = values[:, 0]
    if part in ("conv1d.weight", "in_proj_qkv.weight"):
        values = np.concatenate([values[:before], tiled(values[before:], size)])
    elif part == "in_proj_z.weight":
        values = tiled(values, size)
    elif part == "out_proj.weight":
        values = tiled(values.T, size).T
    elif part != "norm.weight":
        values = tiled(-np.exp(values) if part == "A_log" else values, 1)
    return {f"blk.{layer}.{_RECURRENT[part]}": values}


_RECURRENT = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
}


def _latents(name: str, values: Array, config: Config) -> dict[str, Array]:
    """Keys, turned, apart from values."""
    sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
    by_head = values.reshape(config["num_attention_heads"], sum(sizes), -1)
    keys, of_values = np.split(by_head, sizes[:1], axis=1)
    above = f"blk.{name.split('.')[2]}."
    return {f"{above}attn_k_b.weight": keys.swapaxes(1, 2), f"{above}attn_v_b.weight": of_values}


def _stacked(found: Mapping[str, Array]) -> dict[str, Array]:
    """With the experts of each layer in one tensor, and gpt-oss's gate and up apart."""
    stacks: dict[str, dict[int, Array]] = {}
    kept: dict[str, Array] = {}
    for name, values in found.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if match:
            stacks.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = values
        elif ".experts.gate_up_proj" in name:
            kind = "bias" if name.endswith("_bias") else "weight"
            base = name.removesuffix("_bias").removesuffix("gate_up_proj")
            turned = values if kind == "bias" else values.swapaxes(1, 2)
            kept[f"{base}gate_proj.{kind}"], kept[f"{base}up_proj.{kind}"] = turned[:, 0::2], turned[:, 1::2]
        elif name.endswith(".experts.down_proj_bias"):
            kept[name.removesuffix("_bias") + ".bias"] = values
        elif name.endswith(".experts.down_proj"):
            kept[f"{name}.weight"] = values.swapaxes(1, 2)
        else:
            kept[name] = values
    for name, experts in stacks.items():
        kept[name] = np.stack([experts[i] for i in range(len(experts))])
    return kept


def _llama3_factors(config: Config) -> Array:
    """Return what each frequency is divided by (llama.cpp's converter, LlamaModel.generate_extra_tensors)."""
    rope = config["rope_parameters"]
    pairs = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    wavelengths = 2 * np.pi * rope["rope_theta"] ** pairs
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    smooth = np.clip(smooth, 0, 1)
    factors: Array = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return factors.astype(np.float32)
