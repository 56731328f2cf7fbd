"""The memory that latent attention takes: what a layer keeps of each position, counted by hand."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from penstock.runtime.errors import ConfigError
from penstock.runtime.ops.cache_spec import (
    CacheGroup,
    CacheSpec,
    LatentKV,
    PagedKV,
    SlotState,
    cache_dtype,
)
from penstock.runtime.ops.kv_rows import GPU_LANES, num_heads_of

BF16 = np.dtype(np.float16)  # has as many bytes


def test_deepseek_v3_keeps_70272_bytes_of_a_token() -> None:
    """61 layers of 512 + 64 channels in 16 bits. Keys and values of its 128 heads would be 71 times that."""
    cache = CacheSpec((LatentKV(latent_dim=512, rope_dim=64),) * 61)
    assert cache.page_bytes(16, BF16) == 16 * 70_272
    assert cache.page_bytes(16, np.dtype(np.float32)) == 16 * 2 * 70_272
    assert cache.slot_bytes == 0
    heads = 61 * 128 * ((128 + 64) + 128) * 2
    assert heads / 70_272 == pytest.approx(71.1, abs=0.05)


def test_the_arrays_hold_exactly_what_is_counted() -> None:
    cache = CacheSpec((LatentKV(32, 16), PagedKV(2, 8)))
    latent, keys_and_values = cache.arrays((5,), 4, 3, BF16)
    assert (latent.shape, latent.dtype) == ((5, 1, 1, 4, 48), BF16)
    sizes = [int(np.prod(array.shape)) * array.dtype.itemsize for array in (latent, keys_and_values)]
    assert sum(sizes) == 5 * cache.page_bytes(4, BF16)


def test_a_device_has_its_share_of_dealt_pages() -> None:
    """Of 6 pages over 3 devices each has 2; of 7 some have 3, and all have room for so many."""
    whole, dealt = CacheSpec((LatentKV(32, 16),)), CacheSpec((LatentKV(32, 16, pieces=3),))
    shapes = [dealt.arrays((pages,), 4, 3, BF16)[0].shape for pages in (6, 7)]
    assert shapes == [(2, 1, 1, 4, 48), (3, 1, 1, 4, 48)]
    assert dealt.page_bytes(4, BF16) * 3 == whole.page_bytes(4, BF16) == 4 * 48 * 2
    assert dealt.groups(4, BF16) == (CacheGroup(None, 4 * 48 * 2 // 3, pieces=3),)


def test_int8_takes_a_byte_for_each_number_and_four_for_each_scale() -> None:
    """So heads of 128 have 256 / 132 = 1.94 times the tokens of 16 bits in the same memory. State stays as it
    is.
    """
    state = SlotState((jax.ShapeDtypeStruct((4,), np.dtype(np.float32)),))
    cache = CacheSpec((LatentKV(32, 16), PagedKV(2, 128, 8), state))
    int8 = cache_dtype("int8", BF16)
    assert (int8, cache_dtype("auto", BF16)) == (np.dtype(np.int8), BF16)
    latent, keys_and_values, (states,) = cache.arrays((5, 3), 4, 3, int8)
    assert (latent.shape, latent.dtype) == ((5, 1, 1, 4, 52), np.int8)
    assert (keys_and_values.shape, keys_and_values.dtype) == ((3, 2, 2, 4, 132), np.int8)
    assert (states.shape, states.dtype) == ((6, 4), np.float32)
    assert cache.page_bytes(4, int8) == 4 * (52 + 2 * 2 * 132)
    assert cache.groups(4, int8) == (CacheGroup(None, 4 * 52), CacheGroup(8, 4 * 2 * 2 * 132))
    pages = [PagedKV(2, 128).page_bytes(64, dtype) for dtype in (BF16, int8)]
    assert pages[0] / pages[1] == pytest.approx(1.94, abs=0.001)


def test_rows_are_as_wide_as_the_lanes_of_a_chip() -> None:
    """A key of 48 channels takes 128, and one of 192 takes 256; state stays as it is."""
    state = SlotState((jax.ShapeDtypeStruct((3, 5), np.dtype(np.float32)),))
    cache = CacheSpec((LatentKV(32, 16), PagedKV(2, 192, 8), state)).laid_out(128)
    latent, paged, (kept,) = cache.arrays((5, 5), 4, 2, BF16)
    assert (latent.shape, paged.shape, kept.shape) == ((5, 1, 1, 4, 128), (5, 2, 2, 4, 256), (4, 3, 5))
    assert cache.page_bytes(4, BF16) == (4 * 128 + 2 * 2 * 4 * 256) * 2


def test_int8_lies_in_columns_for_a_tpu() -> None:
    """Two heads of 192 channels have two columns each, and 33 heads have two columns of scales. The channels
    of a latent have five, and its scale has another.
    """
    cache = CacheSpec((LatentKV(512, 64), PagedKV(2, 192, 8), PagedKV(33, 64))).laid_out(128)
    int8 = np.dtype(np.int8)
    cache.check_dtype("int8")
    latent, narrow, many = cache.arrays((5, 7), 32, 2, int8)
    shapes = (5, 1, 6, 32, 128), (7, 2, 5, 32, 128), (5, 2, 35, 32, 128)
    assert (latent.shape, narrow.shape, many.shape) == shapes
    assert [num_heads_of(each, dim) for each, dim in ((latent, 576), (narrow, 192), (many, 64))] == [1, 2, 33]
    assert cache.page_bytes(32, int8) == 32 * 128 * (6 + 2 * 5 + 2 * 35)


def test_int8_lies_in_columns_for_a_gpu_where_heads_fill_them() -> None:
    """Two heads of 192 channels have three columns each, and 17 heads have two columns of scales. A head of
    96 would fill half of a column with zeros, and no kernel reads latents in int8.
    """
    layers = (PagedKV(2, 192), PagedKV(17, 64), PagedKV(2, 96), LatentKV(512, 64))
    cache = CacheSpec(layers).laid_out(GPU_LANES)
    cache.check_dtype("int8")
    found = [each.shape for each in cache.arrays((5,), 32, 2, np.dtype(np.int8))]
    in_columns, in_rows = [(5, 2, 7, 32, 64), (5, 2, 19, 32, 64)], [(5, 2, 2, 32, 100), (5, 1, 1, 32, 580)]
    assert found == in_columns + in_rows
    plain = CacheSpec(layers).arrays((5,), 32, 2, BF16)
    assert cache.arrays((5,), 32, 2, BF16) == plain


def test_int8_is_refused_where_rows_cannot_be_told_from_columns() -> None:
    cache = CacheSpec((PagedKV(2, 124),))
    cache.check_dtype("int8")
    cache.laid_out(128).check_dtype("auto")
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype: .* on TPUs, not int8, for heads of 124"):
        cache.laid_out(128).check_dtype("int8")


def test_latent_layers_have_pages_and_no_window() -> None:
    """So their requests share prefixes, and keep every page."""
    latent = LatentKV(32, 16)
    state = SlotState((jax.ShapeDtypeStruct((4,), np.dtype(np.float32)),))
    assert CacheSpec((latent, PagedKV(1, 4, 8))).windows == (None, 8)
    assert not CacheSpec((latent, latent)).has_state
    assert CacheSpec((latent, state)).paged == (latent,)


def test_each_group_has_pages_of_its_own_number_and_size() -> None:
    """Of Gemma 3's pattern: five layers with a window of 1,024, and one without. Layers may have other heads
    in each group.
    """
    near, whole = PagedKV(4, 256, 1024), PagedKV(2, 512)
    cache = CacheSpec((near,) * 5 + (whole,) + (near,) * 2)
    assert cache.groups(16, BF16) == (
        CacheGroup(None, 2 * 16 * 2 * 512 * 2),
        CacheGroup(1024, 7 * 2 * 16 * 4 * 256 * 2),
    )
    arrays = cache.arrays((9, 3), 16, 4, BF16)
    assert [array.shape[0] for array in arrays] == [3] * 5 + [9] + [3] * 2
    assert {array.shape[1:] for array in arrays} == {(2, 4, 16, 256), (2, 2, 16, 512)}
