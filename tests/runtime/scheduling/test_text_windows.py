"""Whether windows guess by a text: what is faster is done, and tried again."""

from __future__ import annotations

import random

from penstock.runtime.scheduling.plan import guesses_of
from penstock.runtime.scheduling.text_windows import TextWindows


def share(windows: TextWindows, tokens: float, cost: float, count: int, *, noise: float = 0.0) -> float:
    """Plan and measure so many windows of one row, in which a step with guesses makes this many tokens, and
    takes this many times as long as one without. Returns how many of them guessed, as a share.
    """
    rng, guessed = random.Random(1), 0
    for _ in range(count):
        guesses = windows.choose(1)
        steps = max(1, round(8 / tokens)) if guesses else 8
        took_ns = steps * (cost if guesses else 1.0) * rng.uniform(1.0, 1.0 + noise)
        windows.measured(1, guessed=guesses, num_tokens=8, num_steps=steps, elapsed_ns=took_ns)
        guessed += guesses
    return guessed / count


def test_the_faster_kind_of_window_is_chosen_and_the_other_one_tried_now_and_then() -> None:
    windows = TextWindows(16)
    assert share(windows, 4.0, 1.3, 600) > 0.98
    assert 0.02 < share(windows, 1.0, 1.3, 600) < 0.1  # other outputs, which do not resemble the text
    assert share(windows, 4.0, 1.3, 600) > 0.9
    assert share(windows, 4.0, 5.0, 600) < 0.1  # many rows, or a slower machine


def test_times_that_vary_change_little() -> None:
    assert share(TextWindows(16), 4.0, 1.3, 600, noise=3.0) > 0.9
    assert share(TextWindows(16), 1.0, 1.5, 600, noise=0.4) < 0.1


def test_numbers_of_rows_are_apart_and_many_rows_leave_no_room() -> None:
    windows = TextWindows(4)
    share(windows, 4.0, 1.3, 20)
    assert windows.choose(1)
    assert not windows.choose(2)  # of two rows nothing was measured yet
    assert not any(windows.choose(4) for _ in range(99))
    windows.measured(4, guessed=False, num_tokens=8, num_steps=8, elapsed_ns=1.0)


def test_guesses_are_counted_by_the_steps_that_checked_them() -> None:
    """A token that was not guessed says how many were guessed to follow it; the others are negative."""
    assert guesses_of([3, -1, -1, 0, 2, 4, -1]) == [(3, 2), (0, 0), (2, 0), (4, 1)]
    assert guesses_of([]) == []
