"""How the tokens of an engine with the GPU's kernel are compared with those of one without, and what a run of
the kernels refuses.
"""

from __future__ import annotations

import sys

import pytest

from tools.on_device.kernels import agreement, main
from tools.on_device.steps import PLATFORM


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


@pytest.mark.parametrize("form", [[], ["--capability", "10.0"]])
def test_a_run_for_a_gpu_is_refused_where_jax_has_none(
    monkeypatch: pytest.MonkeyPatch, form: list[str]
) -> None:
    """Also where the form is named, and the device is not asked for its own."""
    monkeypatch.setenv(PLATFORM, "cuda")
    monkeypatch.setattr(sys, "argv", ["kernels", "operation", *form])
    with pytest.raises(RuntimeError, match="the run is for cuda"):
        main()


@pytest.mark.parametrize("form", [["--capability", "10.0"], ["--interpreted"]])
def test_an_engine_is_told_no_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels", "tokens", *form])
    with pytest.raises(SystemExit):
        main()
    assert "the engine chooses the form" in capsys.readouterr().err
