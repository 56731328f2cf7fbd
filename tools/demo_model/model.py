"""The training forward of the demo model: Qwen3 in plain JAX, float32, one array per checkpoint tensor.

It shares no code with the engine on purpose: the checkpoint it writes, and the samples taken through it, are
an independent witness of what the engine should compute. Parameters are a flat dict from the Hugging Face
tensor name to an array in the checkpoint's own [out, in] layout, so saving is a cast and nothing else.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the network, under the names of Hugging Face's Qwen3 configuration."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 16384
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        """Read the sizes back from a checkpoint's `config.json` (a dict)."""
        values = {name: config[name] for name in asdict(cls()) if name != "rope_theta"}
        rope = config.get("rope_parameters") or config
        return cls(rope_theta=rope["rope_theta"], **values)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return every tensor of the checkpoint and its shape; matrices are [out, in], the head is the
    embedding.
    """
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "self_attn.q_norm.weight": (dim,),
            prefix + "self_attn.k_norm.weight": (dim,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def init_params(config: ModelConfig, seed: int) -> Params:
    """Make random float32 parameters: norms at one, matrices normal with 1/sqrt(fan-in).

    The two matrices of a layer that write to the residual stream are shrunk by the depth, to start it at unit
    scale.
    """
    shapes = parameter_shapes(config)
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    depth = (2 * config.num_hidden_layers) ** -0.5
    params: Params = {}
    for key, (name, shape) in zip(keys, sorted(shapes.items()), strict=True):
        if len(shape) == 1:
            params[name] = jnp.ones(shape, jnp.float32)
            continue
        scale = 0.02 if "embed" in name else shape[1] ** -0.5
        if "o_proj" in name or "down_proj" in name:
            scale *= depth
        params[name] = scale * jax.random.normal(key, shape, jnp.float32)
    return params


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Compute the root-mean-square norm over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotate x [batch, seq, heads, dim] by positions [batch, seq], pairing i with i + dim/2 as Qwen does."""
    half = x.shape[-1] // 2
    rate = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, :, None, None].astype(jnp.float32) * rate[None, None, None, :]
    low, high = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Compute x [..., in] times a checkpoint matrix [out, in]; flat rows cost XLA's CPU backend a fifth
    less.
    """
    return (x.reshape(-1, x.shape[-1]) @ weight.T).reshape(*x.shape[:-1], -1)


def attention(params: Params, prefix: str, x: jax.Array, mask: jax.Array, config: ModelConfig) -> jax.Array:
    """Compute grouped-query attention over x [batch, seq, hidden]; mask [batch, seq, seq] is True where
    visible.
    """
    batch, seq, _ = x.shape
    groups = config.num_attention_heads // config.num_key_value_heads
    dim = config.head_dim
    positions = jnp.broadcast_to(jnp.arange(seq)[None, :], (batch, seq))
    q = linear(x, params[prefix + "q_proj.weight"]).reshape(batch, seq, -1, dim)
    k = linear(x, params[prefix + "k_proj.weight"]).reshape(batch, seq, -1, dim)
    v = linear(x, params[prefix + "v_proj.weight"]).reshape(batch, seq, -1, dim)
    q = rope(rms_norm(q, params[prefix + "q_norm.weight"], config.rms_norm_eps), positions, config.rope_theta)
    k = rope(rms_norm(k, params[prefix + "k_norm.weight"], config.rms_norm_eps), positions, config.rope_theta)
    # [batch, heads, seq, dim] with the shared keys repeated: XLA's CPU products run 3x faster this way.
    q = q.transpose(0, 2, 1, 3)
    k = jnp.repeat(k.transpose(0, 2, 1, 3), groups, axis=1)
    v = jnp.repeat(v.transpose(0, 2, 1, 3), groups, axis=1)
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * dim**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
    out = jnp.einsum("bhqk,bhkd->bhqd", weights, v).transpose(0, 2, 1, 3).reshape(batch, seq, -1)
    return linear(out, params[prefix + "o_proj.weight"])


def forward(params: Params, tokens: jax.Array, segments: jax.Array, config: ModelConfig) -> jax.Array:
    """Compute logits [batch, seq, vocab] of tokens [batch, seq].

    `segments` [batch, seq] numbers the documents packed into a row; a token sees only its own document.
    Positions run on through the row: rotary attention depends on differences alone.
    """
    seq = tokens.shape[1]
    mask = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((1, seq, seq), bool))
    x = params["model.embed_tokens.weight"][tokens]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        h = rms_norm(x, params[prefix + "input_layernorm.weight"], config.rms_norm_eps)
        x = x + attention(params, prefix + "self_attn.", h, mask, config)
        h = rms_norm(x, params[prefix + "post_attention_layernorm.weight"], config.rms_norm_eps)
        gate = jax.nn.silu(linear(h, params[prefix + "mlp.gate_proj.weight"]))
        up = linear(h, params[prefix + "mlp.up_proj.weight"])
        x = x + linear(gate * up, params[prefix + "mlp.down_proj.weight"])
    x = rms_norm(x, params["model.norm.weight"], config.rms_norm_eps)
    return linear(x, params["model.embed_tokens.weight"])


def loss_fn(
    params: Params, tokens: jax.Array, segments: jax.Array, weights: jax.Array, config: ModelConfig
) -> jax.Array:
    """Compute the mean cross-entropy in nats of predicting tokens[:, 1:], each target counted by
    weights[:, 1:].
    """
    logits = forward(params, tokens[:, :-1], segments[:, :-1], config)
    target = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - target
    return jnp.sum(losses * weights[:, 1:]) / jnp.maximum(jnp.sum(weights[:, 1:]), 1.0)
