"""The types by which the engine's loop and the rest of the runtime talk to each other: sinks, observers, the
runner, and the values that go with them besides requests and outputs. No jax.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from penstock.runtime.requests.request import StepOutput
from penstock.runtime.scheduling.load import Load
from penstock.runtime.scheduling.plan import Plan, Speculated, StepResult

Sink = Callable[[Sequence[StepOutput]], None]
"""Takes the outputs of one step for all requests that were submitted with this same object. It is called on
the engine's thread and must not block."""


class AbortOutcome(enum.Enum):
    """What `abort` found for an id."""

    ABORTED = "aborted"
    ALREADY_FINISHED = "already_finished"
    NOT_FOUND = "not_found"


class InFlightPolicy(enum.Enum):
    """What a weight update or a pause does with the requests that run. A request of several outputs runs from
    when its first output enters until all have ended.
    """

    WAIT = "wait"
    """Let no new request enter until the running ones have finished, on the old weights."""
    ABORT = "abort"
    """End the running requests with what they have. Requests that wait start later, on the new weights."""
    KEEP = "keep"
    """Let the running requests go on later with the KV that they have, computed by the old weights."""
    RECOMPUTE = "recompute"
    """Drop the KV of the running requests, compute it again on the weights that serve then, and go on."""


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """Which weights serve: the label that the caller gave them, and their generation, which rises by one with
    each update.
    """

    label: str
    generation: int


@dataclass(frozen=True, slots=True)
class InFlightReport:
    """What became of the requests that ran when an update or a pause came. These are numbers of requests,
    whatever the number of their outputs.
    """

    waited: int = 0
    """Ended before."""
    aborted: int = 0
    kept: int = 0
    """Go on with the KV that they have."""
    recomputed: int = 0
    """Have lost their KV, which is computed again."""


@dataclass(frozen=True, slots=True)
class Applied:
    """A weight update that went live."""

    version: WeightsVersion
    previous: WeightsVersion
    """What served before."""
    in_flight: InFlightReport
    paused_ns: int
    """For how long no token could be made because of the update."""
    applied_at: dt.datetime
    """In UTC."""


@dataclass(frozen=True, slots=True)
class Paused:
    """A pause that is in force."""

    in_flight: InFlightReport
    freed_bytes: int = 0
    """Memory of the device that this call has freed."""


class Resumed(NamedTuple):
    """A pause that has ended."""


class WeightsBroken(NamedTuple):
    """An update in place that failed has left weights which are partly old and partly new."""

    reason: str
    """What failed, in a few words."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """Whether the engine's thread moves, for code that watches it from outside."""

    progress: int
    """A number that changes whenever the thread has dispatched a step, or committed one."""
    has_work: bool
    """Whether the number should change: requests have outputs that are not handed over yet, or run or wait
    while the engine is neither paused nor held for an update."""
    thread_id: int | None
    """`threading.get_ident` of the thread; None if it was not started."""


class StepShape(NamedTuple):
    """The compiled program that ran a step."""

    tokens: int
    """How many input tokens it has room for; of a window, as many as rows."""
    rows: int
    """How many rows it has room for."""
    compiled: bool = False
    """Whether something had to be compiled for the step, which after the start nothing should."""


class StepKind(enum.Enum):
    """What a step computes."""

    PREFILL = "prefill"
    """Only tokens that are known: of prompts, or computed again after a preemption."""
    DECODE = "decode"
    """Only next tokens."""
    MIXED = "mixed"
    """Both."""
    WINDOW = "window"
    """Several decode steps in one dispatch."""


class StepRecord(NamedTuple):
    """One engine step, or window of decode steps. Times are in monotonic ns, in the order in which they
    occur, except that other steps may be dispatched or committed between `dispatched_ns` and `waiting_ns`.

    Five parts of a step's time can be told apart: schedule, from `started_ns` to `scheduled_ns`; pack, to
    `packed_ns`; dispatch, to `dispatched_ns`; wait, from `waiting_ns` to `waited_ns`; emit, to
    `delivered_ns`.

    It is a named tuple because that is cheap to make, and it copies nothing: the properties are computed when
    they are asked for.
    """

    plan: Plan
    """What was computed."""
    outputs: Sequence[StepOutput]
    """What the step made for the outputs that had not ended before. None for rows that make no token, nor for
    rows whose output ended, or was cancelled, while the step ran."""
    load: Load
    """How busy the scheduler was after this step."""
    shape: StepShape | None
    """The program that ran; None where the runner does not say."""
    started_ns: int
    """When the engine's thread began to make the plan."""
    scheduled_ns: int
    """When the plan was complete."""
    packed_ns: int
    """When the step's buffer was packed for the device."""
    dispatched_ns: int
    """When the runner had dispatched the step."""
    waiting_ns: int
    """When the engine's thread began to wait for the tokens."""
    waited_ns: int
    """When the tokens were on the host."""
    committed_ns: int
    """When the scheduler had taken in the tokens."""
    delivered_ns: int
    """When the sinks had the outputs."""
    speculated: tuple[Speculated, ...] = ()
    """What was proposed and accepted, by proposer; none where nothing was proposed."""

    @property
    def step_id(self) -> int:
        """The number of the step, counted from 0."""
        return self.plan.step_id

    @property
    def num_rows(self) -> int:
        """How many rows the step had."""
        return len(self.plan.rows)

    @property
    def num_tokens(self) -> int:
        """Input tokens of the (first) step."""
        return self.plan.num_tokens

    @property
    def num_steps(self) -> int:
        """Decode steps of a window; 1 for a single step."""
        return self.plan.num_steps

    @property
    def decode_only(self) -> bool:
        """Whether every row has one input token."""
        return self.plan.decode_only

    @property
    def kind(self) -> StepKind:
        """What the step computed."""
        if self.plan.num_steps > 1:
            return StepKind.WINDOW
        num_decodes = [row.token_ids for row in self.plan.rows].count(None)
        if num_decodes == len(self.plan.rows):
            return StepKind.DECODE
        return StepKind.MIXED if num_decodes else StepKind.PREFILL

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The engine's ids of the outputs that have a row, in the order of the rows."""
        return tuple(row.request_id for row in self.plan.rows)

    @property
    def num_waiting(self) -> int:
        """Outputs that wait after this step."""
        return self.load.num_waiting

    @property
    def pages_used(self) -> int:
        """Pages that requests hold after this step."""
        return self.load.pages_used


class Observer(Protocol):
    """Sees every step, on the engine's thread. It should append the record somewhere and return; costly work
    belongs elsewhere, for example in a reader of the journal (`penstock.runtime.loop.journal`).

    If it raises, that is logged, and it sees no more steps.
    """

    def on_step(self, record: StepRecord) -> None:
        """Note that the sinks have the step's outputs."""
        ...


class DispatchedStep(Protocol):
    """What the loop reads of a step that a runner has dispatched. Everything else about it is the runner's
    own.
    """

    @property
    def shape(self) -> StepShape | None:
        """The compiled program that runs; None where the runner does not say."""
        ...

    @property
    def packed_ns(self) -> int:
        """When what the step sends to the device was packed, in monotonic ns."""
        ...

    @property
    def awaits_choice(self) -> bool:
        """Whether only the model runs yet, because a row under a constraint makes a token: then
        `Runner.choose` must be called before `Runner.wait`.
        """
        ...

    @property
    def is_done(self) -> bool:
        """Whether `Runner.wait` would not block."""
        ...

    @property
    def skipped(self) -> frozenset[int]:
        """Rows that make no token although they were to, because the masks of their constraints took too
        long. The next step that has them computes the same position again.
        """
        ...

    @property
    def late(self) -> frozenset[int]:
        """The skipped rows whose own mask took long; the others are skipped because they waited behind
        these.
        """
        ...


StepT = TypeVar("StepT", bound=DispatchedStep)


class Runner(Protocol[StepT]):
    """Computes plans, on a device or elsewhere. The runner keeps page tables, KV cache and last tokens. Plans
    come in order, and the effect must be as if each were computed after the one before it.

    This is all that the loop knows of a runner. So the loop runs without jax, and tests give it a runner of
    Python lists.

    All methods but `shutdown` are called on the engine's thread. Whatever one of them raises ends the engine.
    """

    def start(self) -> None:
        """Start, once, before the first plan and after all slow preparations."""
        ...

    def execute_async(self, plan: Plan) -> StepT:
        """Begin to compute a plan, and do not wait for it."""
        ...

    def choose(self, step: StepT) -> StepT:
        """Choose the tokens of a step that awaits it, and return other steps as they are. It is called when
        the constraints have accepted all earlier tokens of their rows, and before the next plan comes.
        """
        ...

    def wait(self, step: StepT) -> StepResult:
        """Block until the tokens of a step are known. Steps are waited for in the order of their plans."""
        ...

    def free_kv_cache(self) -> int:
        """Free the memory of the KV cache until `restore_kv_cache`, and return how many bytes that were. What
        is in the cache is lost. Called with no step in flight, and so are the three methods below; unlike the
        others, they may raise: then nothing has changed.
        """
        ...

    def restore_kv_cache(self) -> None:
        """Allocate the KV cache again, if it was freed. Nothing is compiled for that."""
        ...

    def offload_weights(self) -> int:
        """Move the weights from the device to host memory until `restore_weights`, and return how many
        bytes of the device that has freed: 0 where they are in host memory anyway. Weights that are swapped
        in meanwhile stay there too.
        """
        ...

    def restore_weights(self) -> None:
        """Move the weights back to the device, if they were offloaded."""
        ...

    def shutdown(self) -> None:
        """Free what the runner holds. May be called on any thread after the engine's has ended, and more than
        once.
        """
        ...
