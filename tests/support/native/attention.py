"""Random ragged batches over a paged cache, and the result that attention must give for them: a dense softmax
in float64.

Everything that a row must not read is NaN: pages of no row, offsets past a row's end, and positions before
its window or chunk. Stale entries of page tables point anywhere. In a cache of int8 the reference attends to
what `rounded` makes of keys and values, and it is the scales of such rows that are NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penstock.runtime.ops.attention import AttentionOptions, make_meta
from penstock.runtime.ops.kv_rows import kv_layer_shape, kv_storage_dtype


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: it has `past` tokens in the cache already, and `new` tokens in this step."""

    past: int
    new: int


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a step and of the cache's rows. With `value_dim` the cache holds keys only, and the values are
    their first channels.
    """

    heads: int
    kv_heads: int
    dim: int
    page: int
    tokens: int
    rows: int
    width: int
    pages: int  # how many the cache has
    dtype: str = "float32"
    value_dim: int | None = None
    is_int8: bool = False  # the cache; dtype is that of the arguments
    lanes: int = 1  # what the width of the cache's rows of floats is a multiple of, and columns of int8 have


@dataclasses.dataclass(frozen=True)
class Options:
    """The keyword arguments of `paged_attention`; `sinks` and `alibi` say whether there are any
    sinks and slopes. With `ahead` positions are in groups of so many, like those of an image, and a token
    sees the others of its group, as far as its row has them.
    """

    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    ahead: int | None = None

    def newest(self, position: int, end: int) -> int:
        return position if self.ahead is None else min(position - position % self.ahead + self.ahead, end) - 1

    def oldest(self, position: int) -> int:
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk is None else max(first, position - position % self.chunk)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The arguments of one step, and its expected result in float64."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray | None
    cache: np.ndarray
    starts: np.ndarray
    q_lens: np.ndarray
    table: np.ndarray
    sinks: np.ndarray | None
    slopes: np.ndarray | None
    expected: np.ndarray  # [real tokens, H, D or value_dim]
    cache_after: np.ndarray


def quantized(x: np.ndarray) -> np.ndarray:
    """Rows of floats [..., D] as int8 [..., D + 4], as a cache of int8 holds them: numbers and scale."""
    wide = x.astype(np.float32)
    peak = np.abs(wide).max(axis=-1, keepdims=True)
    peak[peak < 1e-30] = 0
    factor = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    numbers = np.rint(wide * factor).astype(np.int8)
    return np.concatenate([numbers, (peak * np.float32(1 / 127)).view(np.int8)], axis=-1)


def dequantized(rows: np.ndarray) -> np.ndarray:
    """int8 [..., D + 4] as float64 [..., D]."""
    scale = np.ascontiguousarray(rows[..., -4:]).view(np.float32)
    return rows[..., :-4].astype(np.float64) * scale.astype(np.float64)


@functools.cache
def spreading(dim: int) -> np.ndarray:
    """Return the float64 matrix with which `kv_rows.spread` multiplies keys of so many channels."""
    matrix: np.ndarray = np.zeros((dim, dim))
    begin = 0
    while begin < dim:
        size = 2 ** int(np.log2(dim - begin))
        hadamard: np.ndarray = np.ones((1, 1))
        while len(hadamard) < size:
            hadamard = np.kron([[1, 1], [1, -1]], hadamard)
        pairs = [sum(i >> bit & i >> bit + 1 & 1 for bit in range(10)) for i in range(size)]
        block = slice(begin, begin + size)
        matrix[block, block] = hadamard * (-1.0) ** np.array(pairs) / np.sqrt(size)
        begin += size
    return matrix


def spread(x: np.ndarray) -> np.ndarray:
    """Multiply x [..., D] with `spreading(D)` in float32, by sums of two channels, which are 1 apart, then 2,
    and so on.
    """
    parts, matrix, begin = [], spreading(x.shape[-1]), 0
    while begin < x.shape[-1]:
        size = int(np.count_nonzero(matrix[begin]))
        block = slice(begin, begin + size)
        part = x[..., block].astype(np.float32) * np.sign(matrix[begin, block]).astype(np.float32)
        at = np.arange(size)
        for apart in [1 << bit for bit in range(10) if 1 << bit < size]:
            part = part[..., at ^ apart] + np.where(at & apart, -part, part)
        parts.append(part * np.float32(size**-0.5))
        begin += size
    return np.concatenate(parts, axis=-1)


def rounded(x: np.ndarray) -> np.ndarray:
    """Keys and values of floats [2, ..., D], or keys whose channels are the values [1, ..., D], as int8
    [..., D + 4], as a cache holds them.
    """
    return quantized(x if len(x) == 1 else np.stack([spread(x[0]), x[1].astype(np.float32)]))


def meant(rows: np.ndarray) -> np.ndarray:
    """Return what rows of `rounded` stand for, in float64."""
    x = dequantized(rows)
    return x if len(x) == 1 else np.stack([x[0] @ spreading(x.shape[-1]), x[1]])


def _nothing(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Make a cache in which every row is NaN."""
    sizes = (shape.pages, shape.page, shape.kv_heads, shape.dim)
    keys_only, is_int8 = shape.value_dim is not None, shape.is_int8
    whole = kv_layer_shape(*sizes, keys_only=keys_only, is_int8=is_int8, lanes=shape.lanes)
    if not is_int8:
        return np.full(whole, np.nan, jnp.dtype(shape.dtype))
    cache = rng.integers(-128, 128, whole).astype(np.int8)
    if shape.lanes == 1:
        cache[..., -4:] = np.full(1, np.nan, np.float32).view(np.int8)
    else:
        numbers = shape.kv_heads * -(-shape.dim // shape.lanes)
        cache[:, :, numbers:] = np.full(shape.lanes // 4, np.nan, np.float32).view(np.int8)
    return cache


def in_columns(rows: np.ndarray, lanes: int) -> np.ndarray:
    """Lay out one token's rows of int8 [planes, KH, D + 4] as a TPU's cache has them, [planes, columns,
    lanes]: each head's numbers in columns of their own, and behind them the scales of all heads.
    """
    columns = []
    for plane in rows:
        numbers = [np.pad(row[:-4], (0, -(len(row) - 4) % lanes)) for row in plane]
        scales = np.concatenate([row[-4:] for row in plane])
        columns.append(np.concatenate([*numbers, np.pad(scales, (0, -len(scales) % lanes))]))
    return np.stack(columns).reshape(len(rows), -1, lanes)


def keep(cache: np.ndarray, page: int, offset: int, rows: np.ndarray, shape: Shape) -> None:
    """Write one token's rows [planes, KH, D] to its place in the cache, in the form that this has."""
    if not shape.is_int8:
        cache[page, :, :, offset] = np.pad(rows, ((0, 0), (0, 0), (0, -shape.dim % shape.lanes)))
    elif shape.lanes == 1:
        cache[page, :, :, offset] = rounded(rows)
    elif shape.lanes == 64:
        int8, numbers = rounded(rows), shape.kv_heads * shape.dim // 64
        for plane in range(len(rows)):
            cache[page, plane, :numbers, offset] = int8[plane, :, :-4].reshape(-1, 64)
            scales = cache[page, plane, numbers:].reshape(-1)  # those of the first head's tokens come first
            for head in range(shape.kv_heads):
                at = (head * shape.page + offset) * 4
                scales[at : at + 4] = int8[plane, head, -4:]
    else:
        cache[page, :, :, offset] = in_columns(rounded(rows), shape.lanes)


def dense(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    past: int,
    options: Options,
    sinks: np.ndarray | None,
    slopes: np.ndarray | None,
) -> np.ndarray:
    """Attention of len(q) tokens after `past`, in float64: q [n, H, D], k and v [past + n, KH, ...]."""
    out = np.zeros((*q.shape[:2], v.shape[2]))
    group = q.shape[1] // k.shape[1]
    queries, keys, values = (x.astype(np.float64) for x in (q, k, v))
    positions, at = range(past, past + len(q)), np.arange(len(k))
    seen = np.zeros((len(q), 1, len(k)), bool)
    for i, position in enumerate(positions):
        seen[i, 0] = (at >= options.oldest(position)) & (at <= options.newest(position, len(k)))
    for head in range(k.shape[1]):
        mine = slice(head * group, (head + 1) * group)  # the heads of queries that read this head of keys
        scores = queries[:, mine] @ keys[:, head].T * q.shape[2] ** -0.5  # [n, group, past + n]
        if options.softcap is not None:
            scores = options.softcap * np.tanh(scores / options.softcap)
        if slopes is not None:
            scores = scores + slopes[mine, None] * (at - np.array(positions)[:, None, None])
        scores = np.where(seen, scores, -np.inf)
        if sinks is not None:
            sink = np.broadcast_to(sinks[mine, None].astype(np.float64), (len(q), group, 1))
            scores = np.concatenate([scores, sink], axis=2)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True, initial=-np.inf))
        weights /= weights.sum(axis=2, keepdims=True)
        out[:, mine] = weights[..., : len(k)] @ values[:, head]
    return out


def draw(cases: Sequence[Case], shape: Shape, options: Options, seed: int, *, shared: int = 0) -> Batch:
    """Make a batch of `cases`; the rows with at least `shared` past tokens have that many tokens in common,
    in whole pages.
    """
    rng = np.random.default_rng(seed)
    dtype, page = jnp.dtype(shape.dtype), shape.page
    free = [int(p) for p in rng.permutation(shape.pages)]
    common = [free.pop() for _ in range(shared // page)]
    table = rng.integers(0, shape.pages, (shape.rows, shape.width)).astype(np.int32)
    values = lambda *size: np.asarray(rng.standard_normal(size)).astype(dtype)
    q = values(shape.tokens, shape.heads, shape.dim)
    planes = 2 if shape.value_dim is None else 1
    new = values(planes, shape.tokens, shape.kv_heads, shape.dim)
    prefix = values(planes, shared, shape.kv_heads, shape.dim)
    sinks = rng.standard_normal(shape.heads).astype(np.float32) if options.sinks else None
    slopes = rng.uniform(0.01, 1, shape.heads).astype(np.float32) if options.alibi else None
    keys_only = shape.value_dim is not None
    cache = _nothing(shape, rng)
    starts, q_lens = np.zeros(shape.rows, np.int32), np.zeros(shape.rows, np.int32)
    expected, writes, at = [], [], 0
    for row, case in enumerate(cases):
        pages = [free.pop() for _ in range(-(-(case.past + case.new) // page))]
        past = values(planes, case.past, shape.kv_heads, shape.dim)
        sharing = 0 < shared <= case.past
        if sharing:
            pages[: len(common)], past[:, :shared] = common, prefix
        starts[row], q_lens[row] = case.past, case.new
        first = 0 if sharing else options.oldest(case.past)
        table[row, first // page : len(pages)] = pages[first // page :]
        for position in range(first, case.past):
            keep(cache, pages[position // page], position % page, past[:, position], shape)
        span = slice(at, at + case.new)
        whole = np.concatenate([past, new[:, span]], axis=1)
        seen = meant(rounded(whole)) if shape.is_int8 else whole
        keys, vals = seen[0], seen[-1, ..., : shape.value_dim]
        expected.append(dense(q[span], keys, vals, case.past, options, sinks, slopes))
        writes += [(pages[p // page], p % page, at + p - case.past) for p in range(case.past, len(keys))]
        at += case.new
    after = cache.copy()
    for page_id, offset, token in writes:
        keep(after, page_id, offset, new[:, token], shape)
    storage = kv_storage_dtype(cache.dtype)
    return Batch(
        q,
        new[0],
        None if keys_only else new[1],
        cache.view(storage),
        starts,
        q_lens,
        table,
        sinks,
        slopes,
        np.concatenate(expected),
        after.view(storage),
    )


def runner(
    op: Callable[..., Any], shape: Shape, options: Options, *, decode: bool = False
) -> Callable[..., Any]:
    """Make a function that runs one compiled step of `op`: Batch -> (out, cache), as numpy arrays."""

    def step(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        kv: jax.Array,
        starts: jax.Array,
        q_lens: jax.Array,
        table: jax.Array,
        sinks: jax.Array | None,
        slopes: jax.Array | None,
    ) -> Any:
        meta = make_meta(
            starts=starts,
            q_lens=q_lens,
            page_table=table,
            num_tokens=q.shape[0],
            decode_only=decode,
            page_size=shape.page,
            num_pages=kv.shape[0],
        )
        if options.ahead is not None:
            ends = meta.kv_lens[meta.token_rows]
            group = meta.positions - meta.positions % options.ahead
            meta = meta._replace(reach=jnp.minimum(group + options.ahead, ends) - 1)
        return op(
            q,
            k,
            v,
            kv,
            meta,
            AttentionOptions(
                shape.dim**-0.5,
                sliding_window=options.window,
                softcap=options.softcap,
                sinks=sinks,
                chunk=options.chunk,
                slopes=slopes,
                value_dim=shape.value_dim,
            ),
        )

    compiled = jax.jit(step)

    def run(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        out, kv = compiled(
            batch.q,
            batch.k,
            batch.v,
            batch.cache,
            batch.starts,
            batch.q_lens,
            batch.table,
            batch.sinks,
            batch.slopes,
        )
        return np.asarray(out), np.asarray(kv)

    return run


def alone(batch: Batch, row: int) -> tuple[Batch, slice]:
    """Make a step whose only row is this one of a batch, so it is the first, and tell which tokens of the
    batch it has.
    """
    new, first = int(batch.q_lens[row]), int(batch.q_lens[:row].sum())
    starts, q_lens = np.zeros_like(batch.starts), np.zeros_like(batch.q_lens)
    starts[0], q_lens[0] = batch.starts[row], new
    moved = lambda x: np.roll(x, -first, axis=0)
    step = dataclasses.replace(
        batch,
        q=moved(batch.q),
        k=moved(batch.k),
        v=None if batch.v is None else moved(batch.v),
        starts=starts,
        q_lens=q_lens,
        table=np.roll(batch.table, -row, axis=0),
    )
    return step, slice(first, first + new)


def check(batch: Batch, result: tuple[np.ndarray, np.ndarray], tolerance: float) -> None:
    """Assert that every token is close to the reference, that padding is finite, and that the cache has
    changed only where the new tokens were written.
    """
    (out, cache), real = result, len(batch.expected)
    np.testing.assert_allclose(out[:real].astype(np.float64), batch.expected, rtol=tolerance, atol=tolerance)
    assert np.isfinite(out[real:].astype(np.float64)).all()
    assert np.array_equal(
        cache.view(np.uint8), batch.cache_after.view(np.uint8)
    )  # quicker than numpy.testing
