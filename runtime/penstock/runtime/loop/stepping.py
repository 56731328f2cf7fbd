"""The steps on the device, and how much one dispatch of them holds. No jax.

`Steps` dispatches them, has their tokens chosen, waits for them and measures them. `Pacer` decides from these
measurements how much one dispatch holds: how many decode steps a window has, and how many prompt tokens a
step with decodes. It is pure arithmetic on the times that it is given.

Only the engine's thread uses this, and without the engine's lock: nothing here touches the scheduler.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from dataclasses import dataclass
from statistics import median_low
from typing import Generic

from penstock.runtime.loop.guard import Annotate, unannotated
from penstock.runtime.loop.interface import Runner, StepShape, StepT
from penstock.runtime.scheduling.plan import Plan, StepResult
from penstock.runtime.scheduling.prefills import LEAST_TOKENS

DECODE_SHARE = 2 / 3
"""Largest part of a step's time that decodes may take while prompts come in. If a decode step alone takes
more than this part of the target, steps become longer than the target, and prompts get the rest of their
time."""
_AIM = 0.95
"""Steps aim at this part of the target, because about half of them take longer than what they aim at."""
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

    def __init__(
        self, window_s: float, max_steps: int, target_itl_s: float = 0.0, *, num_turns: int = 1
    ) -> None:
        """`window_s`: what a window should take at most, in seconds. `max_steps`: the most decode steps of a
        window; 1 makes no windows. `target_itl_s`: the most time between two tokens of a row where steps have
        decodes and prompt tokens, in seconds; 0 sets no limit. `num_turns`: a row has a token in one of so
        many steps.
        """
        self._window_ns = window_s * 1e9
        self._max_steps = max_steps
        self._target_ns = target_itl_s / num_turns * 1e9
        """What a step with decodes and prompt tokens should take at most."""
        self._most_ahead = 1 + num_turns
        """Steps that may be in flight when a plan is made."""
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
        """Note that this many decode steps, one after the other, took `elapsed_ns` on the device.
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
        """Note that a decode step of rows under a constraint alone took this long, waiting for masks
        included.
        """
        self._constrained.append(max(elapsed_ns, 1))

    def prefilled(self, num_tokens: int, elapsed_ns: int) -> None:
        """Note that a step with this many prompt tokens, with or without decodes, took `elapsed_ns` on the
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
        """Use a step with prompt tokens, the only kind there is while prompts come in, as a measure of a
        decode step: a decode step takes no longer; and if the prompt tokens are few, it takes about as long.
        """
        if not self._decodes:
            return
        self._unprobed = self._unprobed + 1 if self._aim_ns > self._target_ns else 0
        # A padded step may be too large for the fewest tokens, and the steps in flight were made before.
        few = num_tokens <= LEAST_TOKENS or self._unprobed >= _PROBE_EVERY + self._most_ahead
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
        """Tell how many decode steps the next dispatch may hold, at least 1. `steps_ahead` of those already
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


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan that is to be dispatched. Times are in monotonic ns."""

    plan: Plan
    started_ns: int
    """When the engine's thread began to make it."""
    scheduled_ns: int
    """When the plan was complete."""


@dataclass(frozen=True, slots=True)
class InFlight(Generic[StepT]):
    """A step that was dispatched and that the host has not waited for yet."""

    planned: Planned
    step: StepT
    dispatched_ns: int
    is_constrained: bool
    """Whether rows under a constraint make a token in this step, whether it is chosen already or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A step that the host has waited for. Times are in monotonic ns."""

    planned: Planned
    result: StepResult
    shape: StepShape | None
    """The program that ran; None where the runner does not say."""
    packed_ns: int
    """When the step's buffer was packed."""
    dispatched_ns: int
    waiting_ns: int
    """When the host began to wait."""
    waited_ns: int
    """When the tokens were on the host."""


@dataclass(frozen=True, slots=True)
class PutOff:
    """Rows of a dispatched plan that make no token in it, for `Scheduler.put_off`."""

    plan: Plan
    rows: frozenset[int]
    late: frozenset[int]
    """The rows whose own mask takes long."""


class Steps(Generic[StepT]):
    """The steps in flight, oldest first."""

    def __init__(
        self,
        runner: Runner[StepT],
        pacer: Pacer,
        *,
        most_in_flight: int,
        fixed_windows: bool = False,
        annotate: Annotate = unannotated,
    ) -> None:
        """`fixed_windows`: whether a window's program always runs all its steps, even when all rows have
        ended.
        """
        self._runner = runner
        self._pacer = pacer
        self._most_in_flight = most_in_flight
        self._fixed_windows = fixed_windows
        self._annotate = annotate
        self._in_flight: deque[InFlight[StepT]] = deque()
        self.waited_ns = 0
        """When the last step that was waited for had ended, in monotonic ns."""

    def __bool__(self) -> bool:
        return bool(self._in_flight)

    @property
    def is_full(self) -> bool:
        """Whether the oldest step must be waited for before another one is dispatched. More than two are in
        flight only if the tokens of all are chosen: a third step may have a row whose next input is one that
        is not. And only if none of them is done, whose tokens would wait for the next dispatch.
        """
        steps = self._in_flight
        return len(steps) >= self._most_in_flight or (
            len(steps) >= 2 and (steps[0].step.is_done or self.awaits_choice)
        )

    @property
    def awaits_choice(self) -> bool:
        """Whether the tokens of a step are not chosen yet, because a step before it has rows under
        constraints, too. No plan is made meanwhile: it may have a row whose next input is one of them.
        """
        return any(step.step.awaits_choice for step in self._in_flight)

    def max_steps(self, ns_to_deadline: int) -> int:
        """Tell how many decode steps the next dispatch may hold."""
        steps_ahead = sum(step.planned.plan.num_steps for step in self._in_flight)
        return self._pacer.max_steps(ns_to_deadline, steps_ahead)

    @property
    def prefill_budget(self) -> int | None:
        """Most prompt tokens of the next dispatch beside decodes; None: no limit."""
        return self._pacer.prefill_budget

    @property
    def apart_steps(self) -> int:
        """See `Pacer.apart_steps`."""
        return self._pacer.apart_steps

    def dispatch(self, planned: Planned) -> None:
        """Make the runner begin with a plan."""
        step = self._runner.execute_async(planned.plan)
        now_ns = time.monotonic_ns()
        self._in_flight.append(InFlight(planned, step, now_ns, is_constrained=step.awaits_choice))

    def choose(self) -> PutOff | None:
        """Have the tokens chosen of the oldest step with rows under constraints, if they are not chosen yet.
        All earlier tokens of these rows are committed by then, because the steps ahead of it have no row of
        theirs.

        Returns the rows whose token is put off, which the scheduler must know before it makes the next plan;
        None if there are none.
        """
        for i, step in enumerate(self._in_flight):
            if step.is_constrained:
                if not step.step.awaits_choice:
                    return None
                chosen = self._runner.choose(step.step)
                self._in_flight[i] = dataclasses.replace(step, step=chosen)
                return PutOff(step.planned.plan, chosen.skipped, chosen.late) if chosen.skipped else None
        return None

    def wait(self) -> Done:
        """Wait for the oldest step, which is then no longer in flight."""
        step = self._in_flight.popleft()
        waiting_ns = time.monotonic_ns()
        with self._annotate("wait", step=step.planned.plan.step_id):
            result = self._runner.wait(step.step)
        waited_ns = time.monotonic_ns()
        # The device began this step when it was dispatched, or when the step before it was done.
        elapsed_ns = waited_ns - max(step.dispatched_ns, self.waited_ns)
        plan = step.planned.plan
        if plan.encodes:
            pass  # how long the images took is not known, so the time says nothing about the tokens
        elif plan.apart:
            self._pacer.constrained(elapsed_ns)
        elif plan.decode_only:
            # A program of fixed length runs all its steps, even when every row has ended.
            made = plan.num_steps if self._fixed_windows else max(map(len, result.token_ids), default=1)
            self._pacer.decoded(made, elapsed_ns, constrained=step.is_constrained)
        else:
            self._pacer.prefilled(plan.num_prompt_tokens, elapsed_ns)
        self.waited_ns = waited_ns
        return Done(
            planned=step.planned,
            result=result,
            shape=step.step.shape,
            packed_ns=step.step.packed_ns,
            dispatched_ns=step.dispatched_ns,
            waiting_ns=waiting_ns,
            waited_ns=waited_ns,
        )

    def forget(self) -> None:
        """Drop the steps in flight, which nobody will wait for."""
        self._in_flight.clear()
