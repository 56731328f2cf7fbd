"""The form on the host of quantised weights: what it means, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.runtime.models.quantised import Codes


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
