"""Grouped-query attention with everything that families vary about it.

It takes the norm before it and the residual stream, because the CPU kernels fuse these with their products.
q, k and v are one product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from penstock.runtime.models import rope
from penstock.runtime.models.config import AttentionConfig, ModelConfig, QKNorm
from penstock.runtime.models.layers.inputs import LayerInputs, Residual
from penstock.runtime.models.linear import Linear, LinearFormat, project, project_apart, project_gate, summed
from penstock.runtime.models.load_rules import AXIS, Span
from penstock.runtime.models.norms import HeadNorms, Norm, RMSNorm, Vector, unit_mean_square
from penstock.runtime.models.pools import PoolPlanners
from penstock.runtime.ops.attention import AttentionOp, AttentionOptions
from penstock.runtime.ops.native.linear import HeadNorms as NativeNorms
from penstock.runtime.ops.native.linear import can_rotate, rotate_qkv

_NORMS: Mapping[QKNorm, NativeNorms] = {
    "none": "head",
    "head": "head",
    "all": "all",
    "head_after": "after",
    "l2_after": "after",
}
"""How the native kernel does what it can."""


class Attention(nnx.Module):
    """The attention of one layer."""

    def __init__(
        self,
        model: ModelConfig,
        config: AttentionConfig,
        layer: int,
        group: int,
        dtype: jnp.dtype,
        linear: LinearFormat,
        planners: PoolPlanners,
        *,
        in_size: int | None = None,
    ) -> None:
        """`group`: the cache group of the layer, see `LayerInputs.metas`. in_size: the channels that it
        reads; None: those of a hidden state.
        """
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        hidden, eps, offset = model.hidden_size, model.rms_norm_eps, model.norm_offset
        read = in_size or hidden
        parts = {"q_proj": heads * dim}
        self.shares_kv_of = model.layers[layer].shares_kv_of
        owns = self.shares_kv_of is None
        if owns:
            parts["k_proj"] = kv_heads * dim
        if owns and not config.values_are_keys:
            parts["v_proj"] = kv_heads * dim
        pieces = {"q_proj": config.pieces, "k_proj": config.kv_pieces, "v_proj": config.kv_pieces}
        cuts = {part: (Span(pieces[part], size),) for part, size in parts.items()}
        self.qkv_proj = Linear(
            read, parts, dtype, planners, bias=config.qkv_bias, linear=linear, cuts=cuts, apart=True
        )
        out = {"o_proj": hidden}
        self.o_proj = Linear(
            heads * dim, out, dtype, planners, bias=config.o_bias, linear=linear, sums=config.pieces
        )
        gate = {"q_gate": heads * dim}
        self.q_gate = (
            Linear(
                read,
                gate,
                dtype,
                planners,
                bias=config.qkv_bias,
                linear=linear,
                cuts={"q_gate": (Span(config.pieces, heads * dim),)},
            )
            if config.output_gate
            else None
        )

        def norm(num_heads: int, pieces: int) -> RMSNorm | HeadNorms | None:
            if config.qk_norm == "layer":
                return HeadNorms(num_heads, dim, eps, planners)
            if config.qk_norm in ("head", "head_after"):
                return RMSNorm(dim, eps, planners, offset=offset)
            if config.qk_norm == "all":
                return RMSNorm(num_heads * dim, eps, planners, offset=offset, pieces=pieces)
            return None

        self.q_norm = norm(heads, config.pieces)
        self.k_norm = norm(kv_heads, config.kv_pieces) if owns else None
        self.sinks = Vector("sinks", heads, planners, pieces=config.pieces) if config.sinks else None
        self.config, self.layer, self.group, self.eps = config, layer, group, eps
        vision = model.vision
        self.sees_ahead = vision is None or vision.both_ways != "windows" or config.window is not None
        """Whether tokens of an image may see those behind them: `AttentionMeta.reach` counts."""
        self.norms_are_cut = config.qk_norm == "all" and config.pieces > 1
        can = can_rotate(dim, config.rotary_dim) and config.qk_norm != "layer" and not self.norms_are_cut
        self.rotates_natively = linear.packed and can

    @property
    def is_native(self) -> bool:
        """Whether native kernels compute everything but `attention` itself."""
        linears = (self.qkv_proj, self.o_proj, self.q_gate)
        return self.rotates_natively and all(linear.packed for linear in linears if linear is not None)

    def __call__(
        self,
        x: jax.Array,
        norm: Norm | None,
        residual: Residual,
        kv: jax.Array,
        inputs: LayerInputs,
    ) -> tuple[jax.Array, jax.Array]:
        """Add to x what attention to norm(x) gives: x [T, E] -> ([T, E], the layer's new cache)."""
        config, pools = self.config, inputs.pools
        if self.rotates_natively:
            qkv = project(self.qkv_proj, x, inputs.num_tokens, pools, norm=norm)
            q, k, v = self._rotated_natively(self._clipped(qkv), inputs)
        else:
            parts = project_apart(self.qkv_proj, x, inputs.num_tokens, pools, norm=norm)
            q, k, v = self._rotated([self._clipped(part) for part in parts], inputs)
        if self.shares_kv_of is None:
            inputs.shared_kv[self.layer] = k, v
        # A layer that shares writes what is there already, because attention has no form that only reads.
        slopes = None
        if config.alibi is not None:
            first = jax.lax.axis_index(AXIS) * config.num_heads if config.pieces > 1 else 0
            every = jnp.asarray(alibi_slopes(config.num_heads * config.pieces, config.alibi))
            slopes = jax.lax.dynamic_slice_in_dim(every, first, config.num_heads)
        meta = inputs.metas[self.group]
        meta = meta if self.sees_ahead else meta._replace(reach=None)
        attend: AttentionOp = inputs.attention
        if inputs.distances is not None:
            attend = inputs.distances.attention(q, k, self.qkv_proj, pools, config.scale)
        out, kv = attend(
            q,
            k,
            v,
            kv,
            meta,
            AttentionOptions(
                scale=config.scale,
                sliding_window=config.window,
                softcap=config.softcap,
                sinks=None if self.sinks is None else self.sinks(pools).astype(jnp.float32),
                chunk=config.chunk,
                slopes=slopes,
            ),
        )
        out = out.reshape(x.shape[0], -1)
        if self.q_gate is not None:
            rows = inputs.num_tokens
            out = project_gate(self.q_gate, x, out, rows, pools, norm=norm, activation="sigmoid")
        return residual.add_projected(self.o_proj, out, x, inputs), kv

    def _clipped(self, qkv: jax.Array) -> jax.Array:
        clip = self.config.clip
        return (
            qkv if clip is None else jnp.clip(qkv, np.asarray(-clip, qkv.dtype), np.asarray(clip, qkv.dtype))
        )

    def _rotated_natively(
        self, qkv: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Turn qkv [T, (H + 2 K) * D] -> q [T, H, D], k and v [T, K, D], normalised, rotated and scaled."""
        config, pools = self.config, inputs.pools
        angles, scaling = inputs.angles, config.query_scaling
        assert not isinstance(self.q_norm, HeadNorms)
        assert not isinstance(self.k_norm, HeadNorms)
        turn = (None, None) if config.rope is None else angles.cos_sin(config.rope, config.rotary_dim)
        q, k, v = rotate_qkv(
            qkv,
            *turn,
            num_rows=inputs.num_tokens,
            num_heads=config.num_heads,
            num_kv_heads=0 if self.shares_kv_of is not None else config.num_kv_heads,
            q_norm=None if self.q_norm is None else pools.vectors,
            k_norm=None if self.k_norm is None else pools.vectors,
            q_norm_at=0 if self.q_norm is None else self.q_norm.weight_at.begin,
            k_norm_at=0 if self.k_norm is None else self.k_norm.weight_at.begin,
            norms=_NORMS[config.qk_norm],
            eps=self.eps,
            offset=0.0 if self.q_norm is None else self.q_norm.offset,
            v_norm=config.v_norm,
            values_are_keys=config.values_are_keys,
            q_scale=None if scaling is None else angles.query_scale(scaling),
        )
        return (q, k, v) if self.shares_kv_of is None else (q, *inputs.shared_kv[self.shares_kv_of])

    def _rotated(
        self, parts: Sequence[jax.Array], inputs: LayerInputs
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """As `_rotated_natively`, of what the product has of q [T, H * D], k and v [T, K * D]: without values
        these are the keys.
        """
        config = self.config
        q, k, v = parts[0], parts[min(1, len(parts) - 1)], parts[-1]
        squares = self._mean_squares(q, k) if self.norms_are_cut else (None, None)
        q = self._turned(q, self.q_norm, inputs, squares[0])
        if config.query_scaling is not None:
            scale = inputs.angles.query_scale(config.query_scaling)[:, None, None]
            q = (q.astype(jnp.float32) * scale).astype(q.dtype)
        if self.shares_kv_of is not None:
            return q, *inputs.shared_kv[self.shares_kv_of]
        v = v.reshape(-1, config.num_kv_heads, config.head_dim)
        k = self._turned(k, self.k_norm, inputs, squares[1])
        return q, k, unit_mean_square(v, self.eps) if config.v_norm else v

    def _mean_squares(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Compute the mean squares of the queries' channels on all devices, and of the keys', each float32
        [T, 1]. Keys that several devices have count once.
        """
        own = [jnp.mean(jnp.square(x.astype(jnp.float32)), axis=1, keepdims=True) for x in (q, k)]
        means = summed(jnp.concatenate(own, axis=1)) * np.float32(1 / self.config.pieces)
        return means[:, :1], means[:, 1:]

    def _turned(
        self,
        x: jax.Array,
        norm: RMSNorm | HeadNorms | None,
        inputs: LayerInputs,
        mean_square: jax.Array | None,
    ) -> jax.Array:
        """Turn queries or keys [T, heads * D] -> [T, heads, D], normalised and rotated."""
        config, pools = self.config, inputs.pools
        if isinstance(norm, RMSNorm) and config.qk_norm == "all":
            x = norm(x, pools, mean_square)
        x = x.reshape(x.shape[0], -1, config.head_dim)
        if norm is not None and config.qk_norm in ("head", "layer"):
            x = norm(x, pools)
        if config.rope is not None:
            cos, sin = inputs.angles.cos_sin(config.rope, config.rotary_dim)
            x = rope.rotate(x, cos, sin)
        if norm is not None and config.qk_norm == "head_after":
            return norm(x, pools)
        return unit_mean_square(x, self.eps) if config.qk_norm == "l2_after" else x


def alibi_slopes(num_heads: int, strength: float) -> npt.NDArray[np.float32]:
    """Compute the slope of each head, float32 [num_heads] (Press et al. 2021, arXiv 2108.12409): 2 to minus
    `strength` times 1/n, 2/n, ..., 1. If the number of heads is no power of two, n is the next one, and the
    even entries come first.
    """
    count = 1 << (num_heads - 1).bit_length()
    slopes = 2.0 ** -(strength * np.arange(1, count + 1) / count)
    if count > num_heads:
        slopes = np.concatenate([slopes[1::2], slopes[::2]])[:num_heads]
    return slopes.astype(np.float32)
