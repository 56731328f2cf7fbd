"""How the tokens of an engine with the GPU's kernel are compared with those of one without."""

from __future__ import annotations

import pytest

from tools.on_device.kernels import agreement


@pytest.mark.parametrize(
    ("theirs", "share", "furthest"),
    [
        (([1, 2, 3, 4], [-1.0, -2.0, -1.0, -1.0]), 1.0, 0.0),
        (([1, 2, 3, 4], [-1.0, -2.0, -1.0, -1.5]), 1.0, 0.5),
        (([1, 2, 5, 4], [-1.0, -2.25, -1.125, -9.0]), 0.5, 0.25),  # the last token follows another one
        (([7, 2, 3, 4], [-3.0, -2.0, -1.0, -1.0]), 0.0, 2.0),
    ],
)
def test_tokens_are_compared_up_to_the_first_that_differs(
    theirs: tuple[list[int], list[float]], share: float, furthest: float
) -> None:
    ours = ([1, 2, 3, 4], [-1.0, -2.0, -1.0, -1.0])
    assert agreement(ours, theirs) == (share, furthest)
