"""What stands between the qkv product and attention, in one pass: the norms of queries, keys and values, and
rotary embedding. The Python side of `penstock_rotate` (src/rotate/rotate.h).

In XLA this takes 6 ms a layer for 512 tokens of Qwen3-0.6B's shape on two cores, more than the layer's
products.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from penstock.runtime.ops.native import library

HeadNorms = Literal["head", "all", "l2_after"]
"""How queries and keys are normalised: by a norm over each head's channels; by one over the channels of all
heads of a token; or by the root mean square of each head after its rotation, without a weight."""
_NUMBERS: Mapping[HeadNorms, int] = {"head": 0, "all": 1, "l2_after": 2}
"""The numbers in src/rotate/rotate.h."""
_UNIT = 32


def can_rotate(head_dim: int, rotary_dim: int) -> bool:
    """Whether the kernel can handle heads of this size of which so many channels are rotated."""
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
    """qkv bfloat16 [T, (H + 2 K) * D] -> q [T, H, D], k and v [T, K, D], computed in float32 and rounded
    once.

    cos, sin: float32 [T, R / 2]. The first R channels of each head of queries and keys are rotated, channel i
    with channel i + R / 2; None: nothing is rotated.

    norms: how queries and keys are normalised. For "head" and "all" they are multiplied by offset + weight;
    the weights are D, or for "all" H * D and K * D, values of the bfloat16 arrays [any] q_norm and k_norm,
    from q_norm_at and k_norm_at on, and without such an array there is no norm. v_norm: each head of values
    is divided by its root mean square. `eps` is in the root of all of these.

    values_are_keys: qkv is [T, (H + K) * D], and the values are what the keys are before norm and rotation.
    q_scale: float32 [T], by which the queries of each token are multiplied at the end. num_rows int32 []:
    rows from this one on are padding, and undefined.

    Raises ValueError for sizes that `can_rotate` refuses, and for weights with "l2_after".
    """
    num_tokens, channels = qkv.shape
    dim, left = divmod(channels, num_heads + (1 if values_are_keys else 2) * num_kv_heads)
    if left:
        raise ValueError(f"qkv: its {channels} channels are not those of equal heads")
    rotary_dim = 0 if cos is None else 2 * cos.shape[1]
    if not can_rotate(dim, rotary_dim):
        raise ValueError(f"cos: heads of {dim} channels with {rotary_dim} rotated do not suit the kernel")
    if norms == "l2_after" and (q_norm is not None or k_norm is not None):
        raise ValueError('norms: "l2_after" has no weights')
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
    """x bfloat16 [T, H, D] -> the same shape: what `rotate_qkv` does to queries, which the arguments without
    "q_" in their names describe as there. It is for queries, or keys, that stand alone.
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
