"""When the windows of decode steps guess by a text on the device (`execution.text_guesses`). No jax.

A window makes the same tokens with guesses and without, so all that is decided here is which of the two is
faster for a number of rows. How much longer a step takes that checks guesses is measured, over many windows,
because times vary. How many tokens such a step makes is counted, and the last few windows say it.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

from penstock.runtime.scheduling.sequence import Sequence

_LEAST_TIMES = 3
"""Fewer times are not believed."""
_KEPT_TIMES = 9
_LEARN = 0.2
"""How much the newest window says of how many tokens a step makes."""
_TRY_GUESSES = 16
"""After so many windows without guesses there is one with, because other outputs may resemble the text."""
_TRY_WITHOUT = 256
"""After so many windows with guesses there is one without, which measures its steps again."""


class _Windows:
    """What is known of the windows of one number of rows."""

    __slots__ = ("since_guesses", "since_without", "step_ns", "tokens")

    def __init__(self) -> None:
        self.step_ns: tuple[deque[float], deque[float]] = deque(maxlen=_KEPT_TIMES), deque(maxlen=_KEPT_TIMES)
        """What a step took, without guesses and with them."""
        self.tokens = 1.0
        """How many tokens of a row a step with guesses makes, lately."""
        self.since_guesses = self.since_without = 0
        """How many windows were planned since the last one of either kind."""

    def choose(self) -> bool:
        """Say whether the next window guesses."""
        without, guessing = self.step_ns
        if len(without) < _LEAST_TIMES or self.since_without >= _TRY_WITHOUT:
            return False
        if len(guessing) < _LEAST_TIMES or self.since_guesses >= _TRY_GUESSES:
            return True
        return self.tokens * median_low(without) > median_low(guessing)


class TextWindows:
    """Decides for each window whether it guesses."""

    name = "lookup"
    """What metrics call it: it is the proposer "lookup", on the device."""

    def __init__(self, most_rows: int) -> None:
        """`most_rows`: rows of the steps of windows that guess; of fewer rows, some are left for guesses."""
        self._most_rows = most_rows
        self._of_rows: dict[int, _Windows] = {}
        """Number of rows to their windows."""
        self.are_used = False
        """Whether steps are so short that decodes have windows."""

    def guess_for(self, seq: Sequence) -> bool:
        """Say whether windows guess for a sequence, so that nobody else need read the text for it. They do
        not where a token needs more than the ones before it: a mask, or the counts of a penalty.
        """
        return self.are_used and not (seq.is_single or seq.request.sampling.has_penalties)

    def choose(self, num_rows: int) -> bool:
        """Say whether a window with so many rows guesses."""
        if num_rows >= self._most_rows:
            return False
        windows = self._of_rows.setdefault(num_rows, _Windows())
        guesses = windows.choose()
        windows.since_guesses = 0 if guesses else windows.since_guesses + 1
        windows.since_without = windows.since_without + 1 if guesses else 0
        return guesses

    def measured(
        self, num_rows: int, *, guessed: bool, num_tokens: int, num_steps: int, elapsed_ns: float
    ) -> None:
        """Take note of a window: how many tokens its longest row has made, in how many steps, and how long
        that took.
        """
        windows = self._of_rows.get(num_rows)
        if windows is None or not num_steps:
            return
        windows.step_ns[guessed].append(elapsed_ns / num_steps)
        if guessed:
            windows.tokens += _LEARN * (num_tokens / num_steps - windows.tokens)
