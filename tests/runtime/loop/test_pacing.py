"""How long windows of decode steps may be, and how many prompt tokens a step may have, by hand-computed
values.
"""

from __future__ import annotations

import pytest

from penstock.runtime.loop.stepping import Pacer

MS = 10**6
NEVER = 2**62


def pacer(step_ms: float = 4, window_s: float = 0.02, max_steps: int = 8) -> Pacer:
    made = Pacer(window_s, max_steps)
    made.decoded(2, int(2 * step_ms * MS))
    return made


def test_one_step_until_something_is_measured() -> None:
    assert Pacer(0.02, 8).max_steps(NEVER, 0) == 1


@pytest.mark.parametrize(("step_ms", "steps"), [(1, 8), (4, 5), (6, 3), (20, 1), (500, 1)])
def test_a_window_aims_at_its_duration(step_ms: float, steps: int) -> None:
    assert pacer(step_ms).max_steps(NEVER, 0) == steps


@pytest.mark.parametrize(("ms_left", "ahead", "steps"), [(100, 0, 5), (13, 0, 3), (13, 2, 1), (-5, 0, 1)])
def test_a_window_ends_before_the_next_time_limit(ms_left: int, ahead: int, steps: int) -> None:
    assert pacer().max_steps(ms_left * MS, ahead) == steps


def test_one_means_never() -> None:
    assert pacer(0.001, max_steps=1).max_steps(NEVER, 0) == 1


def test_the_median_of_the_last_measurements_counts() -> None:
    made = pacer(4)
    for _ in range(2):
        made.decoded(1, 400 * MS)  # a busy moment
        made.decoded(1, 4 * MS)
    assert made.max_steps(NEVER, 0) == 5
    for _ in range(3):
        made.decoded(5, 5 * 1 * MS)
    assert made.max_steps(NEVER, 0) == 8


def prefilling(
    *steps: tuple[int, float], decode_ms: float = 50, target_s: float = 0.2, num_turns: int = 1
) -> int | None:
    """Return the budget after steps with these numbers of prompt tokens and durations in ms. Steps aim at 190
    ms.
    """
    made = Pacer(0.02, 8, target_s, num_turns=num_turns)
    made.decoded(1, int(decode_ms * MS))
    for num_tokens, ms in steps:
        made.prefilled(num_tokens, int(ms * MS))
    return made.prefill_budget


def test_without_a_target_prompts_have_no_budget_of_their_own() -> None:
    assert prefilling((100, 5000), target_s=0) is None


@pytest.mark.parametrize(
    ("num_tokens", "ms", "budget"),
    [
        (100, 190, 100),  # just right
        (300, 350, 140),  # 300 tokens took 300 ms, so 140 ms are 140 tokens
        (300, 1550, 28),
        (300, 100_000, 16),  # the least budget
        (100, 115, 200),  # 100 tokens took 65 ms; at most doubled
        (100, 60, 200),  # many more may fit, but the budget is at most doubled
        (100, 40, 200),  # quicker than a decode step
        (31, 60, 64),  # few tokens in a short time say nothing
        (31, 310, 16),  # few tokens in a long time do
        (15, 310, 64),  # too few to be measured
    ],
)
def test_the_budget_is_what_would_have_met_the_target(num_tokens: int, ms: float, budget: int) -> None:
    assert prefilling((num_tokens, ms)) == budget


@pytest.mark.parametrize("num_turns", [2, 3])
def test_a_row_whose_token_comes_in_one_of_several_steps_waits_for_all_of_them(num_turns: int) -> None:
    """So each of them aims at 190 ms, where the target is so many times 200 ms."""
    assert prefilling((300, 350), target_s=0.2 * num_turns, num_turns=num_turns) == 140


def test_a_single_odd_step_changes_nothing() -> None:
    steady = [(100, 190.0)] * 3
    assert prefilling(*steady, (100, 5000)) == 100
    assert prefilling(*steady, (100, 5000), (100, 190)) == 100
    assert prefilling(*steady, (100, 450), (100, 450)) == 35


def test_if_decodes_take_most_of_the_target_prompts_get_a_third_of_the_time() -> None:
    # Decodes take 200 ms, so steps aim at 300 ms.
    assert prefilling((100, 300), decode_ms=200) == 100
    assert prefilling((100, 400), decode_ms=200) == 50


@pytest.mark.parametrize(
    ("step_ms", "constrained_ms", "apart_steps"),
    [
        (0.5, None, 40),  # the window's 20 ms
        (0.5, 1.2, 24),  # ten times 1.2 ms
        (0.5, 6.0, 40),
        (2.0, 2.0, 10),
        (2.0, 0.1, 8),  # a window of the most steps
        (2.6, 2.6, 0),  # fewer than eight fit
        (60, 60, 0),
    ],
)
def test_how_often_rows_under_a_constraint_have_a_step_of_their_own(
    step_ms: float, constrained_ms: float | None, apart_steps: int
) -> None:
    made = pacer(step_ms)
    if constrained_ms is not None:
        made.constrained(int(constrained_ms * MS))
    assert made.apart_steps == apart_steps


def test_rows_under_a_constraint_may_get_steps_of_their_own_later():
    made = Pacer(0.02, 8)
    for _ in range(5):
        made.decoded(1, 3 * MS, constrained=True)
    assert made.max_steps(NEVER, 0) == 6  # from steps with constraints, because there are no others yet
    assert made.apart_steps == 0
    made.decoded(1, 1 * MS)
    for _ in range(5):
        made.decoded(1, 3 * MS, constrained=True)
    assert made.apart_steps == 20


def test_without_windows_all_rows_step_together() -> None:
    assert pacer(0.5, max_steps=1).apart_steps == 0
    assert Pacer(0.02, 8).apart_steps == 0  # nothing is measured yet
