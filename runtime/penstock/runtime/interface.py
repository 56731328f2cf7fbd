"""What the engine and its users exchange besides requests and outputs. No jax."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.runtime.request import Output

Sink = Callable[[Sequence[Output]], None]
"""Takes the outputs of one step for all requests submitted with this same object; called on the engine
thread; must not block.
"""


class AbortOutcome(enum.Enum):
    """What `abort` found for an id."""

    ABORTED = "aborted"
    ALREADY_FINISHED = "already_finished"
    NOT_FOUND = "not_found"


class InFlightPolicy(enum.Enum):
    """What a weight update does with running requests."""

    WAIT = "wait"
    """Hold admission, let the running ones finish on the old weights."""
    ABORT = "abort"
    """End them with what they have; requests that wait start on the new weights."""
    KEEP = "keep"
    """Go on with the cache the old weights computed."""
    RECOMPUTE = "recompute"
    """Drop their cache, prefill again on the new weights, go on."""


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """Which weights serve: the caller's label and a number that rises by one per update."""

    label: str
    generation: int


@dataclass(frozen=True, slots=True)
class Pulse:
    """How the engine's thread gets on, for who watches it from outside."""

    progress: int
    """Another number whenever the thread has dispatched a step, or taken one in."""
    has_work: bool
    """Whether it should do so: requests run or wait, or are yet to be told something."""
    thread_id: int | None
    """`threading.get_ident` of the thread; None: it was not started."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One engine step, or window of decode steps, for an observer; times are monotonic ns."""

    step_id: int
    num_rows: int
    num_tokens: int
    decode_only: bool
    request_ids: tuple[str, ...]
    num_waiting: int
    pages_used: int
    started_ns: int
    scheduled_ns: int
    dispatched_ns: int
    waited_ns: int
    committed_ns: int
    num_steps: int = 1
    """Decode steps of a window."""


class Observer(Protocol):
    """Sees every step, on the engine thread: append and return; anything costly belongs elsewhere.

    One that raises is logged and sees no more.
    """

    def on_step(self, record: StepRecord) -> None:
        """Called after the step's outputs were committed."""
        ...
