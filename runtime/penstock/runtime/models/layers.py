"""Building blocks of the decoders, as flax.nnx modules.

Weights keep the checkpoint's own [out, in] layout; products contract the last dimensions and accumulate in
float32, which is what XLA's CPU backend is fast at (up to 7 times) and what keeps bfloat16 exact enough.
Shapes: T tokens of a ragged batch, E hidden_size, H query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.runtime.attention import AttentionMeta
from penstock.runtime.models import rope
from penstock.runtime.models.config import ModelConfig


class AttentionOp(Protocol):
    """`paged_attention`'s interface: writes k_new, v_new to the layer's cache, then attends.

    q [T, H, D] and k_new, v_new [T, K, D] after RoPE, in the model's dtype; kv is the layer's cache, opaque.
    Returns out [T, H, D] in q's dtype and the new cache. A token sees itself and the `sliding_window` - 1
    tokens before it; all of them when None.
    """

    def __call__(
        self,
        q: jax.Array,
        k_new: jax.Array,
        v_new: jax.Array,
        kv: jax.Array,
        meta: AttentionMeta,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> tuple[jax.Array, jax.Array]: ...


def matmul_transposed(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [T, in] times weight [out, in] transposed: float32 [T, out].

    Float32 operands are multiplied in full float32 (a GPU would otherwise use TF32).
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, dimensions, precision=precision, preferred_element_type=jnp.float32)


class Linear(nnx.Module):
    """y = x W^T + b, W [out, in]; accumulated in float32, returned in x's dtype."""

    def __init__(self, in_size: int, out_size: int, dtype: jnp.dtype, *, bias: bool = False) -> None:
        self.weight = nnx.Param(jnp.zeros((out_size, in_size), dtype))
        self.bias = nnx.Param(jnp.zeros((out_size,), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, in] -> [T, out]."""
        y = matmul_transposed(x, self.weight[...])
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)[None, :]
        return y.astype(x.dtype)


class Embedding(nnx.Module):
    """Table [V, E]; also the output head where the model ties them."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.zeros((vocab_size, hidden_size), dtype))

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """token_ids int32 [T] -> [T, E]; ids outside the table, only padding has them, read its edge."""
        return self.weight[...].at[token_ids].get(mode="clip")


class RMSNorm(nnx.Module):
    """Root mean square norm over the last dimension, in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., size] -> the same shape and dtype."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        weight = self.weight[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * jax.lax.rsqrt(mean_square + np.float32(self.eps)) * weight).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with RoPE, and per-head q and k norms where the model has them."""

    def __init__(self, config: ModelConfig, layer: int, dtype: jnp.dtype) -> None:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = Linear(config.hidden_size, heads * dim, dtype, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_heads * dim, dtype, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_heads * dim, dtype, bias=config.qkv_bias)
        self.o_proj = Linear(heads * dim, config.hidden_size, dtype, bias=config.o_bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.head_dim = dim
        self.scale = dim**-0.5
        self.sliding_window = config.sliding_windows[layer]

    def __call__(
        self,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        kv: jax.Array,
        meta: AttentionMeta,
        attention: AttentionOp,
    ) -> tuple[jax.Array, jax.Array]:
        """x [T, E], cos and sin float32 [T, D / 2] -> ([T, E], this layer's new cache)."""
        num_tokens = x.shape[0]
        q = self.q_proj(x).reshape(num_tokens, -1, self.head_dim)
        k = self.k_proj(x).reshape(num_tokens, -1, self.head_dim)
        v = self.v_proj(x).reshape(num_tokens, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
        out, kv = attention(q, k, v, kv, meta, scale=self.scale, sliding_window=self.sliding_window)
        return self.o_proj(out.reshape(num_tokens, -1)), kv


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, dtype, bias=bias)
        self.up_proj = Linear(hidden, inner, dtype, bias=bias)
        self.down_proj = Linear(inner, hidden, dtype, bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, E] -> [T, E]; the activation is computed in float32."""
        gate = jax.nn.silu(self.gate_proj(x).astype(jnp.float32))
        return self.down_proj((gate * self.up_proj(x).astype(jnp.float32)).astype(x.dtype))
