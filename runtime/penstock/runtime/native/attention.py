"""Paged attention in C++: the Python side of `penstock_attention` (src/attention.h).

Lengths, starts and page tables are read at run time, so a program is bound to no context length, and padding
tokens and rows cost nothing. A token's bits depend on its own row alone: not on the rows beside it, on the
number of threads, or on whether its prompt was cut into chunks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_DTYPES = {np.dtype(jnp.bfloat16): np.dtype(np.uint16), np.dtype(np.float32): np.dtype(np.float32)}
"""Of the model, and of its cache."""
_MULTIPLE = 16
_MAX_DIM = 512


def supports(q: Array, kv: Array) -> bool:
    """Whether the kernels handle queries [T, H, D] against a cache [page, 2, KH, page size, D]."""
    return (
        _DTYPES.get(np.dtype(q.dtype)) == kv.dtype
        and kv.shape[4] % _MULTIPLE == 0
        and kv.shape[4] <= _MAX_DIM
        and kv.shape[3] % _MULTIPLE == 0
    )


def attend(
    q: Array,
    k_new: Array,
    v_new: Array,
    kv: Array,
    starts: Array,
    q_lens: Array,
    page_table: Array,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Array | None,
    chunk: int | None,
) -> tuple[Array, Array]:
    """`penstock.runtime.attention.paged_attention` with the rows as they are.

    starts, q_lens int32[R]; the rows' tokens lie one after the other from token 0; page_table int32[R, P].
    The result's cache is the argument's memory. A page id or length outside the cache fails the program.
    """
    shapes = (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(kv.shape, kv.dtype))
    call = jax.ffi.ffi_call("penstock_attention", shapes, input_output_aliases={3: 1})
    out, kv = call(
        q,
        k_new,
        v_new,
        kv,
        starts,
        q_lens,
        page_table,
        jnp.zeros((0,), jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        scale=np.float32(scale),
        softcap=np.float32(softcap or 0.0),
        window=np.int32(sliding_window or 0),
        chunk=np.int32(chunk or 0),
    )
    return out, kv
