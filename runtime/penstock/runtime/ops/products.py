"""Products with weights in the checkpoint's layout, and the activations of gated layers, in XLA.

Products accumulate in float32, which XLA's CPU backend computes up to 7 times faster, and
which keeps bfloat16 exact enough.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from penstock.runtime.ops.cache_spec import TPU_LANES
from penstock.runtime.ops.native.activations import Activation

_TILE_ROWS = 8
_LARGE_BYTES = 1 << 20
"""Of a weight: a TPU copies a smaller one in about a microsecond."""
_GPT_OSS_SLOPE = np.float32(1.702)


def matmul_transposed(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Compute x [T, in] times weight [out, in] transposed: float32 [T, out].

    Float32 operands are multiplied in full float32 (a GPU would otherwise use TF32).
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, dimensions, precision=precision, preferred_element_type=jnp.float32)


def matmul_int8(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """Compute x [T, in] times int8 weight [out, in] transposed: float32 [T, out]; scale [out].

    Activations are not quantized, and every int8 is exact in bfloat16.
    """
    return matmul_transposed(x, weight.astype(x.dtype)) * scale[None, :]


def gated(activation: Activation, both: jax.Array, limit: float = 0.0) -> jax.Array:
    """Compute activation(gate) * up, float32 [T, N], where `both`, float32 [T, 2 N], has gate and up side by
    side. limit: that of "gpt_oss".
    """
    gate, up = jnp.split(both, 2, axis=1)
    match activation:
        case "silu":
            return jax.nn.silu(gate) * up
        case "gelu_tanh":
            return jax.nn.gelu(gate, approximate=True) * up
        case "gpt_oss":
            bound = np.float32(limit)
            gate, up = jnp.minimum(gate, bound), jnp.clip(up, -bound, bound)
            return gate * jax.nn.sigmoid(_GPT_OSS_SLOPE * gate) * (up + np.float32(1))
        case "sigmoid":
            return jax.nn.sigmoid(gate) * up


def has_outputs_last(weight: jax.Array) -> bool:
    """Say whether XLA's TPU backend stores weights [..., out, in] of such a shape in tiles of 128 outputs and
    8 inputs, and not of 8 outputs and 128 inputs: where so it pads less. It was seen to do so where both
    sizes are multiples of 8, for int8, bfloat16 and float32.
    """
    outputs, inputs = weight.shape[-2:]
    return _padded(inputs, outputs) < _padded(outputs, inputs)


def _padded(rows: int, lanes: int) -> int:
    return -(-rows // _TILE_ROWS) * _TILE_ROWS * -(-lanes // TPU_LANES) * TPU_LANES


def as_stored(weight: jax.Array) -> jax.Array:
    """Return weights [..., out, in] that a loop reads. On a TPU the loop reads them as they are stored. On a
    mesh XLA would otherwise choose another layout for the loop, and copy them for it.
    """
    if not has_outputs_last(weight):
        return weight
    *outer, outputs, inputs = range(weight.ndim)
    layout = Layout(major_to_minor=(*outer, inputs, outputs))
    stored: jax.Array = jax.lax.platform_dependent(
        weight,
        tpu=lambda weight: with_layout_constraint(weight, layout),
        default=lambda weight: weight,
    )
    return stored


def read_as_stored(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return x [T, in] and weight [out, in] for a product in a loop of steps. On a TPU it reads the weight
    `as_stored`. XLA moves what does not depend on the step to before the loop, and would lose the layout
    there, so it is asked for beside x, which each step computes. Small weights are left to XLA.
    """
    if weight.size * weight.dtype.itemsize < _LARGE_BYTES or not has_outputs_last(weight):
        return x, weight

    def stored(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, weight = jax.lax.optimization_barrier((x, weight))
        return x, as_stored(weight)

    operands: tuple[jax.Array, jax.Array] = jax.lax.platform_dependent(
        x, weight, tpu=stored, default=lambda *operands: operands
    )
    return operands
