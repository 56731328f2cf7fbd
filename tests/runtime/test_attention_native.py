"""The native paged attention against a dense float64 softmax, on every instruction set this machine has; and
that a row's bits depend on nothing but the row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.runtime.attention import attention_op, native_paged_attention, paged_attention
from penstock.runtime.native import library
from penstock.runtime.native.library import Isa
from tests.support.attention import Batch, Case, Options, Shape, check, draw, runner

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")

TOLERANCE = {"bfloat16": 0.015, "float32": 4e-6}
BASE = Shape(heads=4, kv_heads=2, dim=64, page=16, tokens=160, rows=6, width=64, pages=200)
PLAIN = Options()
KERNELS = {
    "avx2": (Isa.AVX2, None),
    "avx512": (Isa.AVX512, None),  # and of AVX512_BF16 where pairs are not used
    "avx512_bf16_pairs": (Isa.AVX512_BF16, True),
    "amx": (Isa.AMX, None),
}
"""Instruction set and `use_pairs`."""


@pytest.fixture(params=KERNELS)
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    wanted, pairs = KERNELS[request.param]
    if library.limit_isa(wanted) is not wanted:
        library.limit_isa(Isa.AMX)
        pytest.skip(f"this processor has no {wanted.name}")
    library.use_pairs(pairs)
    yield wanted
    library.use_pairs(None)
    library.limit_isa(Isa.AMX)


@functools.cache
def step(shape: Shape, options: Options = PLAIN) -> Callable[..., Any]:
    return runner(native_paged_attention, shape, options)


def run(
    cases: list[Case], shape: Shape, options: Options, seed: int, shared: int = 0
) -> tuple[Batch, np.ndarray]:
    batch = draw(cases, shape, options, seed, shared=shared)
    out, cache = step(shape, options)(batch)
    check(batch, (out, cache), TOLERANCE[shape.dtype])
    assert not out[len(batch.expected) :].any()
    return batch, out


dtypes = st.sampled_from(["bfloat16", "float32"])
shapes = st.builds(
    lambda group, kv_heads, dim, page, dtype: Shape(
        heads=group * kv_heads,
        kv_heads=kv_heads,
        dim=dim,
        page=page,
        tokens=160,
        rows=6,
        width=1024 // page,
        pages=3200 // page + 8,
        dtype=dtype,
    ),
    group=st.sampled_from([1, 2, 3, 4, 8, 20]),
    kv_heads=st.sampled_from([1, 2]),
    dim=st.sampled_from([16, 64, 80, 96, 128, 256]),
    page=st.sampled_from([16, 64, 512]),
    dtype=dtypes,
)
rows = st.lists(
    st.builds(Case, past=st.integers(0, 700), new=st.sampled_from([0, 1, 1, 1, 5, 33])),
    min_size=1,
    max_size=4,
)
options = st.builds(
    Options,
    window=st.sampled_from([None, None, 1, 40, 300]),
    chunk=st.sampled_from([None, None, 32, 100, 256]),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    sinks=st.booleans(),
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases=rows, shape=shapes, options=options, seed=st.integers(0, 2**31))
def test_random_batches(isa: Isa, cases: list[Case], shape: Shape, options: Options, seed: int) -> None:
    run(cases, shape, options, seed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shared", [256, 512, 528])
def test_shared_prefixes(isa: Isa, dtype: str, shared: int) -> None:
    """Decode rows with common pages, of different lengths, beside others; more columns than a task holds."""
    shape = Shape(
        heads=16, kv_heads=2, dim=64, page=16, tokens=96, rows=26, width=64, pages=1100, dtype=dtype
    )
    cases = [Case(shared + i * 7 % 90, 1) for i in range(20)] + [
        Case(255, 1),
        Case(300, 1),
        Case(shared, 20),
        Case(0, 1),
    ]
    run(cases, shape, Options(), shared, shared)
    run(cases[-6:], shape, Options(softcap=5.0, sinks=True), shared + 1, shared)


@pytest.mark.parametrize(
    ("dtype", "dim", "options"),
    [
        ("bfloat16", 64, PLAIN),
        ("bfloat16", 80, Options(window=300, softcap=20.0, sinks=True)),
        ("float32", 64, PLAIN),
    ],
)
def test_bits_depend_on_the_row_alone(isa: Isa, dtype: str, dim: int, options: Options) -> None:
    """A row alone, in a batch, beside rows that share its pages, as one chunk or several: the same bits."""
    shape = Shape(heads=8, kv_heads=2, dim=dim, page=16, tokens=640, rows=7, width=64, pages=240, dtype=dtype)
    cases = [Case(600, 1), Case(570, 1), Case(590, 1), Case(0, 300), Case(530, 40), Case(250, 12)]
    batch = draw(cases, shape, options, 7, shared=512)
    together, cache = step(shape, options)(batch)
    chunks = {40: 9, 12: 2}  # of the rows with so many new tokens
    at = 0
    for row, new in enumerate(batch.q_lens[: len(cases)]):
        for first in range(0, new, chunks.get(new, new)):
            count = min(chunks.get(new, new), new - first)
            alone = np.zeros_like(batch.q_lens)
            alone[0] = count
            tokens = slice(at + first, at + first + count)
            q, k, v = np.zeros_like(batch.q), np.zeros_like(batch.k), np.zeros_like(batch.v)
            q[:count], k[:count], v[:count] = batch.q[tokens], batch.k[tokens], batch.v[tokens]
            starts = np.full_like(batch.starts, batch.starts[row] + first)
            single = Batch(
                q,
                k,
                v,
                cache,
                starts,
                alone,
                np.roll(batch.table, -row, 0),
                batch.sinks,
                batch.expected,
                batch.cache_after,
            )
            out, _ = step(shape, options)(single)
            np.testing.assert_array_equal(out[:count].view(np.uint8), together[tokens].view(np.uint8))
        at += new


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4, 2, 12, 16), "float32"), ((4, 2, 64, 8), "bfloat16"), ((4, 2, 64, 16), "float16")],
)
def test_other_shapes_fall_back_to_xla(shape: tuple[int, int, int, int], dtype: str) -> None:
    small = Shape(*shape, tokens=32, rows=4, width=16, pages=20, dtype=dtype)
    batch = draw([Case(30, 1), Case(5, 9)], small, Options(), 3)
    check(batch, step(small)(batch), 2e-5 if dtype == "float32" else 0.01)


def test_a_page_outside_the_cache_fails_the_call() -> None:
    batch = draw([Case(40, 1)], BASE, Options(), 0)
    batch.table[0, 1] = 1000
    with pytest.raises(Exception, match="row 0 reads page 1000"):
        step(BASE)(batch)


def test_a_step_of_padding_alone_writes_nothing() -> None:
    batch = draw([Case(0, 0)], BASE, Options(), 0)
    check(batch, step(BASE)(batch), 0.0)


def test_selection() -> None:
    assert attention_op("cpu") is native_paged_attention
    assert attention_op("cpu", native=False) is paged_attention
    assert attention_op("cuda") is paged_attention
