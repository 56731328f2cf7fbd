"""The form on the host of quantised weights: what it means, and what it refuses."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from penstock.runtime.models.quantised import Codes
from penstock.runtime.ops.codes import CodeForm, dequantised


def test_a_value_is_scale_times_code_less_zero_in_the_order_of_inputs() -> None:
    codes = Codes(
        codes=np.array([[1, 2, 3, 15], [0, 8, 9, 7]], np.uint8),
        bits=4,
        scales=np.array([[0.5, 2.0], [1.0, 0.25]], np.float32),
        zeros=np.array([[1.0, 8.0], [0.0, 7.5]], np.float32),
        group=2,
        order=np.array([2, 0, 1, 3]),
    )
    in_columns = [[0.0, 0.5, -10.0, 14.0], [0.0, 8.0, 0.375, -0.125]]
    by_hand = [[row[1], row[2], row[0], row[3]] for row in in_columns]
    np.testing.assert_array_equal(codes.dequantised(), np.array(by_hand, np.float32))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bits": 3}, "bits"),
        ({"codes": np.zeros((2, 4), np.int32)}, "codes"),
        ({"group": 3}, "group"),
        ({"scales": np.zeros((2, 1), np.float32)}, "scales"),
        ({"zeros": np.zeros((2, 2), np.float64)}, "zeros"),
        ({"order": np.array([0, 1, 1, 3])}, "order"),
    ],
)
def test_arrays_that_do_not_agree_are_refused_by_name(change: dict[str, object], says: str) -> None:
    right: dict[str, object] = {
        "codes": np.zeros((2, 4), np.int8),
        "bits": 8,
        "scales": np.ones((2, 2), np.float32),
        "zeros": None,
        "group": 2,
    }
    with pytest.raises(ValueError, match=says):
        Codes(**{**right, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("unsigned", [True, False])
@pytest.mark.parametrize("zeros", ["none", "half", "any"])
def test_packed_codes_mean_the_same(bits: int, unsigned: bool, zeros: str) -> None:
    """Groups of 64 repeat their scales. Where all zeros are half of the codes' range, none are stored."""
    rng = np.random.default_rng(bits)
    half = 1 << (bits - 1)
    codes = rng.integers(0, 2 * half, (48, 192))
    scales = rng.standard_normal((48, 3)).astype(np.float16).astype(np.float32)
    kept = rng.integers(0, 2 * half, scales.shape) if zeros == "any" else np.full(scales.shape, half)
    weight = Codes(
        codes=codes.astype(np.uint8) if unsigned else (codes - half).astype(np.int8),
        bits=bits,
        scales=scales,
        zeros=None if zeros == "none" else (kept - (0 if unsigned else half)).astype(np.float32),
        group=64,
    )
    form = weight.form()
    assert form is not None
    assert form.zeros == (zeros == "any" or (zeros == "none" and unsigned))
    leaf = np.zeros(form.shape(48, 192), np.uint8)
    weight.pack(leaf)
    got = np.asarray(dequantised(jnp.asarray(leaf), 192, jnp.float32))
    np.testing.assert_array_equal(got, weight.dequantised())
    some = weight.of_columns(slice(64, 192))
    np.testing.assert_array_equal(some.dequantised(), weight.dequantised()[:, 64:])
    with pytest.raises(ValueError, match="whole groups"):
        weight.of_columns(slice(32, 96))


def test_codes_that_a_leaf_cannot_hold_are_refused() -> None:
    def weight(bits: int = 4, group: int = 32, order: np.ndarray | None = None) -> Codes:
        scales = np.ones((16, 64 // group), np.float32)
        return Codes(np.zeros((16, 64), np.uint8), bits, scales, None, group, order)

    leaf = np.zeros(CodeForm(4, False).shape(16, 64), np.uint8)
    for unfit in (weight(), weight(bits=8), weight(group=16), weight(order=np.arange(64)[::-1])):
        with pytest.raises(ValueError, match="does not fit"):
            unfit.pack(leaf)
