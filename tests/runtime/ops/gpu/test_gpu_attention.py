"""The kernels for attention on GPUs, interpreted on a CPU and compared with a dense softmax in float64; and
which programs have them, as they are lowered and compiled for a GPU that is not there.

What a row must not read is NaN, also within its pages.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from penstock.runtime.ops.attention import AttentionOptions, make_meta
from penstock.runtime.ops.gpu import decode_attention, latent_attention
from penstock.runtime.ops.gpu.attention import gpu_paged_attention
from penstock.runtime.ops.gpu.forms import FORMS, ON_B200, ON_HOPPER, ON_RTX_50, GpuForm
from penstock.runtime.ops.kv_rows import GPU_LANES, kv_layer_shape
from tests.support.gpu.compiled import CACHE, LAYERS
from tests.support.native.attention import Batch, Case, Options, Shape, alone, check, draw, runner

BF16, F32, INT8 = np.dtype(jnp.bfloat16), np.dtype(np.float32), np.dtype(np.int8)
ROWS, WIDTH, PAGES = 3, 4, 14
TOKENS = 150
"""Of a step with chunks: two blocks of 64 tokens, or one of 128, and a part of another."""
LATENT_CHUNKS = [Case(90, 11), Case(1, 1), Case(60, 8)]
TOLERANCE = 2e-2
"""Weights and results are rounded to bfloat16, by 2^-9 of about 4 at most."""
# The interpreter multiplies with keys that are NaN, before the kernel masks the products.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="JAX before 0.11 cannot interpret kernels for GPUs"
)
THREADS = 8
needs_threads = pytest.mark.skipif(
    int(os.environ.get("PJRT_NPROC", "0")) < THREADS,
    reason=f"the interpreter needs more threads of XLA for three warpgroups: PJRT_NPROC={THREADS}",
)
"""A warpgroup of the interpreter that waits holds a thread of XLA's pool. Where the pool has two threads, as
on two processors, the third warpgroup may find none, and all wait for ever. So may the fourth of two kernels
that run at a time."""
HOPPER_AND_B200 = pytest.mark.parametrize("form", [ON_HOPPER, ON_B200], ids=lambda form: form.name)
needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="JAX's part for CUDA is not installed"
)


@functools.cache
def step(shape: Shape, options: Options, *, decode: bool, form: GpuForm) -> Callable[..., Any]:
    attention = functools.partial(gpu_paged_attention, form=form, interpreted=True)
    return runner(attention, shape, options, decode=decode)


def as_stored(batch: Batch, shape: Shape) -> Batch:
    """Return the step with its cache in the dtype that it has on a GPU."""
    return batch if shape.is_int8 else dataclasses.replace(batch, cache=batch.cache.view(BF16))


def attends(
    cases: list[Case],
    shape: Shape,
    options: Options,
    seed: int,
    *,
    decode: bool,
    form: GpuForm = ON_HOPPER,
    **how: Any,
) -> None:
    batch = draw(cases, shape, options, seed)
    stored = as_stored(batch, shape)
    interpreting: Any = plgpu
    with interpreting.force_gpu_interpret_mode(interpreting.InterpretGPUParams(**how)):
        check(batch, step(shape, options, decode=decode, form=form)(stored), TOLERANCE)


def have_the_same_bits_alone(
    cases: list[Case], shape: Shape, options: Options, seed: int, *, decode: bool, form: GpuForm
) -> None:
    """Compute a step, and for each of its rows one by the same program, which has no other row."""
    batch = as_stored(draw(cases, shape, options, seed), shape)
    run = step(shape, options, decode=decode, form=form)
    interpreting: Any = plgpu
    with interpreting.force_gpu_interpret_mode(interpreting.InterpretGPUParams()):
        together = run(batch)[0]
        for row, case in enumerate(cases):
            one, its = alone(batch, row)
            assert together[its].tobytes() == run(one)[0][: case.new].tobytes()


def single(pasts: list[int], shape: Shape, options: Options, seed: int, **how: Any) -> None:
    """Compute rows of one token in a decode step."""
    attends([Case(past, 1) for past in pasts], shape, options, seed, decode=True, **how)


def sized(heads: int, kv_heads: int, dim: int = 64, page: int = 64) -> Shape:
    return Shape(heads, kv_heads, dim, page, ROWS, ROWS, WIDTH, PAGES, dtype="bfloat16")


def chunked(heads: int, kv_heads: int, dim: int = 64, page: int = 64) -> Shape:
    return dataclasses.replace(sized(heads, kv_heads, dim, page), tokens=TOKENS)


def int8(shape: Shape) -> Shape:
    """Keep the same in int8."""
    return dataclasses.replace(shape, is_int8=True, lanes=GPU_LANES)


def latent(heads: int, tokens: int = ROWS, page: int = 64, width: int = WIDTH) -> Shape:
    """Keys of 128 latent and 64 rotary channels."""
    sizes = (page, tokens, ROWS, width, ROWS * width + 2)
    return Shape(heads, 1, 192, *sizes, dtype="bfloat16", value_dim=128)


@needs_interpreter
@pytest.mark.ci
@pytest.mark.parametrize(
    ("shape", "options", "form"),
    [
        (sized(4, 2), Options(), ON_HOPPER),
        (sized(8, 1, dim=128), Options(window=70), ON_HOPPER),  # merged by a kernel
        (sized(3, 3, page=128), Options(chunk=96, softcap=2.0, sinks=True), ON_HOPPER),
        (sized(6, 2, dim=128), Options(window=70, softcap=2.0, sinks=True), ON_B200),
        (int8(sized(4, 2, dim=128)), Options(window=70, sinks=True), ON_HOPPER),
        (int8(sized(3, 3, page=128)), Options(chunk=96, softcap=2.0), ON_HOPPER),
        (int8(sized(6, 2)), Options(window=70, softcap=2.0, sinks=True), ON_B200),
        (int8(sized(2, 1, dim=256)), Options(window=70), ON_HOPPER),  # sums go out in pieces
        (sized(4, 2, dim=128), Options(sinks=True), ON_RTX_50),
        (latent(20), Options(), ON_HOPPER),
        (latent(72, page=128, width=2), Options(), ON_HOPPER),  # two tiles of heads
        (latent(20), Options(), ON_B200),
    ],
    ids=[
        *("plain", "window", "everything", "Blackwell", "int8", "int8, wide", "int8, Blackwell"),
        *("int8, pieces", "pieces", "latent", "more latent", "latent, Blackwell"),
    ],
)
@settings(max_examples=5, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_rows_of_any_length(
    shape: Shape, options: Options, form: GpuForm, data: st.DataObject, seed: int
) -> None:
    """And fewer rows than the program has."""
    most = shape.width * shape.page - 1
    edges = st.sampled_from([0, shape.page - 1, shape.page, min(2 * shape.page, most), most])
    pasts = data.draw(st.lists(edges | st.integers(0, most), min_size=1, max_size=ROWS))
    single(pasts, shape, options, seed, form=form)


@needs_interpreter
@pytest.mark.ci
@pytest.mark.parametrize(
    ("shape", "options", "form"),
    [
        (sized(4, 2), Options(softcap=2.0, sinks=True), ON_HOPPER),
        (sized(4, 2), Options(softcap=2.0, sinks=True), ON_B200),
        (int8(sized(4, 2)), Options(softcap=2.0, sinks=True), ON_HOPPER),
        (latent(20), Options(), ON_HOPPER),
    ],
    ids=["Hopper", "B200", "int8", "latent"],
)
@settings(max_examples=2, deadline=None)
@given(pasts=st.lists(st.integers(0, WIDTH * 64 - 1), min_size=2, max_size=ROWS), seed=st.integers(0, 2**31))
def test_a_row_has_the_same_bits_beside_others_and_alone(
    shape: Shape, options: Options, form: GpuForm, pasts: list[int], seed: int
) -> None:
    cases = [Case(past, 1) for past in pasts]
    have_the_same_bits_alone(cases, shape, options, seed, decode=True, form=form)


@needs_interpreter
@pytest.mark.sweep
@pytest.mark.parametrize(("window", "pages"), [(None, 8), (300, 5)])
@pytest.mark.parametrize(("is_int8", "of_row"), [(False, 2 * 64), (True, 64 + 4)], ids=["bfloat16", "int8"])
def test_a_decode_step_copies_what_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
    copied: list[int],
    window: int | None,
    pages: int,
    is_int8: bool,
    of_row: int,
) -> None:
    """16 rows of 500 tokens, and their queries once for each block. One head of keys stands for eight: with
    these a GPU has two blocks for each row and head. With a window of 300, a row sees positions from 200 on,
    which lie in the last 5 of its 8 pages.
    """
    monkeypatch.setattr(decode_attention, "_BLOCKS", 16 * 2)
    shape = Shape(2, 1, 64, 64, 16, 16, 20, 256, dtype="bfloat16")
    attends([Case(499, 1)] * 16, int8(shape) if is_int8 else shape, Options(window=window), 1, decode=True)
    in_use, queries = 16 * pages * 64 * 2 * of_row, 16 * 2 * (8 * 64 * 2)
    assert sum(copied) == in_use + queries <= 1.05 * in_use


@needs_interpreter
@pytest.mark.sweep
def test_a_decode_step_copies_latents_once(monkeypatch: pytest.MonkeyPatch, copied: list[int]) -> None:
    """16 rows of 500 tokens, shared by two blocks each: what is both a key and a value is copied once."""
    monkeypatch.setattr(latent_attention, "_BLOCKS", 16 * 2)
    shape = dataclasses.replace(latent(8), tokens=16, rows=16, width=20, pages=256)
    attends([Case(499, 1)] * 16, shape, Options(), 1, decode=True)
    in_use, queries = 16 * 8 * 64 * (192 * 2), 16 * 2 * (8 * 192 * 2)
    assert sum(copied) == in_use + queries <= 1.05 * in_use


@needs_interpreter
def test_more_heads_than_a_product_of_the_tensor_cores_has_rows() -> None:
    """Nine heads of keys, with eight of queries each, are two launches."""
    single([70, 0], sized(72, 9), Options(sinks=True), 1)


@needs_interpreter
@pytest.mark.ci
@pytest.mark.parametrize(
    ("kept", "form"), [(BF16, ON_HOPPER), (BF16, ON_B200), (INT8, ON_HOPPER)], ids=["Hopper", "B200", "int8"]
)
def test_a_block_adds_up_more_pages_than_shared_memory_holds(
    monkeypatch: pytest.MonkeyPatch, kept: np.dtype[Any], form: GpuForm
) -> None:
    """A GPU that is full has one block for each row, and each reads all pages of its row."""
    monkeypatch.setattr(decode_attention, "_BLOCKS", ROWS)
    width = 8 if kept == INT8 else 6  # of int8, shared memory holds six
    shape = dataclasses.replace(int8(sized(5, 1)) if kept == INT8 else sized(5, 1), width=width, pages=20)
    single([width * 64 - 1, 3, 200], shape, Options(softcap=2.0, sinks=True), 4, form=form)


@needs_interpreter
@pytest.mark.ci
@HOPPER_AND_B200
def test_a_block_adds_up_more_latents_than_shared_memory_holds(
    monkeypatch: pytest.MonkeyPatch, form: GpuForm
) -> None:
    """And writes what the row has, which nothing merges. A row of padding is 0."""
    monkeypatch.setattr(latent_attention, "_BLOCKS", ROWS)
    single([6 * 64 - 1, 3], latent(5, width=6), Options(), 4, form=form)


@needs_interpreter
@needs_threads
@pytest.mark.sweep
@pytest.mark.parametrize("heads", [16, 128])
@HOPPER_AND_B200
def test_latents_in_deepseeks_sizes(heads: int, form: GpuForm) -> None:
    """Of V2-Lite and V3, with the two pieces of a page that shared memory has room for."""
    decode = Shape(heads, 1, 576, 128, 2, 2, 3, 8, dtype="bfloat16", value_dim=512)
    single([300, 5], decode, Options(), 1, form=form)
    chunks = dataclasses.replace(decode, tokens=4)
    attends([Case(250, 3), Case(70, 1)], chunks, Options(), 2, decode=False, form=form)


@needs_interpreter
@needs_threads
@pytest.mark.sweep
@pytest.mark.parametrize(("heads", "form"), [(3, ON_HOPPER), (16, ON_HOPPER), (72, ON_HOPPER), (16, ON_B200)])
@settings(max_examples=2, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_chunks_of_latents_of_any_length(heads: int, form: GpuForm, data: st.DataObject, seed: int) -> None:
    attends(data.draw(steps(24)), latent(heads, tokens=24), Options(), seed, decode=False, form=form)


@needs_interpreter
@pytest.mark.sweep
@HOPPER_AND_B200
def test_no_warpgroup_reads_latents_that_another_still_writes(
    monkeypatch: pytest.MonkeyPatch, form: GpuForm
) -> None:
    """The pages of a row, all of which one block reads, come round to each place in shared memory again."""
    monkeypatch.setattr(latent_attention, "_BLOCKS", ROWS)
    races = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks").get_races
    single([9 * 64 - 1, 3, 450], latent(8, width=9), Options(), 2, form=form, detect_races=True)
    assert not races().races_found


@needs_interpreter
@needs_threads
@pytest.mark.sweep
def test_no_warpgroup_reads_latents_of_a_chunk_that_another_still_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latent_attention, "_BLOCKS", 1)
    races = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks").get_races
    shape = latent(16, tokens=16, width=5)
    attends([Case(300, 10), Case(7, 3)], shape, Options(), 2, decode=False, detect_races=True)
    assert not races().races_found


@needs_interpreter
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("form", "dim"), [(ON_HOPPER, 64), (ON_B200, 64), (ON_RTX_50, 128)], ids=["Hopper", "B200", "RTX 50"]
)
@pytest.mark.parametrize("is_int8", [False, True], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("options", [Options(), Options(window=70, sinks=True)])
def test_no_warpgroup_reads_what_another_still_writes(
    monkeypatch: pytest.MonkeyPatch, options: Options, is_int8: bool, form: GpuForm, dim: int
) -> None:
    """The pages of a row, all of which one block reads, come round to each place in shared memory again, of
    which heads of 128 have two on an RTX 50. The interpreter ends copies of results at once, so it would not
    find that a piece of them is overwritten too soon.
    """
    monkeypatch.setattr(decode_attention, "_BLOCKS", ROWS)
    races = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks").get_races
    shape = dataclasses.replace(sized(8, 1, dim), width=9, pages=30)
    shape = int8(shape) if is_int8 else shape
    single([9 * 64 - 1, 3, 450], shape, options, 2, form=form, detect_races=True)
    assert not races().races_found


@st.composite
def steps(draw: st.DrawFn, tokens: int = TOKENS) -> list[Case]:
    """Rows of one token and of more, of which the step has room for so many together."""
    left, cases = tokens, []
    for _ in range(draw(st.integers(1, ROWS))):
        if left:
            new = draw(st.sampled_from([1, min(64, left), left]) | st.integers(1, left))
            most = WIDTH * 64 - new
            edges = st.sampled_from([0, min(63, most), min(64, most), most])
            cases.append(Case(draw(edges | st.integers(0, most)), new))
            left -= new
    return cases


@needs_interpreter
@pytest.mark.ci
def test_chunks_in_a_process_with_threads_enough() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "chunks and beside"],
        env={**os.environ, "PJRT_NPROC": str(THREADS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "8 passed" in done.stdout


@needs_interpreter
@needs_threads
@pytest.mark.ci
def test_chunks_of_latents_beside_rows_of_one_token() -> None:
    """A block has the 24 heads of two tokens, with padding. So the last one of the first row has one token.
    It copies the queries of the next row, too, and must not write for them.
    """
    attends(LATENT_CHUNKS, latent(20, tokens=24, width=2), Options(), 5, decode=False)


@needs_interpreter
@needs_threads
@pytest.mark.ci
@pytest.mark.parametrize(
    ("shape", "form"),
    [
        (chunked(2, 1), ON_HOPPER),
        (chunked(2, 1), ON_B200),
        (chunked(2, 1), ON_RTX_50),
        (int8(chunked(2, 1)), ON_HOPPER),
    ],
    ids=["Hopper", "B200", "RTX 50", "int8"],
)
def test_chunks_beside_rows_of_one_token(shape: Shape, form: GpuForm) -> None:
    """Three pages before a chunk of two tiles, and one key before a single token."""
    cases = [Case(190, 66), Case(1, 1), Case(0, 2)]
    attends(cases, shape, Options(softcap=2.0, sinks=True), 5, decode=False, form=form)


@needs_interpreter
@needs_threads
@pytest.mark.sweep
def test_chunks_of_latents_have_the_same_bits_alone() -> None:
    """The first token of the third row is the 13th."""
    shape = latent(20, tokens=24, width=2)
    have_the_same_bits_alone(LATENT_CHUNKS, shape, Options(), 5, decode=False, form=ON_HOPPER)


@needs_interpreter
@needs_threads
@pytest.mark.ci
@pytest.mark.parametrize(
    ("shape", "form"),
    [(chunked(2, 1), ON_HOPPER), (chunked(2, 1), ON_B200), (int8(chunked(2, 1)), ON_HOPPER)],
    ids=["Hopper", "B200", "int8"],
)
def test_chunks_beside_others_have_the_bits_of_chunks_alone(shape: Shape, form: GpuForm) -> None:
    """The first token of the third row is the 67th. Blocks are aligned to 8 tokens, so its tokens are in
    other lines of their tiles when it is alone.
    """
    cases = [Case(190, 66), Case(1, 1), Case(130, 70)]
    options = Options(softcap=2.0, sinks=True)
    have_the_same_bits_alone(cases, shape, options, 5, decode=False, form=form)


@needs_interpreter
@needs_threads
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("shape", "options", "form"),
    [
        (chunked(4, 2), Options(), ON_HOPPER),
        (chunked(3, 1), Options(window=70), ON_HOPPER),  # the tiles of a block have tokens of one head
        (chunked(4, 1, page=128), Options(chunk=40, softcap=2.0, sinks=True), ON_HOPPER),
        (chunked(2, 2, dim=256), Options(window=50, chunk=96), ON_HOPPER),  # a block has one tile
        (chunked(2, 1, dim=128), Options(window=1, sinks=True), ON_HOPPER),
        (chunked(3, 1), Options(window=70), ON_RTX_50),
        (chunked(2, 1, dim=128), Options(sinks=True), ON_RTX_50),  # results go out in pieces
        (chunked(2, 2, dim=256), Options(window=50), ON_B200),
        (chunked(4, 1, dim=128, page=128), Options(chunk=40, softcap=2.0, sinks=True), ON_B200),
        (chunked(2, 2, dim=192), Options(), ON_B200),
        (chunked(3, 1), Options(window=70), ON_B200),
        (int8(chunked(4, 2, dim=128)), Options(), ON_HOPPER),
        (int8(chunked(3, 1)), Options(window=70, sinks=True), ON_HOPPER),
        (int8(chunked(2, 1, page=128)), Options(chunk=40, softcap=2.0), ON_HOPPER),
        (int8(chunked(2, 1, dim=128, page=128)), Options(), ON_HOPPER),
        (int8(chunked(2, 1)), Options(), ON_RTX_50),
        (int8(chunked(2, 1, dim=128)), Options(window=70, sinks=True), ON_B200),
    ],
    ids=[
        *("plain", "odd", "everything", "wide", "narrow", "RTX 50", "RTX 50 pieces", "B200 pieces"),
        *("B200", "B200 wide", "B200 odd", "int8", "int8 odd", "int8 chunk", "int8 pieces", "int8 RTX 50"),
        "int8 B200",
    ],
)
@settings(max_examples=2, deadline=None)
@given(cases=steps(), seed=st.integers(0, 2**31))
def test_chunks_of_any_length(
    shape: Shape, options: Options, form: GpuForm, cases: list[Case], seed: int
) -> None:
    attends(cases, shape, options, seed, decode=False, form=form)


@needs_interpreter
@needs_threads
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("form", "dim", "is_int8"),
    [
        (ON_HOPPER, 64, False),
        (ON_B200, 64, False),
        (ON_RTX_50, 64, False),
        (ON_RTX_50, 128, False),
        (ON_HOPPER, 64, True),
        (ON_B200, 64, True),
        (ON_RTX_50, 64, True),
    ],
    ids=["Hopper", "B200", "RTX 50", "RTX 50 wide", "int8", "int8 B200", "int8 RTX 50"],
)
@pytest.mark.parametrize(
    ("heads", "options"), [(2, Options()), (3, Options(window=200, sinks=True))], ids=["heads", "tokens"]
)
def test_no_tile_of_a_chunk_reads_what_another_still_writes(
    heads: int, options: Options, form: GpuForm, dim: int, is_int8: bool
) -> None:
    """A block's pages come round to each place in shared memory more than once."""
    races = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks").get_races
    shape = dataclasses.replace(chunked(heads, 1, dim), width=9, pages=30)
    shape = int8(shape) if is_int8 else shape
    cases = [Case(420, 140), Case(7, 3)]
    attends(cases, shape, options, 2, decode=False, form=form, detect_races=True)
    assert not races().races_found


@needs_interpreter
@needs_threads
@pytest.mark.sweep
@pytest.mark.parametrize(("window", "pages"), [(None, 5 + 6 + 7), (64, 3 + 3 + 3)])
def test_a_chunk_copies_the_pages_that_its_blocks_attend_to(
    copied: list[int], window: int | None, pages: int
) -> None:
    """140 tokens after 250, in blocks of 64, which end before positions 314, 378 and 390: they read 5, 6 and
    7 pages of 64. With a window of 64 the blocks see positions from 187, 251 and 315 on, so they read pages 2
    to 4, 3 to 5 and 4 to 6. Each of the two heads has its own queries.
    """
    shape = dataclasses.replace(chunked(2, 1), width=20, pages=30)
    attends([Case(250, 140)], shape, Options(window=window), 1, decode=False)
    assert sum(copied) == pages * 64 * (2 * 64 * 2) + 2 * 3 * 64 * (64 * 2)


def lowered(
    shape: Shape, options: Options, kept: np.dtype[Any], *, decode: bool, form: GpuForm = ON_HOPPER
) -> str:
    """Make a step for a GPU, before XLA compiles it."""
    tokens = shape.rows if decode else 32
    keys_only = shape.value_dim is not None
    sizes = (shape.pages, shape.page, shape.kv_heads, shape.dim)
    cache = kv_layer_shape(*sizes, keys_only=keys_only, is_int8=kept == INT8, lanes=shape.lanes)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array | None, kv: jax.Array, ints: jax.Array) -> Any:
        meta = make_meta(
            starts=ints[0],
            q_lens=ints[1],
            page_table=ints.T,
            num_tokens=tokens,
            decode_only=decode,
            page_size=shape.page,
            num_pages=shape.pages,
        )
        if options.ahead is not None:
            meta = meta._replace(reach=meta.positions + 1)
        given: dict[str, Any] = {
            "sliding_window": options.window,
            "softcap": options.softcap,
            "chunk": options.chunk,
            "slopes": jnp.ones(shape.heads, jnp.float32) if options.alibi else None,
        }
        own = AttentionOptions(0.1, **given, value_dim=shape.value_dim)
        return gpu_paged_attention(q, k, v, kv, meta, own, form=form)

    q, new = (
        jax.ShapeDtypeStruct((tokens, heads, shape.dim), jnp.dtype(shape.dtype))
        for heads in (shape.heads, shape.kv_heads)
    )
    arguments = (
        q,
        new,
        None if keys_only else new,
        jax.ShapeDtypeStruct(cache, kept),
        jax.ShapeDtypeStruct((4, shape.rows), np.int32),
    )
    return str(jax.jit(attend).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.parametrize(
    ("shape", "options", "kept", "decode", "launches"),
    [
        (sized(16, 8, dim=128), Options(), BF16, True, 2),
        (sized(8, 4, dim=256), Options(window=512, softcap=50.0), BF16, True, 2),
        (sized(14, 2), Options(chunk=128), BF16, True, 1),  # narrow heads are merged by XLA
        (sized(16, 8, dim=128), Options(), BF16, False, 3),  # rows of one token, and of several
        (sized(15, 3), Options(window=512, softcap=50.0), BF16, False, 2),
        (sized(16, 8, dim=128), Options(alibi=True), BF16, False, 0),
        (sized(16, 8, dim=128), Options(ahead=5), BF16, False, 0),
        (int8(sized(16, 8, dim=128)), Options(), INT8, True, 2),
        (int8(sized(16, 8, dim=128)), Options(), INT8, False, 3),
        (int8(sized(8, 4, dim=256)), Options(), INT8, True, 2),
        (int8(sized(8, 4, dim=256)), Options(), INT8, False, 0),  # no room for two pages and two operands
        (sized(8, 4, dim=320), Options(), BF16, True, 0),  # a product has fewer columns
        (sized(16, 8, dim=128), Options(), INT8, True, 0),  # rows of 132 bytes
        (dataclasses.replace(sized(16, 8), dtype="float32"), Options(), F32, True, 0),
        (sized(16, 8, dim=96), Options(), BF16, True, 0),
        (sized(16, 8, page=16), Options(), BF16, True, 0),
        (latent(16), Options(), BF16, True, 2),
        (latent(16), Options(), BF16, False, 4),
        (latent(16), Options(window=100), BF16, True, 0),
        (latent(16), Options(ahead=5), BF16, False, 0),
        (dataclasses.replace(latent(16), value_dim=192), Options(), BF16, True, 0),  # no two halves of 64
        (dataclasses.replace(latent(16), dim=640, value_dim=512), Options(), BF16, True, 0),  # too large
    ],
)
def test_which_programs_have_the_kernels(
    shape: Shape, options: Options, kept: np.dtype[Any], decode: bool, launches: int
) -> None:
    text = lowered(shape, options, kept, decode=decode)
    assert len(re.findall(r"@mosaic_gpu|\"mosaic_gpu", text)) == launches


@pytest.mark.skipif(not hasattr(plgpu, "mma"), reason="JAX before 0.11 has no products of warps")
@pytest.mark.parametrize(
    ("form", "shape", "decode", "launches"),
    [
        (ON_B200, int8(sized(16, 8, dim=128)), True, 2),
        (ON_B200, int8(sized(16, 8, dim=128)), False, 3),
        (ON_B200, int8(sized(14, 2, page=128)), False, 0),  # too few registers
        (ON_B200, sized(16, 8, dim=128), True, 2),
        (ON_B200, sized(14, 2, page=128), True, 1),
        (ON_B200, sized(16, 8, dim=128), False, 3),  # rows of one token, and of several
        (ON_B200, sized(8, 4, dim=256), True, 2),
        (ON_B200, sized(8, 4, dim=256), False, 3),
        (ON_B200, latent(16), True, 2),
        (ON_B200, latent(16), False, 4),
        (ON_RTX_50, sized(14, 2), False, 2),
        (ON_RTX_50, sized(14, 2, page=128), True, 1),
        (ON_RTX_50, sized(16, 8, dim=128), False, 3),
        (ON_RTX_50, int8(sized(16, 8, dim=128)), True, 2),
        (ON_RTX_50, int8(sized(16, 8, dim=128)), False, 0),
        (ON_RTX_50, sized(8, 4, dim=256), True, 0),  # shared memory lacks the room for two pages
        (ON_RTX_50, dataclasses.replace(latent(16), dim=576, value_dim=512), True, 0),
    ],
)
def test_which_programs_have_the_kernels_on_blackwell(
    form: GpuForm, shape: Shape, decode: bool, launches: int
) -> None:
    text = lowered(shape, Options(), INT8 if shape.is_int8 else BF16, decode=decode, form=form)
    assert len(re.findall(r"@mosaic_gpu|\"mosaic_gpu", text)) == launches


SIZES = list(itertools.product((16, 64, 128, 256), (64, 96, 128, 192, 256, 320)))
"""Of pages and heads, of which the kernels take some."""


@pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: form.name)
def test_int8_is_taken_in_the_sizes_of_bfloat16(form: GpuForm) -> None:
    """So one list of sizes tells an operator of both."""
    wide, narrow = (
        [size for size in SIZES if decode_attention.takes(*size, 8, form=form, is_int8=is_int8)]
        for is_int8 in (False, True)
    )
    assert wide == narrow != []


@pytest.mark.sweep
@pytest.mark.parametrize("is_int8", [False, True], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: form.name)
def test_what_is_taken_has_room_in_the_shared_memory_of_its_gpu(form: GpuForm, is_int8: bool) -> None:
    """JAX counts what a kernel needs when it is lowered, and refuses what has no room."""
    if form.by_warps and not hasattr(plgpu, "mma"):
        pytest.skip("JAX before 0.11 has no products of warps")
    limited = importlib.import_module("jax.experimental.mosaic.gpu.core").artificial_shared_memory_limit
    for page, dim in SIZES:
        if decode_attention.takes(page, dim, 8, form=form, is_int8=is_int8):
            shape = int8(sized(8, 1, dim, page)) if is_int8 else sized(8, 1, dim, page)
            with limited(form.shared_bytes):
                single, several = (
                    lowered(shape, Options(), INT8 if is_int8 else BF16, decode=decode, form=form)
                    for decode in (True, False)
                )
            assert "mosaic_gpu" in single
            assert "mosaic_gpu" in several or is_int8  # of which the kernel for chunks takes fewer sizes


@needs_cuda
@pytest.mark.ci
def test_a_decode_program_compiled_for_an_h200_copies_no_cache() -> None:
    """XLA must neither copy a layer's cache nor convert it, which would cost more than all else in a step."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.gpu.compiled"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(re.findall(r'custom_call_target="mosaic_gpu', done.stdout)) == 2 * LAYERS
    sizes = ",".join(map(str, CACHE))
    made = re.findall(rf"= \w+\[{sizes}\]\S* ([\w-]+)\(", done.stdout)
    assert set(made) <= {"parameter", "get-tuple-element", "scatter", "fusion", "bitcast"}
