"""Attention and MLP of the decoders, as flax.nnx modules.

Both take the norm before them and the residual stream, because the CPU kernels fuse these with their
products, and the model's pools of small parameters. q, k and v are one product, and so are gate and up.
Shapes: T tokens of a ragged batch, E hidden_size, H query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.runtime.models import rope
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.linear import (
    Linear,
    LinearFormat,
    RMSNorm,
    add_projected,
    project,
    project_gated,
)
from penstock.runtime.models.pools import PoolPlanners, Pools
from penstock.runtime.ops.attention import AttentionMeta, AttentionOp
from penstock.runtime.ops.native.rotate import can_rotate, rotate_qkv


class LayerInputs(NamedTuple):
    """The values that every layer reads and none changes."""

    cos: jax.Array
    """Cosines of RoPE's angles, float32 [T, D / 2]."""
    sin: jax.Array
    """Sines of RoPE's angles, float32 [T, D / 2]."""
    meta: AttentionMeta
    attention: AttentionOp
    pools: Pools


class Attention(nnx.Module):
    """Grouped-query attention with RoPE, and per-head q and k norms where the model has them."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: jnp.dtype,
        linear: LinearFormat,
        planners: PoolPlanners,
    ) -> None:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        hidden, eps = config.hidden_size, config.rms_norm_eps
        parts = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        self.qkv_proj = Linear(hidden, parts, dtype, planners, bias=config.qkv_bias, linear=linear)
        out = {"o_proj": hidden}
        self.o_proj = Linear(heads * dim, out, dtype, planners, bias=config.o_bias, linear=linear)
        self.q_norm = RMSNorm(dim, eps, planners) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, eps, planners) if config.qk_norm else None
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, dim
        self.scale = dim**-0.5
        self.rotates_natively = linear.packed and can_rotate(dim)
        self.sliding_window = config.sliding_windows[layer]

    @property
    def is_native(self) -> bool:
        """Whether native kernels compute everything but `attention` itself."""
        linears = (self.qkv_proj, self.o_proj)
        return self.rotates_natively and all(linear.packed for linear in linears)

    def __call__(
        self,
        x: jax.Array,
        norm: RMSNorm,
        kv: jax.Array,
        inputs: LayerInputs,
    ) -> tuple[jax.Array, jax.Array]:
        """x + attention(norm(x)): x [T, E] -> ([T, E], the layer's new cache)."""
        meta, pools = inputs.meta, inputs.pools
        qkv = project(self.qkv_proj, x, meta.num_tokens, pools, norm=norm)
        q, k, v = self._rotated(qkv, inputs)
        out, kv = inputs.attention(q, k, v, kv, meta, scale=self.scale, sliding_window=self.sliding_window)
        out = out.reshape(x.shape[0], -1)
        return add_projected(self.o_proj, out, x, meta.num_tokens, pools), kv

    def _rotated(self, qkv: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        """qkv [T, (H + 2 K) * D] -> q [T, H, D], k and v [T, K, D], normalised and rotated."""
        cos, sin, pools = inputs.cos, inputs.sin, inputs.pools
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if self.rotates_natively:
            return rotate_qkv(
                qkv,
                cos,
                sin,
                num_rows=inputs.meta.num_tokens,
                num_heads=heads,
                num_kv_heads=kv_heads,
                q_norm=None if self.q_norm is None else pools.vectors,
                k_norm=None if self.k_norm is None else pools.vectors,
                q_norm_at=0 if self.q_norm is None else self.q_norm.weight_at.begin,
                k_norm_at=0 if self.k_norm is None else self.k_norm.weight_at.begin,
                eps=0.0 if self.q_norm is None else self.q_norm.eps,
            )
        qkv = qkv.reshape(qkv.shape[0], -1, self.head_dim)
        q, k, v = jnp.split(qkv, (heads, heads + kv_heads), axis=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, pools), self.k_norm(k, pools)
        return rope.rotate(q, cos, sin), rope.rotate(k, cos, sin), v


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(
        self, config: ModelConfig, dtype: jnp.dtype, linear: LinearFormat, planners: PoolPlanners
    ) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = Linear(hidden, parts, dtype, planners, bias=bias, linear=linear)
        self.down_proj = Linear(inner, {"down_proj": hidden}, dtype, planners, bias=bias, linear=linear)

    @property
    def is_native(self) -> bool:
        """Whether native kernels compute this layer."""
        return all(linear.packed for linear in (self.gate_up_proj, self.down_proj))

    def __call__(self, x: jax.Array, norm: RMSNorm, inputs: LayerInputs) -> jax.Array:
        """x + mlp(norm(x)): x [T, E] -> [T, E]."""
        num_tokens, pools = inputs.meta.num_tokens, inputs.pools
        inner = project_gated(self.gate_up_proj, x, num_tokens, pools, norm=norm)
        return add_projected(self.down_proj, inner, x, num_tokens, pools)
