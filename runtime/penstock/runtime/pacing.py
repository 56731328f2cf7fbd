"""How many decode steps one dispatch may hold: as many as fit a wanted duration, by the steps measured so
far. No jax.
"""

from __future__ import annotations

_SMOOTHING = 8
"""A new measurement counts for one part in so many."""


class DecodePacer:
    """Windows of decode steps save a dispatch per step; while one runs, nobody can enter and no token is
    seen.

    So they aim at a duration, not a number, and end before the next time limit.
    """

    def __init__(self, window_s: float, max_steps: int) -> None:
        """`window_s`: what a window should take at most, in seconds; `max_steps`: the most steps it may have;
        1 makes none.
        """
        self._window_ns = window_s * 1e9
        self._max_steps = max_steps
        self._step_ns = 0.0  # not measured yet

    def measured(self, num_steps: int, elapsed_ns: int) -> None:
        """That many decode steps, one after the other, took so long on the device."""
        step_ns = max(elapsed_ns, 1) / max(num_steps, 1)
        self._step_ns += (step_ns - self._step_ns) / (_SMOOTHING if self._step_ns else 1)

    def max_steps(self, ns_to_deadline: int, steps_ahead: int) -> int:
        """Steps for the next dispatch, at least 1. `steps_ahead` of those already dispatched come before."""
        if self._max_steps == 1 or not self._step_ns:
            return 1
        to_deadline = ns_to_deadline / self._step_ns - steps_ahead
        return max(1, int(min(self._max_steps, self._window_ns / self._step_ns, to_deadline)))
