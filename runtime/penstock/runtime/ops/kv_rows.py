"""How keys and values lie in a layer's cache, and how they are written there.

A KV row is the key or the value of one token and head. It holds the model's own numbers, or, in a cache of
int8, numbers from -127 to 127 and behind them their scale, a float32 in the machine's byte order: a number
stands for itself times the scale. The scale belongs to the KV row alone, so what a token keeps does not
depend on its neighbours, and a page is copied, shared and freed as one piece of memory.

The scale lies in the KV row so that pages, forks, the prefix cache, snapshots, donation and sizes know of one
array, as without int8, and what a head reads of a page is still one piece of memory. It takes 4 of 132 bytes
for heads of 128. A KV row is written once and never rounded again. Tokens always attend to what was rounded,
their own keys and values included, so it changes no bits how a prompt is cut into chunks.

Channels of real models' keys are of unlike sizes, and the largest of a key would leave few of the 127 steps
to the others. So a key is spread before it is rounded (`spread`), and so is a query before it is multiplied
with it, which leaves their product as it is. Values are not, because what is rounded off them costs little
beside what is rounded off keys (bench/RESULTS.md). Keys whose channels are the values are not spread either.

On TPUs a cache of int8 lies in columns of 128 bytes, because XLA copies the whole cache to write KV rows of
another width: first the numbers of each head, with zeros behind them up to whole columns, and then the scales
of all heads. So eight heads of 128 take nine columns, 0.56 of what they take in bfloat16.

GPUs whose kernels read int8 have columns of 64 bytes, for heads of whole columns: their copies to shared
memory want rows of multiples of 16 bytes. The scales lie otherwise than on TPUs, those of a head's tokens
together, so that a block of threads, which takes one head, copies no others. Sixteen heads share the room of
a column of scales.

What lies past a row's end is never multiplied, not even by zero; tests fill it with NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

SCALE_BYTES = 4
"""Of a KV row in int8, behind its numbers."""
GPU_LANES = 64
"""Bytes of a column on GPUs. In a page with such columns the scales of one head lie together; in others those
of one token do."""
MOST = 127
"""The largest number of a KV row in int8; the least is -127."""
LEAST_PEAK = 1e-30
"""A KV row without a larger value than this becomes zeros: 127 divided by it must be a float32."""


def kv_layer_shape(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    keys_only: bool = False,
    is_int8: bool = False,
    lanes: int = 1,
) -> tuple[int, ...]:
    """Return the shape of one layer's cache: [page, key or value, kv head, offset, dim]. With `keys_only` the
    second axis has one entry, because the values are channels of the keys. With `is_int8` the last axis has
    room for the scale, too; else it is a multiple of `lanes`, and zeros stand behind the model's own numbers.
    With `is_int8` and more than one lane, the shape is [page, key or value, column, offset, lanes], where the
    columns of scales of `GPU_LANES` are but so many bytes, see `words_of`.

    What one head reads of a page lies in one piece of memory, which is good for prefetchers and the TLB.
    """
    planes = 1 if keys_only else 2
    if is_int8 and lanes > 1:
        return (num_pages, planes, _num_columns(num_kv_heads, head_dim, lanes), page_size, lanes)
    width = head_dim + SCALE_BYTES if is_int8 else -(-head_dim // lanes) * lanes
    return (num_pages, planes, num_kv_heads, page_size, width)


def _num_columns(num_heads: int, dim: int, lanes: int) -> int:
    return num_heads * -(-dim // lanes) + -(-num_heads * SCALE_BYTES // lanes)


def is_in_columns(kv: Array | jax.ShapeDtypeStruct, dim: int) -> bool:
    """Say whether a layer's cache, or a part of it with the same last axes, lies in columns, for heads of
    `dim`.
    """
    return kv.dtype == jnp.int8 and kv.shape[-1] != dim + SCALE_BYTES


def num_heads_of(kv: Array | jax.ShapeDtypeStruct, dim: int) -> int:
    """Return how many heads of keys, of `dim` channels, a layer's cache has, or a part of it with the same
    last axes.
    """
    columns, lanes = kv.shape[-3], kv.shape[-1]
    if not is_in_columns(kv, dim):
        return int(columns)
    of_head, together = -(-dim // lanes), lanes // SCALE_BYTES  # so many heads share a column of scales
    whole, left = divmod(columns, together * of_head + 1)
    return int(whole * together + max(left - 1, 0) // of_head)


def words_of(kv: Array) -> Array:
    """Return a layer's cache in columns of `GPU_LANES` as int32 [page, planes, line, page size]. Lines are as
    long as the scales that a head has in a page: the first such line stands behind the heads' numbers, and
    those of the other heads follow. XLA makes no copy of it on GPUs.
    """
    pages, planes, columns, page_size, lanes = kv.shape
    lines = columns * (lanes // SCALE_BYTES)
    return lax.bitcast_convert_type(kv.reshape(pages, planes, lines, page_size, SCALE_BYTES), jnp.int32)


def first_line_of_scales(num_heads: int, dim: int) -> int:
    """Return which line of `words_of` has the scales of the first head."""
    return num_heads * (dim // GPU_LANES) * (GPU_LANES // SCALE_BYTES)


def kv_storage_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which the cache is stored on a CPU: 16-bit floats as raw uint16, others as they
    are. Accelerators store all as they are.

    A scatter into a bf16 array makes XLA's CPU backend convert the whole cache to float32 and back (40 ms
    against 9 us for 67 MB).
    """
    return np.dtype(np.uint16) if np.dtype(dtype).itemsize == 2 else np.dtype(dtype)


def spread(x: Array) -> Array:
    """Return keys or queries [..., D] as float32 in which each channel is a sum of many of x, with signs.
    The transform is orthogonal, so the product of a query and a key stays if both are spread.

    The channels are cut into blocks, each as large a power of two as still fits. In a block of n, channel i
    changes its sign if two neighbouring bits of i are set an odd number of times (Rudin and Shapiro), so that
    channels that are all alike do not meet in one sum; then comes Hadamard's transform, divided by sqrt(n).
    Sums of channels that are 1 apart are made first. The native kernels compute the same bits.
    """
    lead, dim = x.shape[:-1], x.shape[-1]
    blocks, begin = [], 0
    while begin < dim:
        size = 1 << (dim - begin).bit_length() - 1
        signs = np.array([(-1.0) ** (i & i >> 1).bit_count() for i in range(size)], np.float32)
        block = x[..., begin : begin + size].astype(jnp.float32) * jnp.broadcast_to(signs, (*lead, size))
        for stage in range(size.bit_length() - 1):
            pairs = block.reshape(*lead, size >> stage + 1, 2, 1 << stage)
            first, second = pairs[..., 0, :], pairs[..., 1, :]
            block = jnp.stack([first + second, first - second], axis=-2).reshape(*lead, size)
        blocks.append(block * np.float32(size**-0.5))
        begin += size
    return jnp.concatenate(blocks, axis=-1)


def quantize_rows(x: Array) -> Array:
    """Turn KV rows of floats [..., D] into int8 [..., D + 4]: the scale is the largest magnitude of a KV row
    divided by 127, and a number is the value divided by it, rounded to the nearest, ties to even.

    The scale of a KV row with a NaN or an infinity is not finite, so the row is read back as NaN. The native
    kernels compute the same bits. So the scale is made by a product, because XLA makes one of a division by a
    constant, but not everywhere.
    """
    wide = x.astype(jnp.float32)
    peak = jnp.abs(wide).max(axis=-1, keepdims=True)
    peak = jnp.where(peak < LEAST_PEAK, 0.0, peak)
    numbers = jnp.round(wide * jnp.where(peak > 0, MOST / peak, 0.0))
    numbers = jnp.where(jnp.isfinite(peak), numbers, 0.0).astype(jnp.int8)
    return jnp.concatenate([numbers, lax.bitcast_convert_type(peak[..., 0] * (1 / MOST), jnp.int8)], axis=-1)


def dequantize_rows(rows: Array) -> Array:
    """Return int8 [..., D + 4], as `quantize_rows` makes it, as float32 [..., D]."""
    numbers, scale = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]
    return numbers.astype(jnp.float32) * lax.bitcast_convert_type(scale, jnp.float32)[..., None]


def write_kv(kv: Array, k_new: Array, v_new: Array | None, write_slots: Array) -> Array:
    """Write this step's keys and values, each [T, KH, D], into one layer's cache; `v_new` is None for a
    cache of keys only. A write slot is page * page_size + offset; slots past the end are dropped.
    """
    if kv.dtype == jnp.int8 and v_new is not None:
        k_new, v_new = spread(k_new), v_new.astype(jnp.float32)
    new = k_new[:, None] if v_new is None else jnp.stack([k_new, v_new], axis=1)
    if is_in_columns(kv, k_new.shape[2]):
        new = quantize_rows(new)
        if kv.shape[4] == GPU_LANES:
            return _with_scales_by_head(kv, new, write_slots)
        return _set_columns(kv, _columns(new, kv.shape[4]), write_slots)
    if kv.dtype == jnp.int8:
        new = quantize_rows(new)
    elif kv.dtype == jnp.uint16:
        new = lax.bitcast_convert_type(new, jnp.uint16)
    new = widened(new, kv.shape[4])
    written: Array = lax.platform_dependent(kv, new, write_slots, tpu=by_rows, default=by_tokens)
    return written


def by_tokens(kv: Array, new: Array, write_slots: Array) -> Array:
    """Write KV rows [T, planes, KH, width] at their slots, int32 [T], as `write_kv` does, token by token."""
    page_size = kv.shape[3]
    pages, offsets = write_slots // page_size, write_slots % page_size
    return kv.at[pages, :, :, offsets].set(new, mode="drop")


def by_rows(kv: Array, new: Array, write_slots: Array) -> Array:
    """Do what `by_tokens` does, with the cache as one list of KV rows. In a loop of decode steps XLA's TPU
    backend would put offsets before heads to write tokens, and so copy the whole cache twice in each step,
    and also where there is one head of keys outside a loop.
    """
    num_pages, planes, heads, page_size, width = kv.shape
    of_page = planes * heads
    pages, offsets = write_slots // page_size, write_slots % page_size
    numbers = pages[:, None] * of_page + jnp.arange(of_page, dtype=jnp.int32)[None]
    rows = jnp.where(pages[:, None] < num_pages, numbers * page_size + offsets[:, None], kv.size // width)
    flat = kv.reshape(-1, width).at[rows.reshape(-1)].set(new.reshape(-1, width), mode="drop")
    return flat.reshape(kv.shape)


def _set_columns(kv: Array, new: Array, write_slots: Array, first: int = 0) -> Array:
    """Write [T, planes, n, lanes] at the slots, into the n columns from `first` on, or lines of `words_of`,
    whose lanes are none: [T, planes, n].
    """
    page_size = kv.shape[3]
    pages, offsets = (x[:, None, None] for x in (write_slots // page_size, write_slots % page_size))
    planes, columns = (jnp.arange(size, dtype=jnp.int32) for size in new.shape[1:3])
    at = (pages, planes[None, :, None], first + columns[None, None], offsets)
    return kv.at[at].set(new, mode="drop")


def _with_scales_by_head(kv: Array, rows: Array, write_slots: Array) -> Array:
    """Write KV rows int8 [T, planes, KH, D + 4] into columns of `GPU_LANES`."""
    tokens, planes, num_heads, width = rows.shape
    dim = width - SCALE_BYTES
    kv = _set_columns(kv, rows[..., :dim].reshape(tokens, planes, -1, GPU_LANES), write_slots)
    scales = lax.bitcast_convert_type(rows[..., dim:], jnp.int32)
    words = _set_columns(words_of(kv), scales, write_slots, first_line_of_scales(num_heads, dim))
    return lax.bitcast_convert_type(words, jnp.int8).reshape(kv.shape)


def _columns(rows: Array, lanes: int) -> Array:
    """Lay out KV rows int8 [T, planes, KH, D + 4] in columns [T, planes, columns, lanes]."""
    numbers, scales = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:]
    of_token = rows.shape[:2]
    numbers = widened(numbers, -(-numbers.shape[-1] // lanes) * lanes).reshape(*of_token, -1)
    scales = scales.reshape(*of_token, -1)
    scales = widened(scales, -(-scales.shape[-1] // lanes) * lanes)
    return jnp.concatenate([numbers, scales], axis=-1).reshape(*of_token, -1, lanes)


def _rows(block: Array, dim: int) -> Array:
    """Turn columns [..., columns, page size, lanes] back into KV rows int8 [..., KH, page size, D + 4]."""
    *lead, _, page_size, lanes = block.shape
    num_heads, of_head = num_heads_of(block, dim), -(-dim // lanes)
    if lanes == GPU_LANES:
        cut = num_heads * of_head
        numbers = block[..., :cut, :, :].reshape(*lead, num_heads, of_head, page_size, lanes)
        numbers = jnp.moveaxis(numbers, -3, -2).reshape(*lead, num_heads, page_size, dim)
        scales = block[..., cut:, :, :].reshape(*lead, -1, page_size, SCALE_BYTES)
        return jnp.concatenate([numbers, scales[..., :num_heads, :, :]], axis=-1)
    by_position = jnp.moveaxis(block, -3, -2).reshape(*lead, page_size, -1)
    cut = num_heads * of_head * lanes
    numbers = by_position[..., :cut].reshape(*lead, page_size, num_heads, -1)[..., :dim]
    scales = by_position[..., cut : cut + num_heads * SCALE_BYTES]
    scales = scales.reshape(*lead, page_size, num_heads, SCALE_BYTES)
    return jnp.moveaxis(jnp.concatenate([numbers, scales], axis=-1), -2, -3)


def widened(x: Array, width: int) -> Array:
    """Put zeros behind the channels of x [..., D], so that it is as wide as a KV row."""
    return x if x.shape[-1] == width else jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, width - x.shape[-1]),))


def read_kv(block: Array, dtype: np.dtype, dim: int) -> Array:
    """Return as float32 [..., KH, page size, dim] what lies in a part of a layer's cache, for a model in
    `dtype`.
    """
    if is_in_columns(block, dim):
        block = _rows(block, dim)
    if block.dtype == jnp.int8:
        return dequantize_rows(block)
    if block.dtype == jnp.uint16:
        block = lax.bitcast_convert_type(block, dtype)
    return block[..., :dim].astype(jnp.float32)
