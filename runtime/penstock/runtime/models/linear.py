"""Linear layers and what decoders build of them, over any format of weights.

Weights keep the checkpoint's own [out, in] layout, or are packed for the CPU kernels (`native.linear`), or
are int8 with one scale an output. Products accumulate in float32 (int8 in int32), which is what XLA's CPU
backend is fast at (up to 7 times) and what keeps bfloat16 exact enough. The functions below are the fusions
that the kernels have; over other formats they are composed of plain operations with the same meaning.

Shapes: T tokens, E hidden_size. `num_rows` int32 []: rows of x from here on are padding, which kernels skip;
what results hold there is undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from penstock.runtime.native import linear as native


@dataclass(frozen=True, slots=True)
class LinearFormat:
    """How linear weights are kept. Layers that cannot be cut into the kernels' tiles stay unpacked."""

    packed: bool = False
    """Tiles for the native CPU kernels; activations must be bfloat16."""
    int8: bool = False
    """int8 with one float32 scale an output; activations are quantized row by row on the way."""


PLAIN = LinearFormat()


def matmul_transposed(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [T, in] times weight [out, in] transposed: float32 [T, out].

    Float32 operands are multiplied in full float32 (a GPU would otherwise use TF32).
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _matmul_int8(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """x [T, in] quantized by row times int8 weight [out, in] transposed: float32 [T, out]."""
    wide = x.astype(jnp.float32)
    peak = jnp.abs(wide).max(axis=1, keepdims=True)
    rounded = jnp.round(wide * jnp.where(peak > 0, np.float32(127) / peak, np.float32(0))).astype(jnp.int8)
    dimensions = (((1,), (1,)), ((), ()))
    exact = jax.lax.dot_general(rounded, weight, dimensions, preferred_element_type=jnp.int32)
    return exact.astype(jnp.float32) * (peak / np.float32(127)) * scale[0][None, :]


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


class Linear(nnx.Module):
    """y = x W^T + b. Its weight in one of the formats; `scale` float32 [2, out] with int8, see
    `native.Packed`.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        dtype: jnp.dtype,
        *,
        bias: bool = False,
        linear: LinearFormat = PLAIN,
    ) -> None:
        self.packed = linear.packed and native.can_pack(out_size, in_size)
        self.int8 = linear.int8
        shape = native.packed_shape(out_size, in_size, int8=self.int8) if self.packed else (out_size, in_size)
        self.weight = nnx.Param(jnp.zeros(shape, jnp.int8 if self.int8 else dtype))
        self.scale = nnx.Param(jnp.zeros((2, out_size), jnp.float32)) if self.int8 else None
        self.bias = nnx.Param(jnp.zeros((out_size,), dtype)) if bias else None

    def native(self) -> native.Packed:
        """The operands of the native kernel."""
        return native.Packed(
            self.weight[...],
            None if self.scale is None else self.scale[...],
            None if self.bias is None else self.bias[...],
        )

    def product(self, x: jax.Array) -> jax.Array:
        """x [T, in] -> float32 [T, out], unpacked weights only."""
        if self.scale is None:
            y = matmul_transposed(x, self.weight[...])
        else:
            y = _matmul_int8(x, self.weight[...], self.scale[...])
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)[None, :]


class Embedding(Linear):
    """Table [V, E]; as a linear layer it is the output head where the model ties them."""

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: jnp.dtype, linear: LinearFormat = PLAIN
    ) -> None:
        super().__init__(hidden_size, vocab_size, dtype, linear=linear)
        self.dtype = jnp.dtype(dtype)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """token_ids int32 [T] -> [T, E]; ids outside the table, only padding has them, read its edge."""
        table = self.weight[...]
        kept = table.dtype
        if kept.itemsize == 2:
            # As bits: else XLA's CPU backend gathers from a float32 copy of the whole table. The barrier
            # keeps that cast where it costs nothing: taken out of a loop of steps, it is a copy.
            table, token_ids = jax.lax.optimization_barrier((table, token_ids))
            table = jax.lax.bitcast_convert_type(table, jnp.uint16)
        if self.packed:
            ids = jnp.clip(token_ids, 0, table.shape[0] * native.BLOCK_OUT - 1)
            rows = table[ids // native.BLOCK_OUT, :, :, ids % native.BLOCK_OUT]
            rows = rows.reshape(ids.shape[0], -1)
        else:
            rows = table.at[token_ids].get(mode="clip")
        if kept.itemsize == 2:
            rows = jax.lax.bitcast_convert_type(rows, kept)
        if self.scale is None:
            return rows
        scale = self.scale[...][0].at[token_ids].get(mode="clip")
        return (rows.astype(jnp.float32) * scale[:, None]).astype(self.dtype)


def project(
    linears: Sequence[Linear], x: jax.Array, num_rows: jax.Array, *, norm: RMSNorm | None = None
) -> jax.Array:
    """norm(x) [T, in] through layers of equal input, results side by side: [T, sum of out] in x's dtype."""
    if all(linear.packed for linear in linears):
        weights = tuple(linear.native() for linear in linears)
        return native.linear(x, weights, num_rows=num_rows, **_norm_of(norm))
    if norm is not None:
        x = norm(x)
    parts = [_apply(linear, x, num_rows) for linear in linears]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def add_projected(linear: Linear, x: jax.Array, residual: jax.Array, num_rows: jax.Array) -> jax.Array:
    """residual [T, out] + linear(x)."""
    if linear.packed:
        return native.linear(x, (linear.native(),), num_rows=num_rows, residual=residual)
    return residual + linear.product(x).astype(x.dtype)


def project_gated(gate: Linear, up: Linear, x: jax.Array, num_rows: jax.Array, *, norm: RMSNorm) -> jax.Array:
    """silu(gate(norm(x))) * up(norm(x)) (SwiGLU, Shazeer 2020), the activation in float32."""
    if gate.packed and up.packed:
        return native.linear(x, (gate.native(), up.native()), num_rows=num_rows, gate=True, **_norm_of(norm))
    x = norm(x)
    opened = jax.nn.silu(_apply(gate, x, num_rows).astype(jnp.float32))
    return (opened * _apply(up, x, num_rows).astype(jnp.float32)).astype(x.dtype)


def logits(head: Linear, x: jax.Array, num_rows: jax.Array) -> jax.Array:
    """x [R, E] -> float32 [R, V]."""
    if head.packed:
        return native.linear(x, (head.native(),), num_rows=num_rows, out_dtype=np.float32)
    return head.product(x)


def _apply(linear: Linear, x: jax.Array, num_rows: jax.Array) -> jax.Array:
    if linear.packed:
        return native.linear(x, (linear.native(),), num_rows=num_rows)
    return linear.product(x).astype(x.dtype)


def _norm_of(norm: RMSNorm | None) -> native.NormOptions:
    return {} if norm is None else {"norm": norm.weight[...], "eps": norm.eps}
