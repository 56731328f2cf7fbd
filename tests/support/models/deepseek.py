"""A witness of DeepSeek V3 with dense layers, in float64 and numpy, written from the paper's own form (arXiv
2405.04434, section 2.1): each head has a key and a value of its own, made of the token's latent, and nothing
is absorbed. It computes a whole sequence at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def _norm(x: Array, weight: Array, eps: float) -> Array:
    normed: Array = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight
    return normed


def _silu(x: Array) -> Array:
    silu: Array = x / (1 + np.exp(-x))
    return silu


def _frequencies(config: Mapping[str, Any]) -> Array:
    """Radians per position of each pair (YaRN, arXiv 2309.00071, section 3.2)."""
    dim, yarn = config["qk_rope_head_dim"], config.get("rope_scaling")
    plain = config["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    if not yarn:
        return np.asarray(plain)

    def pair(turns: float) -> float:
        length = yarn["original_max_position_embeddings"]
        return float(dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config["rope_theta"])))

    low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), dim - 1)
    slow = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return np.asarray(plain * (1 - slow) + plain / yarn["factor"] * slow)


def _turned(x: Array, config: Mapping[str, Any]) -> Array:
    """x [T, ..., R] as complex numbers, each times e^(i angle); real parts first, then imaginary ones."""
    if config["rope_interleave"]:
        pairs = x[..., 0::2] + 1j * x[..., 1::2]
    else:
        half = x.shape[-1] // 2
        pairs = x[..., :half] + 1j * x[..., half:]
    angles = np.outer(np.arange(len(x)), _frequencies(config))
    pairs = pairs * np.exp(1j * angles).reshape(len(x), *(1,) * (x.ndim - 2), -1)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def logits(config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], tokens: list[int]) -> Array:
    """Return the logits after each of `tokens`, [T, V]; `tensors` are those of the checkpoint."""
    get = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
    latent_dim, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    eps, count = config["rms_norm_eps"], len(tokens)
    scale = (nope + rope) ** -0.5
    if yarn := config.get("rope_scaling"):
        scale *= (0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1) ** 2
    x = get["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."

        def linear(name: str, y: Array, prefix: str = prefix) -> Array:
            product: Array = y @ get[f"{prefix}{name}.weight"].T + get.get(f"{prefix}{name}.bias", 0.0)
            return product

        y = _norm(x, get[f"{prefix}input_layernorm.weight"], eps)
        if config["q_lora_rank"] is None:
            q = linear("self_attn.q_proj", y)
        else:
            norm = get[f"{prefix}self_attn.q_a_layernorm.weight"]
            q = linear("self_attn.q_b_proj", _norm(linear("self_attn.q_a_proj", y), norm, 1e-6))
        q = q.reshape(count, heads, nope + rope)
        kept = linear("self_attn.kv_a_proj_with_mqa", y)
        latent = _norm(kept[:, :latent_dim], get[f"{prefix}self_attn.kv_a_layernorm.weight"], 1e-6)
        both = linear("self_attn.kv_b_proj", latent).reshape(count, heads, -1)
        shared = np.repeat(_turned(kept[:, None, latent_dim:], config), heads, axis=1)
        keys = np.concatenate([both[..., :nope], shared], axis=-1)
        q = np.concatenate([q[..., :nope], _turned(q[..., nope:], config)], axis=-1)
        scores = np.einsum("qhd,khd->hqk", q, keys) * scale
        scores = np.where(np.tril(np.ones((count, count), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", weights, both[..., nope:]).reshape(count, -1)
        x = x + linear("self_attn.o_proj", out)
        y = _norm(x, get[f"{prefix}post_attention_layernorm.weight"], eps)
        inner = _silu(linear("mlp.gate_proj", y)) * linear("mlp.up_proj", y)
        x = x + linear("mlp.down_proj", inner)
    last: Array = _norm(x, get["model.norm.weight"], eps) @ get["lm_head.weight"].T
    return last
