"""Bytes of a tensor as they come: checksums with known values, and what is finite."""

from __future__ import annotations

import hashlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.loading.dtypes import DTYPES, num_bytes
from penstock.runtime.sent_tensors import SentTensor
from penstock.runtime.updating import incoming
from penstock.runtime.updating.incoming import IncomingTensor, is_finite

DIGITS, CRC_OF_DIGITS = b"123456789", 0xE3069283  # the check value of CRC-32C


def digits(**changes: Any) -> SentTensor:
    return SentTensor("w", "U8", (3, 3), **changes)


def test_checksums_have_their_known_values() -> None:
    tensor = IncomingTensor(digits(crc32c=CRC_OF_DIGITS, sha256=hashlib.sha256(DIGITS).digest()), keep=True)
    for begin in range(0, 9, 2):
        assert not tensor.is_complete
        tensor.append(DIGITS[begin : begin + 2])
    assert tensor.is_complete
    assert tensor.is_intact
    assert tensor.sha256 == hashlib.sha256(DIGITS).digest()
    np.testing.assert_array_equal(tensor.values, np.frombuffer(DIGITS, np.uint8).reshape(3, 3))


@pytest.mark.parametrize("given_sums", [{"crc32c": 1}, {"sha256": bytes(32)}])
def test_another_checksum_means_damage(given_sums: dict[str, Any]) -> None:
    tensor = IncomingTensor(digits(**given_sums), keep=False)
    tensor.append(DIGITS)
    assert not tensor.is_intact
    assert tensor.values is None


@given(st.data())
def test_what_is_finite_is_what_numpy_says(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I8", "BOOL"]))
    size = data.draw(st.integers(0, 40))
    raw = data.draw(st.binary(min_size=size * 8, max_size=size * 8))
    values = np.frombuffer(raw, np.uint8 if name == "BOOL" else DTYPES[name])
    with np.errstate(invalid="ignore"):
        expected = bool(np.isfinite(values.astype(np.float64)).all())
    assert is_finite(name, values) == expected


@pytest.mark.parametrize("at", [0, 99, 100, 255, 256, 999])
def test_one_value_among_many_is_found(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "_CHECKED_AT_ONCE", 200)
    values = np.ones((10, 100), jnp.bfloat16)
    assert is_finite("BF16", values)
    values.flat[at] = np.nan
    assert not is_finite("BF16", values)


def test_sizes() -> None:
    assert num_bytes(SentTensor("w", "I4", (3, 3))) == 5
    assert num_bytes(SentTensor("w", "BF16", ())) == 2
    assert num_bytes(SentTensor("w", "F32", (4, 0))) == 0
    assert num_bytes(SentTensor("w", "C64", (4,))) is None
