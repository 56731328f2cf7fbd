"""Paged attention in XLA, compared with a dense softmax over contiguous keys, on random ragged batches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.ops.attention import make_meta, paged_attention
from penstock.runtime.ops.kv_rows import kv_layer_shape, kv_storage_dtype
from tests.support.native.attention import Case, Options, Shape, check, draw, runner

PAGE, ROWS, DIM = 4, 4, 8
OPTIONS = (
    Options(),
    Options(window=1),
    Options(window=5),
    Options(chunk=8),
    Options(softcap=2.0, sinks=True),
    Options(window=7, chunk=12, sinks=True),
)


@functools.cache
def step(shape: Shape, options: Options, decode: bool) -> Callable[..., Any]:
    return runner(paged_attention, shape, options, decode=decode)


rows = st.lists(st.builds(Case, past=st.integers(0, 30), new=st.integers(1, 20)), min_size=1, max_size=ROWS)
kinds = st.sampled_from([*((each, False) for each in OPTIONS), *((each, True) for each in OPTIONS[3:])])
"""Options, and whether the cache is of int8."""
seeds = st.integers(0, 2**31)


@settings(max_examples=40, deadline=None)
@given(rows, st.sampled_from([(4, 2), (3, 1)]), kinds, seeds)
def test_mixed_batches(
    cases: list[Case], heads: tuple[int, int], kind: tuple[Options, bool], seed: int
) -> None:
    """Prefill chunks and decode rows of different lengths in one step."""
    options, is_int8 = kind
    shape = Shape(*heads, dim=DIM, page=PAGE, tokens=96, rows=ROWS, width=24, pages=70, is_int8=is_int8)
    batch = draw(cases, shape, options, seed)
    check(batch, step(shape, options, False)(batch), 2e-5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=ROWS), kinds, seeds)
def test_decode_batches(pasts: list[int], kind: tuple[Options, bool], seed: int) -> None:
    """One token for each row, as in decode programs, with fewer rows than the bucket holds."""
    options, is_int8 = kind
    shape = Shape(4, 2, dim=DIM, page=PAGE, tokens=ROWS, rows=ROWS, width=24, pages=70, is_int8=is_int8)
    batch = draw([Case(past, 1) for past in pasts], shape, options, seed)
    check(batch, step(shape, options, True)(batch), 2e-5)


@settings(max_examples=20, deadline=None)
@given(rows, st.sampled_from([(4, 1), (4, 2)]), st.booleans(), kinds, seeds)
def test_values_that_are_channels_of_the_keys(
    cases: list[Case], heads: tuple[int, int], decode: bool, kind: tuple[Options, bool], seed: int
) -> None:
    """Latent attention: the cache holds keys only, whose first channels are the values."""
    options, is_int8 = kind
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
    kv = jnp.zeros(kv_layer_shape(2, PAGE, 1, DIM), kv_storage_dtype(np.dtype(dtype)))
    assert kv.dtype == kv_storage_dtype(np.dtype(dtype)) == np.uint16
    value = jnp.arange(1, 1 + DIM, dtype=dtype).reshape(1, 1, DIM) / jnp.asarray(3, dtype)
    value = jnp.concatenate([value] + [jnp.zeros_like(value)] * 3)
    meta = make_meta(
        starts=jnp.zeros(4, jnp.int32),
        q_lens=jnp.array([1, 0, 0, 0], jnp.int32),
        page_table=jnp.ones((4, 2), jnp.int32),
        num_tokens=4,
        decode_only=True,
        page_size=PAGE,
        num_pages=2,
    )
    out, _ = paged_attention(value, value, value, kv, meta, scale=1.0)
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


@pytest.mark.parametrize(("is_int8", "width"), [(True, DIM), (False, DIM + 4)])
def test_a_cache_of_another_width_is_refused(is_int8: bool, width: int) -> None:
    shape = Shape(heads=2, kv_heads=1, dim=DIM, page=PAGE, tokens=8, rows=2, width=4, pages=8)
    batch = draw([Case(5, 3)], shape, Options(), 0)
    cache = np.zeros((8, 2, 1, PAGE, width), np.int8 if is_int8 else np.float32)
    with pytest.raises(ValueError, match="wide for heads of 8"):
        step(shape, Options(), False)(dataclasses.replace(batch, cache=cache))
