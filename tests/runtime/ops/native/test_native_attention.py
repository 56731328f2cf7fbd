"""The native paged attention, compared with a dense softmax in float64, on every instruction set of this
machine and on emulated ones. A row's bits must depend on the row alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.runtime.ops.attention import AttentionOptions, make_meta
from penstock.runtime.ops.kv_rows import kv_layer_shape
from penstock.runtime.ops.native import attention as kernels
from penstock.runtime.ops.native import library
from penstock.runtime.ops.native.attention import native_paged_attention
from tests.support.native.attention import Batch, Case, Options, Shape, check, draw, runner
from tests.support.native.kernels import (
    ATTENTION_KERNELS,
    EMULATED_AMX,
    kernel_params,
    running,
    threads_with_tiles,
)
from tests.support.suite.drawing import few

pytestmark = pytest.mark.skipif(not library.available(), reason="no native library on this machine")

TOLERANCE = {"bfloat16": 0.015, "float32": 4e-6}
BASE = Shape(heads=4, kv_heads=2, dim=64, page=16, tokens=160, rows=6, width=64, pages=200)
PLAIN = Options()
CACHES = [pytest.param(False, id="plain"), pytest.param(True, id="int8", marks=pytest.mark.sweep)]
"""Values of is_int8. Tests of random shapes draw it; these have it swept."""


@pytest.fixture(params=kernel_params(*ATTENTION_KERNELS))
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param):
        yield request.param


@functools.cache
def step(shape: Shape, options: Options = PLAIN, kernel: str = "avx2") -> Callable[..., Any]:
    return runner(native_paged_attention, shape, options)


@functools.lru_cache(maxsize=32)
def drawn(cases: tuple[Case, ...], shape: Shape, options: Options, seed: int, shared: int) -> Batch:
    """Draw a batch that all kernels get, because its result in float64 takes longer than theirs. No test may
    change it.
    """
    return draw(cases, shape, options, seed, shared=shared)


def run(
    cases: list[Case], shape: Shape, options: Options, seed: int, kernel: str, shared: int = 0
) -> tuple[Batch, np.ndarray]:
    batch = drawn(tuple(cases), shape, options, seed, shared)
    out, cache = step(shape, options, kernel)(batch)
    check(batch, (out, cache), TOLERANCE[shape.dtype])
    assert not out[len(batch.expected) :].any()
    return batch, out


dtypes = st.sampled_from(["bfloat16", "float32"])
shapes = st.builds(
    lambda group, kv_heads, dim, page, dtype, is_int8: Shape(
        heads=group * kv_heads,
        kv_heads=kv_heads,
        dim=dim,
        page=page,
        tokens=160,
        rows=6,
        width=1024 // page,
        pages=3200 // page + 8,
        dtype=dtype,
        is_int8=is_int8,
    ),
    group=st.sampled_from([1, 2, 3, 4, 8, 20]),
    kv_heads=st.sampled_from([1, 2]),
    dim=st.sampled_from([16, 64, 80, 96, 128, 240, 256]),
    page=st.sampled_from([16, 64, 512]),
    dtype=dtypes,
    is_int8=st.booleans(),
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
    alibi=st.booleans(),
    ahead=st.sampled_from([None, None, 7, 40, 600]),
)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases=rows, shape=shapes, options=options, seed=st.integers(0, 2**31))
def test_random_batches(kernel: str, cases: list[Case], shape: Shape, options: Options, seed: int) -> None:
    run(cases, shape, options, seed, kernel)


def latent(
    heads: int, dim: int, value_dim: int, dtype: str, rows: int = 6, *, is_int8: bool = False
) -> Shape:
    """Make a cache of keys only, which all heads share, and whose first channels are the values."""
    return Shape(
        heads,
        1,
        dim,
        page=16,
        tokens=160,
        rows=rows,
        width=64,
        pages=520,
        dtype=dtype,
        value_dim=value_dim,
        is_int8=is_int8,
    )


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cases=rows,
    heads=st.sampled_from([1, 4, 16, 20, 40]),
    dims=st.sampled_from([(32, 16), (48, 32), (80, 48), (80, 64), (112, 96)]),
    dtype=dtypes,
    is_int8=st.booleans(),
    options=options,
    seed=st.integers(0, 2**31),
)
def test_values_that_are_channels_of_the_keys(
    kernel: str,
    cases: list[Case],
    heads: int,
    dims: tuple[int, int],
    dtype: str,
    is_int8: bool,
    options: Options,
    seed: int,
) -> None:
    run(cases, latent(heads, *dims, dtype, is_int8=is_int8), options, seed, kernel)


@pytest.mark.parametrize("is_int8", CACHES)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("num_rows", [1, 6])
def test_the_shape_of_deepseek_v3(kernel: str, dtype: str, num_rows: int, is_int8: bool) -> None:
    """Heads of a lone row are divided among threads; there are more heads than a tile of columns holds."""
    cases = [Case(600, 1), Case(255, 1), Case(256, 1), Case(0, 1), Case(15, 3), Case(0, 0)][:num_rows]
    run(cases, latent(128, 576, 512, dtype, is_int8=is_int8), PLAIN, num_rows, kernel)


@pytest.mark.parametrize("is_int8", CACHES)
def test_one_token_has_more_columns_than_a_task_of_several(kernel: str, is_int8: bool) -> None:
    run([Case(20, 3), Case(300, 1)], latent(144, 48, 32, "bfloat16", is_int8=is_int8), PLAIN, 9, kernel)


@pytest.mark.parametrize("is_int8", CACHES)
def test_latent_rows_share_prefixes(kernel: str, is_int8: bool) -> None:
    shape = latent(4, 48, 32, "bfloat16", rows=26, is_int8=is_int8)
    run([Case(512 + i, 1) for i in range(12)] + [Case(9, 20)], shape, PLAIN, 5, kernel, shared=512)


@pytest.mark.parametrize("is_int8", CACHES)
@pytest.mark.parametrize(
    ("dtype", "shared"),
    few(
        itertools.product(("bfloat16", "float32"), (256, 512, 528)),
        [("bfloat16", 512), ("float32", 256)],
        ci=[("bfloat16", 256), ("bfloat16", 528), ("float32", 512), ("float32", 528)],
    ),
)
def test_shared_prefixes(kernel: str, dtype: str, shared: int, is_int8: bool) -> None:
    """Decode rows of different lengths that share pages, beside other rows; more rows share them than one
    task holds.
    """
    shape = Shape(
        heads=16,
        kv_heads=2,
        dim=64,
        page=16,
        tokens=96,
        rows=26,
        width=64,
        pages=1100,
        dtype=dtype,
        is_int8=is_int8,
    )
    cases = [Case(shared + i * 7 % 90, 1) for i in range(20)] + [
        Case(255, 1),
        Case(300, 1),
        Case(shared, 20),
        Case(0, 1),
    ]
    run(cases, shape, Options(), shared, kernel, shared)
    run(cases[-6:], shape, Options(softcap=5.0, sinks=True), shared + 1, kernel, shared)


def grouped(group: int, dim: int, dtype: str) -> Shape:
    heads = 2 * group
    return Shape(heads, kv_heads=2, dim=dim, page=16, tokens=640, rows=7, width=64, pages=240, dtype=dtype)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (grouped(4, 64, "bfloat16"), PLAIN),
        (grouped(1, 80, "bfloat16"), Options(window=300, softcap=20.0, sinks=True, alibi=True)),
        (grouped(4, 16, "bfloat16"), Options(alibi=True)),  # narrower than a tile
        (dataclasses.replace(grouped(3, 80, "bfloat16"), is_int8=True), Options(window=300, alibi=True)),
        (grouped(4, 64, "float32"), PLAIN),
        (dataclasses.replace(latent(4, 48, 32, "bfloat16", rows=7), tokens=640), PLAIN),
        (dataclasses.replace(latent(3, 80, 48, "bfloat16", rows=7), tokens=640), PLAIN),
        *(
            pytest.param(dataclasses.replace(many, tokens=640), PLAIN, marks=pytest.mark.ci)
            for many in (latent(40, 80, 64, "bfloat16", rows=7), latent(40, 80, 64, "float32", rows=7))
        ),
    ],
)
@pytest.mark.parametrize("is_int8", CACHES)
def test_bits_depend_on_the_row_alone(kernel: str, shape: Shape, options: Options, is_int8: bool) -> None:
    """A row has the same bits alone, in a batch, beside rows that share its pages, and in chunks of any
    size.
    """
    shape = dataclasses.replace(shape, is_int8=shape.is_int8 or is_int8)
    cases = [Case(600, 1), Case(570, 1), Case(590, 1), Case(0, 300), Case(530, 40), Case(250, 12)]
    batch = drawn(tuple(cases), shape, options, 7, 512)
    attend = step(shape, options, kernel)
    together, cache = attend(batch)
    sizes = {300: (100, 33, 300), 40: (1, 7, 16), 12: (2, 12), 1: (1,)}  # chunks by new tokens
    at = 0
    for row, new in enumerate(batch.q_lens[: len(cases)]):
        for first, count in [(i, min(size, new - i)) for size in sizes[new] for i in range(0, new, size)]:
            alone = np.zeros_like(batch.q_lens)
            alone[0] = count
            tokens = slice(at + first, at + first + count)
            q, k, v = (
                None if x is None else np.concatenate([x[tokens], np.zeros_like(x[count:])])
                for x in (batch.q, batch.k, batch.v)
            )
            assert q is not None
            assert k is not None
            starts = np.full_like(batch.starts, batch.starts[row] + first)
            single = dataclasses.replace(
                batch,
                q=q,
                k=k,
                v=v,
                cache=cache,
                starts=starts,
                q_lens=alone,
                table=np.roll(batch.table, -row, 0),
            )
            out, _ = attend(single)
            assert np.array_equal(out[:count].view(np.uint8), together[tokens].view(np.uint8)), (row, first)
        at += new
    assert kernel != EMULATED_AMX or threads_with_tiles() == 0


@pytest.mark.ci
@pytest.mark.parametrize(
    ("shape", "dtype", "value_dim"),
    [
        ((4, 2, 12, 16), "float32", None),
        ((4, 2, 64, 8), "bfloat16", None),
        ((4, 2, 64, 16), "float16", None),
        ((4, 1, 64, 16), "float32", 40),
    ],
)
def test_other_shapes_fall_back_to_xla(
    shape: tuple[int, int, int, int], dtype: str, value_dim: int | None
) -> None:
    small = Shape(*shape, tokens=32, rows=4, width=16, pages=20, dtype=dtype, value_dim=value_dim)
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


def test_all_layers_share_the_plan_of_their_window() -> None:
    """Every layer asks for a plan, and XLA must merge the calls with equal arguments."""
    num_layers = 6

    def layers(
        q: jax.Array, kvs: tuple[jax.Array, ...], starts: jax.Array, q_lens: jax.Array, table: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        meta = make_meta(
            starts=starts,
            q_lens=q_lens,
            page_table=table,
            num_tokens=q.shape[0],
            decode_only=False,
            page_size=BASE.page,
            num_pages=BASE.pages,
        )
        caches = []
        for layer, kv in enumerate(kvs):
            new = q[:, : BASE.kv_heads]
            window = None if layer % 3 else 32
            out, kv = native_paged_attention(
                q, new, new, kv, meta, AttentionOptions(1.0, sliding_window=window)
            )
            q = q + out
            caches.append(kv)
        return q, tuple(caches)

    q = jnp.zeros((BASE.tokens, BASE.heads, BASE.dim), jnp.float32)
    kv = jnp.zeros(kv_layer_shape(BASE.pages, BASE.page, BASE.kv_heads, BASE.dim), jnp.float32)
    ints = jnp.zeros(BASE.rows, jnp.int32)
    table = jnp.zeros((BASE.rows, BASE.width), jnp.int32)
    compiled = jax.jit(layers).lower(q, (kv,) * num_layers, ints, ints, table).compile().as_text()
    assert compiled is not None
    assert compiled.count('custom_call_target="penstock_attention"') == num_layers
    assert compiled.count('custom_call_target="penstock_attention_plan"') == 2


def plan_of(lens: np.ndarray, q_lens: np.ndarray, table: np.ndarray, heads: int) -> np.ndarray:
    """Return the plan of rows that have `lens` positions after the step, in pages of 16. It raises if the
    plan does not fit its array.
    """
    made = kernels.plan(
        jnp.asarray(lens - q_lens),
        jnp.asarray(q_lens),
        jnp.asarray(table),
        num_tokens=int(q_lens.sum()),
        num_heads=heads,
        kv_shape=(int(table.max()) + 1, 2, 1, 16, 64),
        options=AttentionOptions(1.0),
    )
    return np.asarray(made)


@pytest.mark.parametrize(
    "reach",
    [
        pytest.param([18, 18, 19], id="beyond the row"),
        pytest.param([15, 17, 18], id="before itself"),
        pytest.param([18, 17, 18], id="less than the token before"),
    ],
)
def test_a_token_that_looks_ahead_beyond_its_row_is_refused(reach: list[int]) -> None:
    with pytest.raises(Exception, match=r"row 0 ends at 18, and its token at 1\d looks ahead to"):
        kernels.plan(
            jnp.array([16], jnp.int32),
            jnp.array([3], jnp.int32),
            jnp.array([[0, 1]], jnp.int32),
            jnp.array(reach, jnp.int32),
            num_tokens=3,
            num_heads=1,
            kv_shape=(2, 2, 1, 16, 64),
            options=AttentionOptions(1.0),
        )


@pytest.mark.parametrize("heads", [1, 3, 16])
def test_the_largest_plan_fits(heads: int) -> None:
    """Each row shares one part more with the next row, which gives the largest number of tasks with the
    largest number of members.
    """
    rows = 40
    table = np.arange(rows * (rows + 1) * 16, dtype=np.int32).reshape(rows, -1)
    for row in range(1, rows):
        table[row:, : row * 16] = table[row, : row * 16]
    lens = np.full(rows, table.shape[1] * 16, np.int32)
    plan = plan_of(lens, np.ones(rows, np.int32), table, heads)
    assert plan[0] == rows


@settings(max_examples=30, deadline=None)
@given(
    lens=st.lists(st.integers(1, 900), min_size=1, max_size=8),
    new=st.lists(st.sampled_from([1, 1, 1, 2, 16, 300]), min_size=8, max_size=8),
    alike=st.lists(st.integers(0, 60), min_size=8, max_size=8),
    heads=st.sampled_from([1, 2, 16, 24, 200]),
)
def test_every_plan_fits(lens: list[int], new: list[int], alike: list[int], heads: int) -> None:
    table = np.arange(len(lens) * 57, dtype=np.int32).reshape(len(lens), 57)
    for row in range(1, len(lens)):
        table[row, : alike[row]] = table[row - 1, : alike[row]]
    q_lens = np.minimum(lens, new[: len(lens)]).astype(np.int32)
    assert plan_of(np.array(lens, np.int32), q_lens, table, heads)[0] == q_lens.sum()
