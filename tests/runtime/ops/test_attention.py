"""Paged attention in XLA, compared with a dense softmax over contiguous keys, on random ragged batches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.ops.attention import (
    LONG_SPAN,
    AttentionOptions,
    KVSpan,
    check_cache,
    make_meta,
    paged_attention,
)
from penstock.runtime.ops.kv_rows import kv_layer_shape, kv_storage_dtype
from tests.support.native.attention import Case, Options, Shape, check, draw, runner

PAGE, ROWS, DIM = 4, 4, 8
OPTIONS = (
    Options(),
    Options(window=1),
    Options(window=5),
    Options(chunk=8),
    Options(softcap=2.0, sinks=True),
    Options(window=7, chunk=12, sinks=True, alibi=True),
    Options(window=7, ahead=6),
)


@functools.cache
def step(shape: Shape, options: Options, decode: bool) -> Callable[..., Any]:
    return runner(paged_attention, shape, options, decode=decode)


rows = st.lists(st.builds(Case, past=st.integers(0, 30), new=st.integers(1, 20)), min_size=1, max_size=ROWS)
seeds = st.integers(0, 2**31)
PLAIN, NEWEST, NEAR, CHUNKS, SINKS, ALL, AHEAD = OPTIONS
KINDS = [*((each, False) for each in OPTIONS), *((each, True) for each in OPTIONS[3:])]
"""Options, and whether the cache is of int8."""


def programs(some: Sequence[tuple[Any, ...]], every: Iterable[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Half a second goes into each program, so a test draws from some of them, and only sweeps from all."""
    return pytest.mark.parametrize(
        "drawn_from",
        [pytest.param(some, id="some"), pytest.param([*every], id="all", marks=pytest.mark.sweep)],
    )


@pytest.mark.ci
@programs(
    [
        ((4, 2), (PLAIN, False)),
        ((3, 1), (NEWEST, False)),
        ((4, 2), (CHUNKS, True)),
        ((4, 2), (SINKS, True)),
        ((3, 1), (ALL, False)),
        ((4, 2), (AHEAD, False)),
    ],
    product([(4, 2), (3, 1)], KINDS),
)
@settings(max_examples=40, deadline=None)
@given(cases=rows, data=st.data(), seed=seeds)
def test_mixed_batches(
    drawn_from: Sequence[tuple[Any, ...]], cases: list[Case], data: st.DataObject, seed: int
) -> None:
    """Prefill chunks and decode rows of different lengths in one step."""
    heads: tuple[int, int]
    heads, (options, is_int8) = data.draw(st.sampled_from(drawn_from))
    shape = Shape(*heads, dim=DIM, page=PAGE, tokens=96, rows=ROWS, width=24, pages=70, is_int8=is_int8)
    batch = draw(cases, shape, options, seed)
    check(batch, step(shape, options, False)(batch), 2e-5)


@programs([(NEAR, False), (SINKS, False), (ALL, True)], KINDS)
@settings(max_examples=40, deadline=None)
@given(pasts=st.lists(st.integers(0, 60), min_size=1, max_size=ROWS), data=st.data(), seed=seeds)
def test_decode_batches(
    drawn_from: Sequence[tuple[Any, ...]], pasts: list[int], data: st.DataObject, seed: int
) -> None:
    """One token for each row, as in decode programs, with fewer rows than the bucket holds."""
    options, is_int8 = data.draw(st.sampled_from(drawn_from))
    shape = Shape(4, 2, dim=DIM, page=PAGE, tokens=ROWS, rows=ROWS, width=24, pages=70, is_int8=is_int8)
    batch = draw([Case(past, 1) for past in pasts], shape, options, seed)
    check(batch, step(shape, options, True)(batch), 2e-5)


@pytest.mark.ci
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("span", [KVSpan(PAGE, 2 * PAGE), LONG_SPAN])
def test_a_span_of_one_page_and_one_of_more_than_the_table(span: KVSpan, decode: bool) -> None:
    shape = Shape(4, 2, dim=DIM, page=PAGE, tokens=ROWS if decode else 96, rows=ROWS, width=23, pages=70)
    news = [1, 1, 1] if decode else [1, 20, 7]
    batch = draw([Case(past, new) for past, new in zip([0, 61, 30], news, strict=True)], shape, ALL, 3)
    attend = functools.partial(paged_attention, span=span)
    check(batch, runner(attend, shape, ALL, decode=decode)(batch), 2e-5)


@pytest.mark.ci
@programs(
    [
        ((4, 1), False, (PLAIN, False)),
        ((4, 2), False, (ALL, True)),
        ((4, 1), True, (CHUNKS, True)),
        ((4, 2), True, (NEAR, False)),
    ],
    product([(4, 1), (4, 2)], [False, True], KINDS),
)
@settings(max_examples=20, deadline=None)
@given(cases=rows, data=st.data(), seed=seeds)
def test_values_that_are_channels_of_the_keys(
    drawn_from: Sequence[tuple[Any, ...]], cases: list[Case], data: st.DataObject, seed: int
) -> None:
    """Latent attention: the cache holds keys only, whose first channels are the values."""
    heads: tuple[int, int]
    heads, decode, (options, is_int8) = data.draw(st.sampled_from(drawn_from))
    if decode:
        cases = [Case(case.past, 1) for case in cases]
    tokens = ROWS if decode else 96
    shape = Shape(*heads, dim=DIM, page=PAGE, tokens=tokens, rows=ROWS, width=24, pages=70, value_dim=5)
    shape = dataclasses.replace(shape, is_int8=is_int8)
    batch = draw(cases, shape, options, seed)
    check(batch, step(shape, options, decode)(batch), 2e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bit_cache_keeps_exact_values(dtype: jnp.dtype) -> None:
    """A 16-bit cache is stored as raw uint16 and must be read back unchanged. The row has one position, so
    its output is its own value.
    """
    kv = jnp.asarray(np.zeros(kv_layer_shape(2, PAGE, 1, DIM), kv_storage_dtype(np.dtype(dtype))))
    assert kv.dtype == kv_storage_dtype(np.dtype(dtype)) == np.uint16
    thirds = np.zeros((4, 1, DIM), np.float32)
    thirds[0] = np.arange(1, 1 + DIM, dtype=np.float32) / 3
    value = jnp.asarray(thirds.astype(dtype))

    @jax.jit
    def attend(value: jax.Array, kv: jax.Array) -> jax.Array:
        meta = make_meta(
            starts=jnp.zeros(4, jnp.int32),
            q_lens=jnp.array([1, 0, 0, 0], jnp.int32),
            page_table=jnp.ones((4, 2), jnp.int32),
            num_tokens=4,
            decode_only=True,
            page_size=PAGE,
            num_pages=2,
        )
        out, _ = paged_attention(value, value, value, kv, meta, AttentionOptions(1.0))
        return out

    out = attend(value, kv)
    assert out.dtype == dtype
    np.testing.assert_array_equal(np.asarray(out[0]), np.asarray(value[0]))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_attends_to_a_row_of_int8_that_is_not_finite_is_nan(bad: float) -> None:
    """And nothing else is: the other request is as it is without."""
    shape = Shape(heads=2, kv_heads=1, dim=DIM, page=PAGE, tokens=8, rows=2, width=4, pages=8, is_int8=True)
    batch = draw([Case(5, 3), Case(2, 4)], shape, Options(), 0)
    expected, _ = step(shape, Options(), False)(batch)
    batch.k[1, 0, 3] = bad
    out, _ = step(shape, Options(), False)(batch)
    assert np.isnan(out[1:3]).all()
    np.testing.assert_array_equal(out[[0, 3, 4, 5, 6]], expected[[0, 3, 4, 5, 6]])


@pytest.mark.parametrize(("is_int8", "width"), [(True, DIM), (False, DIM - 4)])
def test_a_cache_of_another_width_is_refused(is_int8: bool, width: int) -> None:
    shape = Shape(heads=2, kv_heads=1, dim=DIM, page=PAGE, tokens=8, rows=2, width=4, pages=8)
    batch = draw([Case(5, 3)], shape, Options(), 0)
    cache = np.zeros((8, 2, 1, PAGE, width), np.int8 if is_int8 else np.float32)
    with pytest.raises(ValueError, match="wide for heads of 8"):
        step(shape, Options(), False)(dataclasses.replace(batch, cache=cache))


def test_a_cache_whose_rows_are_wider_is_for_those_who_know_it() -> None:
    q, cache = jnp.zeros((1, 2, DIM)), jnp.zeros((8, 2, 1, PAGE, DIM + 4))
    check_cache(q, q, cache, None, may_be_wider=True)
    with pytest.raises(ValueError, match="wide for heads of 8, not 12"):
        check_cache(q, q, cache, None)


def test_rows_that_are_wider_change_nothing() -> None:
    """Zeros stand behind what is written, and what stands behind other rows does not count."""
    shape = Shape(heads=4, kv_heads=2, dim=DIM, page=PAGE, tokens=8, rows=2, width=4, pages=8, lanes=32)
    batch = draw([Case(5, 3), Case(2, 4)], shape, Options(), 0)
    check(batch, step(shape, Options(), False)(batch), 2e-5)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("lanes", "heads", "dim", "value_dim"),
    [
        pytest.param(128, 2, 160, None, id="keys"),
        pytest.param(128, 35, 8, None, id="many"),
        pytest.param(128, 1, 48, 32, id="latent"),
        pytest.param(64, 2, 128, None, id="GPU"),
        pytest.param(64, 17, 64, None, id="GPU, many"),
    ],
)
def test_int8_in_columns_means_the_same(lanes: int, heads: int, dim: int, value_dim: int | None) -> None:
    """As a TPU's cache lies, and a GPU's. 35 heads have two columns of scales, and so have 17 on a GPU."""
    sizes = (2 * heads, heads, dim, PAGE, 8, 2, 4, 8)
    shape, options = (
        Shape(*sizes, value_dim=value_dim, is_int8=True, lanes=lanes),
        Options(window=4, sinks=True),
    )
    batch = draw([Case(5, 3), Case(2, 4)], shape, options, 0)
    check(batch, step(shape, options, False)(batch), 2e-5)
