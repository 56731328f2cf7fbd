"""How much one dispatch may hold, by the steps measured so far: how many decode steps a window, how many
prompt tokens a step with decodes. Pure arithmetic on what it is told; no clock, no jax.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

DECODE_SHARE = 2 / 3
"""Most of a step's time that decodes may take while prompts come in. Where a decode step alone takes more
than that of the target, steps are made longer than the target: prompts get the rest of their time."""
_AIM = 0.95
"""Steps aim at this part of the target: about half of them will take longer than what they aim at."""
LEAST_TOKENS = 16
"""Least prompt tokens of a step, and of one worth measuring: fewer are lost in a decode step's noise."""
_FIRST_TOKENS = 64
"""Prompt tokens of a step beside decodes before anything was measured."""
_FEW_SHARE = 0.9
"""That part of a step with few prompt tokens is taken for a decode step."""
_PROBE_EVERY = 16
"""Where steps are longer than the target for the decodes' sake, one in so many has few prompt tokens."""
_SHORT = 8
"""Where so many steps fit a window, rows under a constraint have steps of their own."""
_SLOWER = 10
"""The others run so many times as long as those, unless that is longer than a window should be, and at least
for a window of the most steps."""
_NUM_DECODES = 5
_NUM_PREFILLS = 3


class Pacer:
    """What steps may cost those who run.

    Windows of decode steps save a dispatch per step; while one runs, nobody can enter and no token is seen.
    So they aim at a duration, not a number, and end before the next time limit. Rows under a constraint make
    a token a step. Where many steps fit a window, such steps hold these rows alone and come after so many of
    the others' that they take a tenth of the time, but no later than a window may end, nor within one.

    A step that computes prompt tokens beside decodes makes those wait for all of it. So such steps aim at a
    duration too: the time between two tokens of a row that decodes. How many prompt tokens fit is told from
    steps that had some. One that took too long is compared with a decode step, as if each token had cost the
    same; one that was short tells that more fit, though not more than twice as many. While prompts come in
    there are no decode steps to compare with: then a step with few prompt tokens counts as one, and none
    takes longer than a step that has prompt tokens beside.

    Of the last few measurements the median counts, so that a single odd one changes nothing.
    """

    def __init__(self, window_s: float, max_steps: int, target_itl_s: float = 0.0) -> None:
        """`window_s`: what a window should take at most, in seconds; `max_steps`: the most steps it may have;
        1 makes none. `target_itl_s`: what a step with decodes and prompt tokens should take at most, in
        seconds; 0 sets no limit.
        """
        self._window_ns = window_s * 1e9
        self._max_steps = max_steps
        self._target_ns = target_itl_s * 1e9
        self._decodes: deque[float] = deque(maxlen=_NUM_DECODES)
        """What a decode step took, in ns."""
        self._is_plain = False
        """Whether no row under a constraint had a part in these."""
        self._decode_ns = 0.0
        """The median of them; 0 if there is none yet."""
        self._unprobed = 0
        """Steps with prompt tokens since one that had few."""
        self._fits: deque[float] = deque(maxlen=_NUM_PREFILLS)
        """How many prompt tokens would have met the aim."""
        self._constrained: deque[float] = deque(maxlen=_NUM_DECODES)
        """What a step of rows under a constraint alone took, in ns."""

    def decoded(self, num_steps: int, elapsed_ns: int, *, constrained: bool = False) -> None:
        """That many decode steps, one after the other, took so long on the device. `constrained`: rows under
        a constraint were among others, so they may have waited for masks; that counts until something better
        is known.
        """
        if constrained and self._is_plain:
            return
        if not constrained and not self._is_plain:
            self._is_plain = True
            self._decodes.clear()
        self._decodes.append(max(elapsed_ns, 1) / max(num_steps, 1))
        self._decode_ns = median_low(self._decodes)

    def constrained(self, elapsed_ns: int) -> None:
        """A decode step of rows under a constraint alone took so long, on the device or for want of masks."""
        self._constrained.append(max(elapsed_ns, 1))

    def prefilled(self, num_tokens: int, elapsed_ns: int) -> None:
        """A step with so many prompt tokens, with or without decodes, took so long on the device."""
        if not self._target_ns or num_tokens < LEAST_TOKENS:
            return
        self._check_decode(num_tokens, elapsed_ns)
        aim, decode = self._aim_ns, self._decode_ns
        if elapsed_ns <= aim and 2 * num_tokens < self._tokens:
            return  # that few tokens are quick says nothing of many
        most = 2.0 * num_tokens
        if elapsed_ns > decode:
            most = min(most, num_tokens * (aim - decode) / (elapsed_ns - decode))
        self._fits.append(most)

    def _check_decode(self, num_tokens: int, elapsed_ns: int) -> None:
        """What a step with prompt tokens, which is all there is while they come in, tells of a decode step:
        that it takes no longer; and, where these are few, that it takes about as long.
        """
        if not self._decodes:
            return
        self._unprobed = self._unprobed + 1 if self._aim_ns > self._target_ns else 0
        # As few as can be, for which a padded step may be too large; two in flight had the budget of before.
        few = num_tokens <= LEAST_TOKENS or self._unprobed >= _PROBE_EVERY + 2
        few |= self._tokens <= LEAST_TOKENS and elapsed_ns > self._aim_ns
        if few:
            self._unprobed = 0
        if elapsed_ns < self._decode_ns:
            self._decodes.clear()
            self._decodes.append(elapsed_ns)
        elif few:
            self._decodes.append(_FEW_SHARE * elapsed_ns)
        self._decode_ns = median_low(self._decodes)

    def max_steps(self, ns_to_deadline: int, steps_ahead: int) -> int:
        """Steps for the next dispatch, at least 1. `steps_ahead` of those already dispatched come before."""
        if self._max_steps == 1 or not self._decodes:
            return 1
        to_deadline = ns_to_deadline / self._decode_ns - steps_ahead
        return max(1, int(min(self._max_steps, self._window_ns / self._decode_ns, to_deadline)))

    @property
    def apart_steps(self) -> int:
        """How many decode steps of the others come between two of rows under a constraint; 0: all step
        together.
        """
        if self._max_steps == 1 or not self._decodes or self._window_ns < _SHORT * self._decode_ns:
            return 0
        wanted = self._window_ns
        if self._constrained:
            wanted = min(wanted, _SLOWER * median_low(self._constrained))
        return max(int(wanted / self._decode_ns), self._max_steps)

    @property
    def prefill_budget(self) -> int | None:
        """Most prompt tokens of the next step if it has decodes, at least 1; None: no limit."""
        if not self._target_ns:
            return None
        if self._unprobed >= _PROBE_EVERY:
            return LEAST_TOKENS  # whether decodes still take so long
        return max(int(self._tokens), LEAST_TOKENS)

    @property
    def _tokens(self) -> float:
        return median_low(self._fits) if self._fits else _FIRST_TOKENS

    @property
    def _aim_ns(self) -> float:
        return max(_AIM * self._target_ns, self._decode_ns / DECODE_SHARE)
