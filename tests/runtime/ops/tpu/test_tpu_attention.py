"""The kernel for decode steps on TPUs, interpreted on a CPU and compared with a dense softmax in float64; the
interpreter copies as a TPU does, and finds races between copies.

What a row must not read is NaN, also within its pages.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from penstock.runtime.ops.kv_rows import kv_layer_shape
from penstock.runtime.ops.tpu.attention import supports, tpu_paged_attention
from tests.support.native.attention import Case, Options, Shape, check, draw, runner

BF16, F32, INT8 = np.dtype(jnp.bfloat16), np.dtype(np.float32), np.dtype(np.int8)
ROWS, WIDTH, PAGES, PAGE = 3, 6, 20, 16
TOLERANCE = 2e-2
"""Weights and results are rounded to bfloat16, by 2^-9 of about 4 at most."""


@functools.cache
def step(shape: Shape, options: Options) -> Callable[..., Any]:
    """A row's pages come round to each place on the chip more than once, so races would be found."""
    interpret = pltpu.InterpretParams(detect_races=True)
    return runner(functools.partial(tpu_paged_attention, interpret=interpret), shape, options, decode=True)


def attends(shape: Shape, options: Options, pasts: list[int], seed: int) -> None:
    batch = draw([Case(past, 1) for past in pasts], shape, options, seed)
    check(batch, step(shape, options)(dataclasses.replace(batch, cache=batch.cache.view(BF16))), TOLERANCE)
    found = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call").races
    assert not found.races_found


def sized(heads: int, kv_heads: int, dim: int = 128) -> Shape:
    return Shape(heads, kv_heads, dim, PAGE, ROWS, ROWS, WIDTH, PAGES, dtype="bfloat16")


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param(sized(4, 2), Options(), id="plain", marks=pytest.mark.ci),
        pytest.param(sized(8, 1, dim=256), Options(window=20), id="window", marks=pytest.mark.ci),
        pytest.param(sized(3, 3), Options(chunk=24, softcap=2.0, sinks=True), id="everything"),
    ],
)
@settings(max_examples=3, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_rows_of_any_length(shape: Shape, options: Options, data: st.DataObject, seed: int) -> None:
    """And fewer rows than the program has."""
    most = WIDTH * PAGE - 1
    edges = st.sampled_from([0, PAGE - 1, PAGE, 2 * PAGE, most])
    pasts = data.draw(st.lists(edges | st.integers(0, most), min_size=1, max_size=ROWS))
    attends(shape, options, pasts, seed)


@pytest.mark.parametrize(
    ("planes", "kv_heads", "page", "dim", "dtype", "is_supported"),
    [
        (2, 8, 64, 128, BF16, True),
        (2, 1, 16, 256, BF16, True),
        (2, 8, 64, 64, BF16, False),
        (2, 8, 8, 128, BF16, False),
        (2, 128, 256, 128, BF16, False),  # two pages are more than the chip holds
        (1, 1, 64, 640, BF16, False),  # latent attention
        (2, 8, 64, 132, INT8, False),
        (2, 8, 64, 128, F32, False),
    ],
)
def test_what_the_kernel_computes(
    planes: int, kv_heads: int, page: int, dim: int, dtype: np.dtype[Any], is_supported: bool
) -> None:
    cache = jax.ShapeDtypeStruct(kv_layer_shape(4, page, kv_heads, dim, keys_only=planes == 1), dtype)
    q = jax.ShapeDtypeStruct((2, 2 * kv_heads, dim), F32 if dtype == F32 else BF16)
    assert supports(q, cache, None if planes == 2 else 512) == is_supported
