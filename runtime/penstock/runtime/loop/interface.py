"""What the engine's loop asks of others and is asked: sinks, observers, the runner, and the values that go
with them besides requests and outputs. No jax.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from penstock.runtime.requests.request import Output
from penstock.runtime.scheduling.plan import Plan, StepResult

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


class DispatchedStep(Protocol):
    """What the loop reads of a step that a runner has dispatched. All else of it is the runner's own."""

    @property
    def awaits_choice(self) -> bool:
        """Whether only the model runs yet, because a row under a constraint makes a token: then
        `Runner.choose` comes before `Runner.wait`.
        """
        ...

    @property
    def skipped(self) -> frozenset[int]:
        """Rows that make no token though they were to, because the masks of their constraints took too long:
        the next step that has them computes the same position again.
        """
        ...

    @property
    def late(self) -> frozenset[int]:
        """The skipped rows whose own mask took long; others are skipped because they waited behind these."""
        ...


StepT = TypeVar("StepT", bound=DispatchedStep)


class Runner(Protocol[StepT]):
    """Computes plans, on a device or elsewhere. Plans come in order, and their effects must be as if each was
    computed after the one before: page tables, KV cache and last tokens are the runner's to keep.

    All methods but `shutdown` are called on the engine's thread. Whatever one raises ends the engine.
    """

    def start(self) -> None:
        """Called once before the first plan, when all that is slow at first has been done."""
        ...

    def execute_async(self, plan: Plan) -> StepT:
        """Begins to compute a plan, and does not wait for it."""
        ...

    def choose(self, step: StepT) -> StepT:
        """Chooses the tokens of a step that awaits it; of any other step there is nothing to do. It comes
        when constraints have accepted all earlier tokens of their rows, and before the next plan does.
        """
        ...

    def wait(self, step: StepT) -> StepResult:
        """Blocks until the tokens of a step are known. Steps are waited for in the order of their plans."""
        ...

    def shutdown(self) -> None:
        """Frees what the runner holds. Called on any thread, when the engine's has ended, maybe twice."""
        ...
