"""The values of every type of blocks, compared with the package `gguf`."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime.loading.gguf.block_types import BLOCK_TYPES, NOT_READ
from penstock.runtime.ops.codes import dequantised
from tests.support.gguf_models import random_blocks

import gguf  # isort: skip

pytestmark = pytest.mark.ci

_BLOCKS = 3000


@pytest.mark.parametrize("number", BLOCK_TYPES)
def test_values_are_those_of_the_package_to_the_last_bit(number: int) -> None:
    """Any bytes, so that all codes, signs and scales occur, infinite ones and those that are no numbers
    too.
    """
    kind = BLOCK_TYPES[number]
    rng = np.random.default_rng(number)
    rows = rng.integers(0, 256, (_BLOCKS, 2 * kind.num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(number)).astype(np.float32)
    found = kind.read(rows).astype(np.float32)
    assert found.shape == expected.shape == (_BLOCKS, 2 * kind.values)
    is_number = ~np.isnan(expected)
    assert is_number.mean() > 0.9
    np.testing.assert_array_equal(np.isnan(found), ~is_number)
    np.testing.assert_array_equal(found.view(np.uint32)[is_number], expected.view(np.uint32)[is_number])


@pytest.mark.parametrize("number", [number for number, kind in BLOCK_TYPES.items() if kind.form is not None])
def test_codes_stand_for_the_values_of_the_package(number: int) -> None:
    """To the last bit, also as they lie in memory; scales that are no numbers have no codes."""
    kind = BLOCK_TYPES[number]
    rows = random_blocks(np.random.default_rng(number), kind.name, 48, 6 * kind.values)
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(number))
    codes, form = kind.codes(rows), kind.form
    assert codes is not None
    assert form is not None
    assert codes.form() == form
    np.testing.assert_array_equal(codes.dequantised(), expected)
    leaf = np.zeros(form.shape(*expected.shape), np.uint8)
    codes.pack(leaf)
    found = dequantised(jnp.asarray(leaf), expected.shape[1], jnp.dtype(jnp.float32))
    np.testing.assert_array_equal(np.asarray(found), expected)
    rows.reshape(-1, kind.num_bytes)[7] = 0x7C  # infinite, as a float16 it is 0x7C7C: no number
    assert kind.codes(rows) is None


def test_sizes_and_names_are_those_of_the_package() -> None:
    for number, kind in BLOCK_TYPES.items():
        named = gguf.GGMLQuantizationType(number)
        assert (kind.name, (kind.values, kind.num_bytes)) == (named.name, gguf.GGML_QUANT_SIZES[named])


def test_a_type_that_is_not_read_is_called_by_its_name() -> None:
    others = {kind.value: kind.name for kind in gguf.GGMLQuantizationType if kind.value not in BLOCK_TYPES}
    assert others == NOT_READ
