"""Paged attention in C++: the Python side of src/attention/attention.cc.

Lengths, starts and page tables are read at run time, so a program is not compiled for a context length, and
padding tokens and rows cost nothing. A token's bits depend on its own row alone: not on the rows beside it,
the number of threads, or how its prompt was cut into chunks.

Each query's keys are cut at multiples of 256 positions; parts are computed on their own and merged in order.
So work may be cut and shared in any way, and the bits stay. Decode rows whose page tables begin alike read
common parts once. Which parts make a task is planned once a step (`plan`), in a buffer as large as the
shapes allow.

Keys of an int8 cache are spread over their channels (`kv_rows.spread`), unless these are the values, too.
Each task then spreads the queries that it loads, and rounds them to the model's dtype.

Numbers of an int8 cache are multiplied without their scales: a key's scale multiplies its scores, a value's
its probabilities before these are rounded. Scales of values that nobody attends to are not read, because they
may be NaN; scores of such keys are masked. Without AMX queries and probabilities become int16 with a scale of
their own, because such products are added up in int32, faster than those of float32 and exactly. A query's
numbers are rounded by about 2^-16 of its largest, and a part's probabilities, times their values' scales, by
2^-16 of theirs: little beside the 2^-8 of each KV row's largest that int8 rounds off. AMX multiplies them as
bfloat16. Without AMX, and with it for heads narrower than a tile, one code (`attention_lanes.h`) serves all
instruction sets, both caches, decoding and prompts: it multiplies the cache's rows where they lie.

In decoding a unit of work is one head of one part. A thread takes several heads of a part one after the
other, because they lie side by side in a page. While it scores keys it prefetches the values of the same part
from memory, and while it adds up values the next keys; without AMX also the next tile from the second cache
to the first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from penstock.runtime.ops.attention import AttentionMeta, AttentionOptions, check_cache, paged_attention
from penstock.runtime.ops.native import library

_DTYPES = {np.dtype(jnp.bfloat16): np.dtype(np.uint16), np.dtype(np.float32): np.dtype(np.float32)}
"""The model's dtype to that of a cache which is not int8."""
_MULTIPLE = 16
_MAX_DIM = 576
"""Channels of the keys of DeepSeek V3's latent attention, the largest of the models that we know."""
_SPLIT = 256
"""Key positions of a split of a row; see src/attention/attention.h."""
_COLUMNS = 16
"""Query heads that are computed together; more are divided among threads where there are few rows."""
_PLAN_HEAD, _PER_TOKEN, _PER_TASK = 6, 5, 8
"""Numbers in a plan: before everything else, for each token, and for each task (which has one more for each
of its members)."""


def supports(
    q: Array | jax.ShapeDtypeStruct, kv: Array | jax.ShapeDtypeStruct, value_dim: int | None = None
) -> bool:
    """Say whether the kernels can handle queries [T, H, D] against a cache [page, 2, KH, page size, D], or
    with `value_dim` against one of keys only, [page, 1, KH, page size, D]. The KV rows of an int8 cache also
    hold their scales.
    """
    stored, dim = _DTYPES.get(np.dtype(q.dtype)), q.shape[2]
    return (
        stored is not None
        and kv.dtype in (stored, np.int8)
        and (value_dim or 0) % _MULTIPLE == 0
        and dim % _MULTIPLE == 0
        and dim <= _MAX_DIM
        and kv.shape[3] % _MULTIPLE == 0
    )


def plan(
    starts: Array,
    q_lens: Array,
    page_table: Array,
    reach: Array | None = None,
    *,
    num_tokens: int,
    num_heads: int,
    kv_shape: tuple[int, ...],
    options: AttentionOptions,
) -> Array:
    """Plan the work of a step's attention, for `attend`: int32, as src/attention/attention_plan.h writes it.

    starts, q_lens int32[R] and page_table int32[R, P] describe the rows of a step of up to `num_tokens`
    tokens, which lie one after the other from token 0. `reach`: see `AttentionMeta`. A page id or a length
    outside the cache, [page, 2, KH, page size, D], or a token that looks ahead beyond its row, fails the
    program. All layers with as many heads and the same window ask for the same plan, and XLA makes it once.
    """
    library.load()
    num_pages, _, kv_heads, page_size, _ = kv_shape
    group = num_heads // kv_heads
    num_rows, pages_per_row = page_table.shape
    # A split of a row belongs to one task, which it has alone or shares with other rows, and a token is a
    # member of each task of its splits. Rows that are not split make at most one task for each token, or, if
    # they have one token, for each of its columns.
    tasks = num_rows * (-(-pages_per_row * page_size // _SPLIT) + -(-group // _COLUMNS)) + num_tokens
    size = _PLAN_HEAD + _PER_TOKEN * num_tokens + (_PER_TASK + 1) * tasks
    call = jax.ffi.ffi_call("penstock_attention_plan", jax.ShapeDtypeStruct((size,), jnp.int32))
    made: Array = call(
        starts,
        q_lens,
        page_table,
        library.absent(jnp.int32) if reach is None else reach,
        num_tokens=np.int32(num_tokens),
        num_pages=np.int32(num_pages),
        page_size=np.int32(page_size),
        group=np.int32(group),
        kv_heads=np.int32(kv_heads),
        window=np.int32(options.sliding_window or 0),
        chunk=np.int32(options.chunk or 0),
    )
    return made


def attend(
    q: Array,
    k_new: Array,
    v_new: Array | None,
    kv: Array,
    step_plan: Array,
    page_table: Array,
    options: AttentionOptions,
) -> tuple[Array, Array]:
    """Compute `penstock.runtime.ops.attention.paged_attention` for the rows that `step_plan` was made for.

    The returned cache lies in the memory of the argument.
    """
    library.load()
    num_tokens, num_heads, dim = q.shape
    out_shape = (num_tokens, num_heads, options.value_dim or dim)
    shapes = (jax.ShapeDtypeStruct(out_shape, q.dtype), jax.ShapeDtypeStruct(kv.shape, kv.dtype))
    call = jax.ffi.ffi_call("penstock_attention", shapes, input_output_aliases={3: 1})
    out, kv = call(
        q,
        k_new,
        library.absent(k_new.dtype) if v_new is None else v_new,
        kv,
        step_plan,
        page_table,
        library.absent(jnp.float32) if options.sinks is None else options.sinks.astype(jnp.float32),
        library.absent(jnp.float32) if options.slopes is None else options.slopes,
        scale=np.float32(options.scale),
        softcap=np.float32(options.softcap or 0.0),
    )
    return out, kv


def native_paged_attention(
    q: Array,
    k_new: Array,
    v_new: Array | None,
    kv: Array,
    meta: AttentionMeta,
    options: AttentionOptions,
) -> tuple[Array, Array]:
    """Compute `paged_attention` by the native CPU kernels for the shapes that they support, else in XLA.
    Native output of padding tokens is 0.
    """
    check_cache(q, v_new, kv, options.value_dim)
    if not supports(q, kv, options.value_dim):
        return paged_attention(q, k_new, v_new, kv, meta, options)
    planned = plan(
        meta.starts,
        meta.q_lens,
        meta.page_table,
        meta.reach,
        num_tokens=q.shape[0],
        num_heads=q.shape[1],
        kv_shape=kv.shape,
        options=options,
    )
    return attend(q, k_new, v_new, kv, planned, meta.page_table, options)
