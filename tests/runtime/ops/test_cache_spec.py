"""The memory that latent attention takes: what a layer keeps of each position, counted by hand."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from penstock.runtime.ops.cache_spec import CacheSpec, LatentKV, PagedKV, SlotState

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
    latent, keys_and_values = cache.arrays(5, 4, 3, BF16)
    assert (latent.shape, latent.dtype) == ((5, 1, 1, 4, 48), np.uint16)
    sizes = [int(np.prod(array.shape)) * array.dtype.itemsize for array in (latent, keys_and_values)]
    assert sum(sizes) == 5 * cache.page_bytes(4, BF16)


def test_latent_layers_have_pages_and_no_window() -> None:
    """So their requests share prefixes, and keep every page."""
    latent = LatentKV(32, 16)
    state = SlotState((jax.ShapeDtypeStruct((4,), np.dtype(np.float32)),))
    assert CacheSpec((latent, PagedKV(1, 4, 8))).sliding_window is None
    assert not CacheSpec((latent, latent)).has_state
    assert CacheSpec((latent, state)).paged == (latent,)
