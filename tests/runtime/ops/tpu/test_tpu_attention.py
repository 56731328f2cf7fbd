"""The kernels for TPUs, interpreted on a CPU and compared with a dense softmax in float64; the
interpreter copies as a TPU does, and finds races between copies.

What a row must not read is NaN, also within its pages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from penstock.runtime.ops.kv_rows import kv_layer_shape
from penstock.runtime.ops.tpu import chunk_attention as chunk_kernel
from penstock.runtime.ops.tpu import decode_attention as decode_kernel
from penstock.runtime.ops.tpu import latent_attention as latent_kernel
from penstock.runtime.ops.tpu.attention import supports, tpu_paged_attention
from tests.support.native.attention import Batch, Case, Options, Shape, alone, check, draw, runner

BF16, F32, INT8 = np.dtype(jnp.bfloat16), np.dtype(np.float32), np.dtype(np.int8)
ROWS, WIDTH, PAGES, PAGE = 3, 6, 20, 16
TOKENS = 40
"""Of a step with chunks: some blocks of 16 tokens, and a part of one."""
TOLERANCE = 2e-2
"""Weights and results are rounded to bfloat16, by 2^-9 of about 4 at most."""


@functools.cache
def step(shape: Shape, options: Options, *, decode: bool) -> Callable[..., Any]:
    """Make a step in which a row's pages come round to each place on the chip more than once, so races would
    be found.
    """
    interpret = pltpu.InterpretParams(detect_races=True)
    return runner(functools.partial(tpu_paged_attention, interpret=interpret), shape, options, decode=decode)


def stored(batch: Batch) -> Batch:
    """Return the batch with its cache as a TPU has it: 16 bits are bfloat16 there."""
    cache = batch.cache
    return batch if cache.dtype == INT8 else dataclasses.replace(batch, cache=cache.view(BF16))


def attends(cases: list[Case], shape: Shape, options: Options, seed: int, *, decode: bool) -> None:
    batch = draw(cases, shape, options, seed)
    run = step(shape, options, decode=decode)
    check(batch, run(stored(batch)), TOLERANCE)
    found = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call").races
    assert not found.races_found


@contextlib.contextmanager
def short() -> Iterator[None]:
    """Make blocks and spans of pages so short that a few tokens have several, as large steps do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_kernel, "MOST_BLOCK", 16)
        patch.setattr(latent_kernel, "MOST_BLOCK", 16)
        patch.setattr(latent_kernel, "GROUP_ROWS", 64)
        patch.setattr(decode_kernel, "LATENT_SPAN", 2 * PAGE)
        yield


def chunked(heads: int, kv_heads: int, dim: int = 128) -> Shape:
    return Shape(heads, kv_heads, dim, PAGE, TOKENS, ROWS, WIDTH, PAGES, dtype="bfloat16", lanes=128)


def sized(heads: int, kv_heads: int, dim: int = 128) -> Shape:
    return Shape(heads, kv_heads, dim, PAGE, ROWS, ROWS, WIDTH, PAGES, dtype="bfloat16", lanes=128)


def int8(shape: Shape) -> Shape:
    """Keep the same in int8, for which pages have 32 tokens."""
    width, pages = shape.width // 2, shape.pages // 2
    return dataclasses.replace(shape, is_int8=True, page=2 * PAGE, width=width, pages=pages)


def latent(tokens: int, heads: int, dim: int, value_dim: int) -> Shape:
    """With so many pages that spans of two come round."""
    cache = (PAGE, tokens, ROWS, 2 * WIDTH, 2 * PAGES)
    return Shape(heads, 1, dim, *cache, dtype="bfloat16", value_dim=value_dim, lanes=128)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param(sized(4, 2), Options(), id="plain", marks=pytest.mark.ci),
        pytest.param(sized(8, 1, dim=256), Options(window=20), id="window", marks=pytest.mark.ci),
        pytest.param(sized(4, 2, dim=64), Options(sinks=True), id="narrow", marks=pytest.mark.ci),
        pytest.param(sized(3, 3), Options(chunk=24, softcap=2.0, sinks=True), id="everything"),
        pytest.param(latent(ROWS, 20, 160, 128), Options(), id="latent", marks=pytest.mark.ci),
        pytest.param(
            latent(ROWS, 4, 48, 32),
            Options(window=70, softcap=2.0, sinks=True),
            id="narrow latent",
            marks=pytest.mark.sweep,
        ),
        pytest.param(int8(sized(4, 2)), Options(), id="int8", marks=pytest.mark.ci),
        pytest.param(
            int8(sized(35, 35, dim=160)),
            Options(window=40, sinks=True),
            id="int8, two columns of scales",
            marks=pytest.mark.sweep,
        ),
        pytest.param(int8(latent(ROWS, 20, 160, 128)), Options(), id="int8 latent", marks=pytest.mark.sweep),
    ],
)
@settings(max_examples=3, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_rows_of_any_length(shape: Shape, options: Options, data: st.DataObject, seed: int) -> None:
    """And fewer rows than the program has."""
    most = shape.width * shape.page - 1
    edges = st.sampled_from([0, PAGE - 1, PAGE, 2 * PAGE, most])
    pasts = data.draw(st.lists(edges | st.integers(0, most), min_size=1, max_size=ROWS))
    with short():
        attends([Case(past, 1) for past in pasts], shape, options, seed, decode=True)


@st.composite
def steps(draw: st.DrawFn) -> list[Case]:
    """Rows of one token and of more, of which the step has room for TOKENS together."""
    left, cases = TOKENS, []
    for _ in range(draw(st.integers(1, ROWS))):
        if left:
            new = draw(st.sampled_from([1, left]) | st.integers(1, left))
            edges = st.sampled_from([0, PAGE - 1, PAGE, WIDTH * PAGE - new])
            cases.append(Case(draw(edges | st.integers(0, WIDTH * PAGE - new)), new))
            left -= new
    return cases


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param(chunked(4, 2), Options(), id="plain", marks=pytest.mark.sweep),
        pytest.param(chunked(4, 4, dim=256), Options(window=20), id="window", marks=pytest.mark.sweep),
        pytest.param(chunked(4, 2, dim=64), Options(sinks=True), id="narrow", marks=pytest.mark.sweep),
        pytest.param(chunked(3, 1), Options(window=10, chunk=24, softcap=2.0, sinks=True), id="everything"),
        pytest.param(latent(TOKENS, 20, 160, 128), Options(), id="latent", marks=pytest.mark.ci),
        pytest.param(
            latent(TOKENS, 4, 48, 32),
            Options(window=10, chunk=24, softcap=2.0, sinks=True),
            id="narrow latent",
            marks=pytest.mark.sweep,
        ),
        pytest.param(int8(chunked(4, 2, dim=64)), Options(window=20), id="int8", marks=pytest.mark.ci),
        pytest.param(
            int8(latent(TOKENS, 20, 160, 128)), Options(), id="int8 latent", marks=pytest.mark.sweep
        ),
    ],
)
@settings(max_examples=3, deadline=None)
@given(cases=steps(), seed=st.integers(0, 2**31))
def test_chunks_of_any_length(shape: Shape, options: Options, cases: list[Case], seed: int) -> None:
    """Beside rows of one token."""
    with short():
        attends(cases, shape, options, seed, decode=False)


@pytest.mark.ci
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(sized(4, 2), id="decode"),
        pytest.param(chunked(4, 2), id="chunks"),
        pytest.param(latent(ROWS, 20, 160, 128), id="decode, latent"),
        pytest.param(latent(TOKENS, 20, 160, 128), id="chunks, latent"),
        pytest.param(int8(chunked(4, 2)), id="chunks, int8"),
    ],
)
@settings(max_examples=3, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_a_row_has_the_same_bits_beside_others_and_alone(
    shape: Shape, data: st.DataObject, seed: int
) -> None:
    """Where it is the first row."""
    decode, options = shape.tokens == ROWS, Options(softcap=2.0, sinks=True)
    past = st.integers(0, WIDTH * PAGE - TOKENS)
    single = st.lists(st.builds(Case, past, st.just(1)), min_size=2, max_size=ROWS)
    cases = data.draw(single if decode else steps())
    row = data.draw(st.integers(0, len(cases) - 1))
    batch = draw(cases, shape, options, seed)
    batch = stored(batch)
    one, its = alone(batch, row)
    with short():
        run = step(shape, options, decode=decode)
        together, by_itself = run(batch)[0][its], run(one)[0][: cases[row].new]
    assert together.tobytes() == by_itself.tobytes()


@pytest.mark.sweep
@pytest.mark.parametrize("is_int8", [False, True], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("heads", [16, 128])
def test_latents_in_deepseeks_sizes(heads: int, is_int8: bool) -> None:
    """Of V2-Lite and V3, with the spans, groups and blocks that a TPU has: more than a span of pages, and
    with chunks of V3 a block and a part of one, beside a row of one token.
    """
    sizes = (heads, 1, 576, 64)
    decode = Shape(*sizes, 2, 2, 6, 16, "bfloat16", value_dim=512, is_int8=is_int8, lanes=128)
    attends([Case(300, 1), Case(5, 1)], decode, Options(), 1, decode=True)
    chunks = dataclasses.replace(decode, tokens=24)
    attends([Case(300, 20), Case(70, 1)], chunks, Options(), 2, decode=False)


@pytest.mark.ci
def test_tokens_of_an_image_see_those_behind_them() -> None:
    """The kernel's attention is causal, so XLA computes such a step."""
    shape, options = chunked(4, 2), Options(ahead=7)
    batch = draw([Case(21, 30), Case(5, 1)], shape, options, 3)
    run = runner(tpu_paged_attention, shape, options)
    check(batch, run(stored(batch)), TOLERANCE)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the bytes of each copy that the interpreter makes between the device's memories."""
    dma = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call").DMA
    write, found = dma.execute_write, []

    def counting(copy: Any) -> None:
        if copy.data is not None:
            found.append(copy.data_size)
        write(copy)

    monkeypatch.setattr(dma, "execute_write", counting)
    return found


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("window", "sizes", "of_token"),
    [
        (None, {}, 2 * 256),
        (300, {}, 2 * 256),
        (None, {"value_dim": 64}, 256),
        (None, {"is_int8": True, "lanes": 128}, 2 * 2 * 128),  # a column of numbers, and one of scales
    ],
)
def test_a_decode_step_copies_what_is_in_use(
    copied: list[int], window: int | None, sizes: dict[str, Any], of_token: int
) -> None:
    """16 rows of 1,024 tokens, in a cache of twice as many, and nothing else. With a window of 300, a row
    sees 300 tokens, which lie in the last 5 of its 16 pages. Of latents a token has no value beside its key.
    """
    shape = Shape(2, 1, 128, 64, 16, 16, 20, 512, dtype="bfloat16", **sizes)
    attends([Case(1023, 1)] * 16, shape, Options(window=window), 1, decode=True)
    assert sum(copied) == 16 * (1024 if window is None else 5 * 64) * of_token


@pytest.mark.sweep
@pytest.mark.parametrize("value_dim", [None, 64])
def test_a_step_with_chunks_copies_what_its_blocks_attend_to(
    copied: list[int], value_dim: int | None
) -> None:
    """256 tokens: a chunk of 252 after 100 tokens, and 4 rows of one token after 1,023. Blocks have 128
    tokens; a block reads the pages up to its last token: 4 up to position 228, and 6 up to 352. Queries and
    results are float32. With latents they are bfloat16, of 16 heads, and there are no values.
    """
    shape = Shape(2, 1, 128, 64, 256, 5, 20, 128, dtype="bfloat16", value_dim=value_dim)
    attends([Case(100, 252), *([Case(1023, 1)] * 4)], shape, Options(), 2, decode=False)
    planes, of_token = (2, 2 * 2 * 128 * 4) if value_dim is None else (1, 2 * 16 * 128 * 2)
    of_pages = (4 + 6 + 4 * 16) * 64 * (planes * 128 * 2)
    assert sum(copied) == of_pages + 256 * of_token


@pytest.mark.parametrize(
    ("planes", "kv_heads", "page", "dim", "kept", "is_supported"),
    [
        (2, 8, 64, 128, BF16, True),
        (2, 1, 16, 256, BF16, True),
        (2, 8, 64, 64, BF16, False),
        (2, 8, 8, 128, BF16, False),
        (2, 128, 256, 128, BF16, False),  # two pages are more than the chip holds
        (1, 1, 64, 640, BF16, True),  # latent attention
        (1, 2, 64, 640, BF16, False),
        (1, 1, 64, 576, BF16, False),
        (2, 8, 64, 64, INT8, True),
        (2, 8, 16, 128, INT8, False),
        (1, 1, 32, 576, INT8, True),
        (2, 8, 64, 128, F32, False),
    ],
)
def test_what_the_kernel_computes(
    planes: int, kv_heads: int, page: int, dim: int, kept: np.dtype[Any], is_supported: bool
) -> None:
    is_int8 = kept == INT8
    sizes = (4, page, kv_heads, dim)
    shape = kv_layer_shape(*sizes, keys_only=planes == 1, is_int8=is_int8, lanes=128 if is_int8 else 1)
    cache = jax.ShapeDtypeStruct(shape, kept)
    q = jax.ShapeDtypeStruct((2, 2 * kv_heads, dim), F32 if kept == F32 else BF16)
    assert supports(q, cache, None if planes == 2 else 512) == is_supported
