"""How long windows of decode steps may be, by arithmetic."""

from __future__ import annotations

import pytest

from penstock.runtime.pacing import DecodePacer

MS = 10**6
NEVER = 2**62


def pacer(step_ms: float = 4, window_s: float = 0.02, max_steps: int = 8) -> DecodePacer:
    made = DecodePacer(window_s, max_steps)
    made.measured(2, int(2 * step_ms * MS))
    return made


def test_one_step_until_something_is_measured() -> None:
    assert DecodePacer(0.02, 8).max_steps(NEVER, 0) == 1


@pytest.mark.parametrize(("step_ms", "steps"), [(1, 8), (4, 5), (6, 3), (20, 1), (500, 1)])
def test_a_window_aims_at_its_duration(step_ms: float, steps: int) -> None:
    assert pacer(step_ms).max_steps(NEVER, 0) == steps


@pytest.mark.parametrize(("ms_left", "ahead", "steps"), [(100, 0, 5), (13, 0, 3), (13, 2, 1), (-5, 0, 1)])
def test_a_window_ends_before_the_next_time_limit(ms_left: int, ahead: int, steps: int) -> None:
    assert pacer().max_steps(ms_left * MS, ahead) == steps


def test_one_means_never() -> None:
    assert pacer(0.001, max_steps=1).max_steps(NEVER, 0) == 1


def test_measurements_are_averaged() -> None:
    made = pacer(4)
    made.measured(1, 12 * MS)  # 4 + (12 - 4) / 8
    assert made.max_steps(NEVER, 0) == 4
    for _ in range(60):
        made.measured(5, 5 * 1 * MS)
    assert made.max_steps(NEVER, 0) == 8
