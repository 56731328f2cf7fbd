"""Decides how much one dispatch holds, from the steps measured so far: how many decode steps a window has,
and how many prompt tokens a step with decodes. Pure arithmetic on the times that it is given; no clock, no
jax.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

DECODE_SHARE = 2 / 3
"""Largest part of a step's time that decodes may take while prompts come in. If a decode step alone takes
more than this part of the target, steps become longer than the target, and prompts get the rest of their
time."""
_AIM = 0.95
"""Steps aim at this part of the target, because about half of them take longer than what they aim at."""
LEAST_TOKENS = 16
"""Fewest prompt tokens of a step, and of a step that is worth measuring: the time of fewer is lost in noise.
"""
_FIRST_TOKENS = 64
"""Prompt tokens of a step with decodes before anything was measured."""
_FEW_SHARE = 0.9
"""A decode step is taken to last this part of a step with few prompt tokens."""
_PROBE_EVERY = 16
"""If steps are longer than the target because of the decodes, one step in this many has few prompt tokens, to
measure decodes again."""
_SHORT = 8
"""If this many steps fit a window, rows under a constraint get steps of their own."""
_SLOWER = 10
"""The other rows run this many times as long as those steps, but no longer than a window should take, and at
least for a window of the most steps."""
_NUM_DECODES = 5
_NUM_PREFILLS = 3


class Pacer:
    """Decides what steps may cost the requests that run.

    Windows of decode steps save a dispatch per step, but while one runs no request can enter and no token is
    seen. So windows aim at a duration, not a number of steps, and end before the next time limit. Rows under
    a constraint make one token a step. Where many steps fit a window, these rows get steps of their own,
    after so many steps of the others that they take a tenth of the time, but at most one in the time that a
    window may take.

    A step that computes prompt tokens beside decodes makes the decodes wait for all of it. So such steps aim
    at a duration too: the time between two tokens of a decoding row. Earlier steps with prompt tokens show
    how many would fit. A step that took too long is compared with a decode step, as if each prompt token had
    cost the same. A step that was short shows that more tokens fit, at most twice as many. While prompts come
    in there are no pure decode steps to compare with: then a step with few prompt tokens counts as one, and
    no decode step takes longer than any step with prompt tokens.

    The median of the last few measurements counts, so a single odd one changes nothing.
    """

    def __init__(self, window_s: float, max_steps: int, target_itl_s: float = 0.0) -> None:
        """`window_s`: what a window should take at most, in seconds. `max_steps`: the most decode steps of a
        window; 1 makes no windows. `target_itl_s`: what a step with decodes and prompt tokens should take at
        most, in seconds; 0 sets no limit.
        """
        self._window_ns = window_s * 1e9
        self._max_steps = max_steps
        self._target_ns = target_itl_s * 1e9
        self._decodes: deque[float] = deque(maxlen=_NUM_DECODES)
        """Times of the last decode steps, in ns."""
        self._is_plain = False
        """Whether none of these steps had rows under a constraint."""
        self._decode_ns = 0.0
        """The median of `_decodes`; 0 if there is none yet."""
        self._unprobed = 0
        """Steps with prompt tokens since the last one that had few."""
        self._fits: deque[float] = deque(maxlen=_NUM_PREFILLS)
        """How many prompt tokens would have met the aim, in each of the last steps with some."""
        self._constrained: deque[float] = deque(maxlen=_NUM_DECODES)
        """Times of the last steps of rows under a constraint alone, in ns."""

    def decoded(self, num_steps: int, elapsed_ns: int, *, constrained: bool = False) -> None:
        """Notes that this many decode steps, one after the other, took `elapsed_ns` on the device.
        `constrained`: rows under a constraint were among others, so the step may have waited for masks; such
        a time counts only until one without them is known.
        """
        if constrained and self._is_plain:
            return
        if not constrained and not self._is_plain:
            self._is_plain = True
            self._decodes.clear()
        self._decodes.append(max(elapsed_ns, 1) / max(num_steps, 1))
        self._decode_ns = median_low(self._decodes)

    def constrained(self, elapsed_ns: int) -> None:
        """Notes that a decode step of rows under a constraint alone took this long, waiting for masks
        included.
        """
        self._constrained.append(max(elapsed_ns, 1))

    def prefilled(self, num_tokens: int, elapsed_ns: int) -> None:
        """Notes that a step with this many prompt tokens, with or without decodes, took `elapsed_ns` on the
        device.
        """
        if not self._target_ns or num_tokens < LEAST_TOKENS:
            return
        self._check_decode(num_tokens, elapsed_ns)
        aim, decode = self._aim_ns, self._decode_ns
        if elapsed_ns <= aim and 2 * num_tokens < self._tokens:
            return  # a step with few tokens says nothing about one with many
        most = 2.0 * num_tokens
        if elapsed_ns > decode:
            most = min(most, num_tokens * (aim - decode) / (elapsed_ns - decode))
        self._fits.append(most)

    def _check_decode(self, num_tokens: int, elapsed_ns: int) -> None:
        """Uses a step with prompt tokens, the only kind there is while prompts come in, as a measure of a
        decode step: a decode step takes no longer; and if the prompt tokens are few, it takes about as long.
        """
        if not self._decodes:
            return
        self._unprobed = self._unprobed + 1 if self._aim_ns > self._target_ns else 0
        # A padded step may be too large for the fewest tokens, and the two steps in flight were made before.
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
        """How many decode steps the next dispatch may hold, at least 1. `steps_ahead` of those already
        dispatched run before it.
        """
        if self._max_steps == 1 or not self._decodes:
            return 1
        to_deadline = ns_to_deadline / self._decode_ns - steps_ahead
        return max(1, int(min(self._max_steps, self._window_ns / self._decode_ns, to_deadline)))

    @property
    def apart_steps(self) -> int:
        """How many decode steps of the other rows come between two steps of rows under a constraint; 0: all
        rows step together.
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
            return LEAST_TOKENS  # to measure whether decodes still take this long
        return max(int(self._tokens), LEAST_TOKENS)

    @property
    def _tokens(self) -> float:
        return median_low(self._fits) if self._fits else _FIRST_TOKENS

    @property
    def _aim_ns(self) -> float:
        return max(_AIM * self._target_ns, self._decode_ns / DECODE_SHARE)
