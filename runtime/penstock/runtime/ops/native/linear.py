"""Linear layers over packed weights, the packing, and what stands between the qkv product and attention: the
Python side of `penstock_linear` (src/linear/linear.h) and `penstock_rotate` (src/rotate/rotate.h).

Products take bfloat16 activations, sum in float32 and round once. With integers activations are quantized on
the way (symmetric int8, with a scale for each 32 inputs of a row; on AMX with int8 weights 16 bits, with one
scale for the row), and the sums of a group are exact int32. Small floats are multiplied as bfloat16. A row of
results depends on its own row of activations alone, bit for bit; a NaN in that row makes all of its
results NaN.

`rotate_qkv` does in one pass what stands between the qkv product and attention: the norms of queries, keys
and values, and rotary embedding. In XLA this takes 6 ms a layer for 512 tokens of Qwen3-0.6B's shape on two
cores, more than the layer's products.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array
from numpy.typing import NDArray

from penstock.runtime.ops.adapters import LinearAdapters
from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.activations import ACTIVATIONS, Activation

BLOCK_OUT = 16
MOST_WEIGHTS = 3
"""The weights of one call of the kernel."""
_BF16_IN, _INT8_IN = 32, 64
"""Inputs of a tile, in bfloat16 and in int8; one in float32 has half as many as the former."""
_MOST_IN = 1 << 17
"""The inputs whose products of two int8, at most 128 * 127 each, an int32 can sum, as AMX does for a row."""
_QUANTIZED_AT_ONCE = 1 << 18
"""How many weights are quantized at once, so that intermediate values stay in the second-level cache."""


class Packed(NamedTuple):
    """One linear layer's weight as the kernels read it, with N outputs and K inputs.

    Scale and bias are the N columns from `scale_at` and `bias_at` on, of arrays that may hold those of other
    layers too: a program with fewer arrays is called faster.
    """

    tiles: Array
    """bfloat16 [N / 16, K / 32, 16, 16, 2], or int8 [N / 16, K / 64, 16, 16, 4], or the uint8 of `ops.codes`
    [N / 16, any], which has its scales."""
    scale: Array | None = None  # float32 [any] with int8: of each output
    bias: Array | None = None  # bfloat16 [any]
    scale_at: int = 0
    bias_at: int = 0


class NormOptions(TypedDict, total=False):
    """The arguments of `linear` that describe its norm."""

    norm: Array
    norm_at: int
    eps: float
    offset: float


def can_pack(out_size: int, in_size: int) -> bool:
    """Say whether the kernels multiply a weight [out_size, in_size] in either format: it can be cut into
    tiles, and no sum of so many products overflows.
    """
    return out_size % BLOCK_OUT == 0 and in_size % _INT8_IN == 0 and in_size <= _MOST_IN


def packed_shape(out_size: int, in_size: int, *, int8: bool, float32: bool = False) -> tuple[int, ...]:
    """Return the shape of the tiles of a weight [out_size, in_size], in bfloat16 unless int8 or float32 are
    true.
    """
    per_tile, group = (_BF16_IN // 2, 1) if float32 else (_INT8_IN, 4) if int8 else (_BF16_IN, 2)
    return (out_size // BLOCK_OUT, in_size // per_tile, per_tile // group, BLOCK_OUT, group)


def pack(weight: NDArray[np.generic]) -> NDArray[np.generic]:
    """Pack weight [N, K], bfloat16, int8 or float32 -> tiles."""
    int8, float32 = weight.dtype == np.int8, weight.dtype == np.float32
    tiles = np.empty(packed_shape(*weight.shape, int8=int8, float32=float32), weight.dtype)
    pack_into(tiles, np.ascontiguousarray(weight))
    return tiles


def pack_into(tiles: NDArray[np.generic], weight: NDArray[np.generic]) -> None:
    """Write the tiles of a weight [N, K] into `tiles`; both arrays are C-contiguous.

    A group of a tile has 4 bytes in each format, so each block of 16 outputs is a transposition of 32-bit
    words: numpy copies these seven times as fast as the elements of the groups.
    """
    blocks = weight.shape[0] // BLOCK_OUT
    words = weight.view(np.uint32).reshape(blocks, BLOCK_OUT, -1)
    np.copyto(tiles.view(np.uint32).reshape(blocks, -1, BLOCK_OUT), words.transpose(0, 2, 1))


def unpack(tiles: NDArray[np.generic]) -> NDArray[np.generic]:
    """Turn tiles -> weight [N, K]: the inverse of `pack`."""
    blocks, count, groups, outs, group = tiles.shape
    return np.ascontiguousarray(tiles.transpose(0, 3, 1, 2, 4).reshape(blocks * outs, count * groups * group))


def quantize(weight: NDArray[np.generic]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantise weight [N, K] -> symmetric int8 [N, K], and the scale of each output, float32 [N].

    If a weight is not finite, neither is its output's scale, so the output is NaN and not some number.
    """
    values = np.empty(weight.shape, np.int8)
    scale = np.empty(len(weight), np.float32)
    rows = max(1, _QUANTIZED_AT_ONCE // max(1, weight.shape[1]))
    with np.errstate(invalid="ignore"):
        for begin in range(0, len(weight), rows):
            part = slice(begin, begin + rows)
            wide = _widened(weight[part])
            peak = np.maximum(wide.max(axis=1), -wide.min(axis=1))
            scale[part] = np.where(peak == 0, np.float32(1), peak / np.float32(127))
            np.divide(wide, scale[part, None], out=wide)
            np.rint(wide, out=wide)
            np.copyto(values[part], wide, casting="unsafe")
    return values, scale


def _widened(values: NDArray[np.generic]) -> NDArray[np.float32]:
    """Make a copy in float32. A bfloat16 is the upper half of a float32, and numpy shifts faster than it
    converts.
    """
    if values.dtype != jnp.bfloat16:
        return values.astype(np.float32)
    bits = np.ascontiguousarray(values).view(np.uint16).astype(np.uint32)
    return np.left_shift(bits, 16, out=bits).view(np.float32)


def linear(
    x: Array,
    weights: tuple[Packed, ...],
    *,
    num_rows: Array,
    norm: Array | None = None,
    norm_at: int = 0,
    eps: float = 0.0,
    offset: float = 0.0,
    residual: Array | None = None,
    gate: Activation | None = None,
    limit: float = 7.0,
    up: Array | None = None,
    adapters: LinearAdapters | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    out_dtype: np.dtype[np.generic] | type[np.generic] = ml_dtypes.bfloat16,
) -> Array:
    """Compute x bfloat16 [T, K] times one to three weights [N_i, K] transposed, which may differ in their
    formats; the results lie side by side: [T, sum of N_i].

    norm bfloat16 [any], of which the K values from `norm_at` on count: x is first normalised by its root mean
    square, with `eps`, and multiplied by offset + norm.

    gate: the result is this activation of the first of two products times the second, bfloat16 [T, N_0], and
    both weights have one format; a single weight is taken for two, the halves of its outputs. With `up`,
    bfloat16 in the result's shape, it is the activation of all products times `up`. `limit` is that of
    "gpt_oss".

    Without `gate`, products (with their biases) are multiplied by `scale`; a `softcap` other than 0 makes y
    softcap * tanh(y / softcap); and residual, bfloat16 in the result's shape, is added.

    adapters: what is added to the products of rows that have one, before anything else is done with them; the
    others have the very same bits as without it. Their place has the outputs of all weights, and is
    `packed`.

    num_rows int32 []: rows from this one on are padding, which costs nothing, and whose results are
    undefined.

    Raises ValueError for options that do not go together: a gate with a residual, a scale, a softcap or
    (without `up`) results in float32, or `up` without a gate; and for adapters whose rank, inputs or outputs
    are no multiples of 16.
    """
    if gate is None and up is not None:
        raise ValueError("up: it belongs to a gate, and there is none")
    if gate is not None and (residual is not None or scale != 1.0 or softcap != 0.0):
        raise ValueError("gate: such a layer has no residual, scale or softcap")
    if gate is not None and up is None and out_dtype != ml_dtypes.bfloat16:
        raise ValueError("out_dtype: the results of a gated layer are bfloat16")
    library.load()
    none, no_scale = library.absent(jnp.bfloat16), library.absent(jnp.float32)
    operands: list[Array] = [
        x,
        num_rows,
        none if norm is None else norm,
        none if residual is None else residual,
        none if up is None else up,
    ]
    for weight in weights:
        operands += [
            weight.tiles,
            no_scale if weight.scale is None else weight.scale,
            none if weight.bias is None else weight.bias,
        ]
    adapter: list[int] = []
    if adapters is not None:
        rows, place = adapters
        if not place.packed or any(size % BLOCK_OUT for size in (rows.rank, place.in_size, *place.parts)):
            raise ValueError("adapters: must be packed; rank, inputs, outputs must be multiples of 16")
        operands += [rows.slots, rows.pool]
        adapter = [rows.rank, place.begin * rows.rank, *place.parts]
    widths = [weight.tiles.shape[0] * BLOCK_OUT for weight in weights]
    width = sum(widths) // 2 if gate is not None and up is None else sum(widths)
    places = [norm_at, *(place for weight in weights for place in (weight.scale_at, weight.bias_at))]
    result = jax.ShapeDtypeStruct((x.shape[0], width), out_dtype)
    call = jax.ffi.ffi_call("penstock_linear", result)
    out: Array = call(
        *operands,
        activation=np.int32(0 if gate is None else ACTIVATIONS[gate]),
        limit=np.float32(limit),
        eps=np.float32(eps),
        offset=np.float32(offset),
        scale=np.float32(scale),
        softcap=np.float32(softcap),
        at=np.array(places, np.int64),
        adapter=np.array(adapter, np.int64),
    )
    return out


HeadNorms = Literal["head", "all", "after"]
"""How queries and keys are normalised: by a norm over each head's channels; by one over the channels of all
heads of a token; or by the root mean square of each head after its rotation, maybe without a weight."""
_NUMBERS: Mapping[HeadNorms, int] = {"head": 0, "all": 1, "after": 2}
"""The numbers in src/rotate/rotate.h."""
_UNIT = 32


def can_rotate(head_dim: int, rotary_dim: int) -> bool:
    """Say whether the kernel can handle heads of this size of which so many channels are rotated."""
    return head_dim % _UNIT == 0 and rotary_dim % _UNIT == 0 and rotary_dim <= head_dim


def rotate_qkv(
    qkv: Array,
    cos: Array | None,
    sin: Array | None,
    *,
    num_rows: Array,
    num_heads: int,
    num_kv_heads: int,
    norms: HeadNorms = "head",
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    q_norm_at: int = 0,
    k_norm_at: int = 0,
    eps: float = 0.0,
    offset: float = 0.0,
    v_norm: bool = False,
    values_are_keys: bool = False,
    q_scale: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Turn qkv bfloat16 [T, (H + 2 K) * D] -> q [T, H, D], k and v [T, K, D], computed in float32 and rounded
    once.

    cos, sin: float32 [T, R / 2]. The first R channels of each head of queries and keys are rotated, channel i
    with channel i + R / 2; None: nothing is rotated.

    norms: how queries and keys are normalised. They are multiplied by offset + weight; the weights are D, or
    for "all" H * D and K * D, values of the bfloat16 arrays [any] q_norm and k_norm, from q_norm_at and
    k_norm_at on. Without such an array there is no norm, or with "after" one without weights. v_norm: each
    head of values is divided by its root mean square. `eps` is in the root of all of these.

    values_are_keys: qkv is [T, (H + K) * D], and the values are what the keys are before norm and rotation.
    q_scale: float32 [T], by which the queries of each token are multiplied at the end. num_rows int32 []:
    rows from this one on are padding, and undefined.

    Raises ValueError for sizes that `can_rotate` refuses.
    """
    num_tokens, channels = qkv.shape
    dim, left = divmod(channels, num_heads + (1 if values_are_keys else 2) * num_kv_heads)
    if left:
        raise ValueError(f"qkv: its {channels} channels are not those of equal heads")
    rotary_dim = 0 if cos is None else 2 * cos.shape[1]
    if not can_rotate(dim, rotary_dim):
        raise ValueError(f"cos: heads of {dim} channels with {rotary_dim} rotated do not suit the kernel")
    library.load()
    none, no_angles = library.absent(jnp.bfloat16), library.absent(jnp.float32, (num_tokens, 0))
    keys = jax.ShapeDtypeStruct((num_tokens, num_kv_heads, dim), jnp.bfloat16)
    call = jax.ffi.ffi_call(
        "penstock_rotate", (jax.ShapeDtypeStruct((num_tokens, num_heads, dim), jnp.bfloat16), keys, keys)
    )
    q, k, v = call(
        qkv,
        no_angles if cos is None else cos,
        no_angles if sin is None else sin,
        num_rows,
        none if q_norm is None else q_norm,
        none if k_norm is None else k_norm,
        library.absent(jnp.float32) if q_scale is None else q_scale,
        eps=np.float32(eps),
        offset=np.float32(offset),
        norms=np.int32(_NUMBERS[norms]),
        v_norm=v_norm,
        values_are_keys=values_are_keys,
        q_norm_at=np.int64(q_norm_at),
        k_norm_at=np.int64(k_norm_at),
    )
    return q, k, v


def rotate(
    x: Array,
    cos: Array | None,
    sin: Array | None,
    *,
    num_rows: Array,
    norms: HeadNorms = "head",
    norm: Array | None = None,
    norm_at: int = 0,
    eps: float = 0.0,
    offset: float = 0.0,
    scale: Array | None = None,
) -> Array:
    """Rotate x bfloat16 [T, H, D] -> the same shape: what `rotate_qkv` does to queries, which the arguments
    without "q_" in their names describe as there. It is for queries, or keys, that stand alone.
    """
    tokens, heads, dim = x.shape
    q, _, _ = rotate_qkv(
        x.reshape(tokens, heads * dim),
        cos,
        sin,
        num_rows=num_rows,
        num_heads=heads,
        num_kv_heads=0,
        norms=norms,
        q_norm=norm,
        q_norm_at=norm_at,
        eps=eps,
        offset=offset,
        q_scale=scale,
    )
    return q
