"""What is known of requests that are recorded and have not ended, and the spans below their phases.

A span of a chunk or a window is sent as soon as it is complete. So a request that never ends holds no more
memory than a short one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.runtime.requests.request import RequestTiming
from penstock.runtime.scheduling.plan import PlanRow
from penstock.service.telemetry.otlp import wire
from penstock.service.telemetry.tracing.notes import Closed, Happened, RequestContext
from penstock.service.telemetry.tracing.phases import DECODE, PREFILL, phase_id
from penstock.service.telemetry.tracing.steps import Step

MOST_CHILDREN = 256
"""A request has so many spans below its phases. Each has links to one step or two."""
MOST_EVENTS = 64
MOST_STEPS_OF_WINDOW = 64
LEAST_STEPS_OF_SHAPE = 16
"""A window with so many steps ends where the shape of the steps changes."""

_CHUNK, _WINDOW, _DECODE_STEP = (
    wire.named(name) for name in ("prefill_chunk", "decode_window", "decode_step")
)
NewId = Callable[[int], bytes]
"""Makes that many random bytes."""


@dataclass(slots=True, eq=False)
class FollowedRequest:
    """A request whose span is recorded."""

    context: RequestContext
    head: bytes = field(init=False)
    link: bytes = field(init=False)
    """A link to its span."""
    prefill_id: bytes = field(init=False)
    decode_id: bytes = field(init=False)
    outputs: dict[str, FollowedOutput] = field(default_factory=dict)
    """Those that have not ended in the engine, by their engine ids."""
    is_decoding: bool = False
    """Whether any output has its first token."""
    num_children: int = 0
    num_left_out: int = 0
    """Spans below its phases that there was no more room for."""
    events: list[bytes] = field(default_factory=list)
    num_events_left_out: int = 0
    num_settled: int = 0
    """How many outputs have ended in the engine."""
    timings: list[RequestTiming] = field(default_factory=list)
    """Those of the outputs that have ended."""
    num_tokens: int = 0
    """Tokens generated for the outputs that have ended."""
    weights_generation: int | None = None
    """Of the weights that made the last token of an output."""
    was_cancelled: bool = False
    """Whether an output was dropped because nobody read it any more."""
    closed: Closed | None = None
    """Set when it has ended for its caller."""

    def __post_init__(self) -> None:
        context = self.context
        self.head = wire.head(context.trace_id, context.trace_state)
        self.link = wire.link(context.trace_id, context.span_id)
        self.prefill_id = phase_id(context.span_id, PREFILL)
        self.decode_id = phase_id(context.span_id, DECODE)

    @property
    def is_settled(self) -> bool:
        """Whether all that its caller left in the engine has ended there."""
        return self.closed is not None and self.num_settled >= self.closed.num_queued

    def happened(self, what: Happened) -> None:
        """Notes an event of its span."""
        if len(self.events) >= MOST_EVENTS:
            self.num_events_left_out += 1
            return
        at_ns = what.at_ns + self.context.wall_offset_ns
        self.events.append(wire.event(what.name, at_ns, what.attributes))

    def child(
        self, span_id: bytes, parent_id: bytes, name: bytes, start_ns: int, end_ns: int, rest: bytes
    ) -> bytes | None:
        """A span below one of its phases, between monotonic times; None where there is no more room for
        one.
        """
        if self.num_children >= MOST_CHILDREN:
            self.num_left_out += 1
            return None
        self.num_children += 1
        offset_ns = self.context.wall_offset_ns
        return wire.span(self.head, span_id, parent_id, name, start_ns + offset_ns, end_ns + offset_ns, rest)


@dataclass(slots=True, eq=False)
class FollowedOutput:
    """An output of such a request, from when it was queued to its end in the engine."""

    request: FollowedRequest
    index: int
    queued_ns: int
    index_attribute: bytes = field(init=False)
    was_preempted: bool = False
    window: list[Step] = field(default_factory=list)
    """The steps that made tokens of it since the last window was sent."""
    window_tokens: int = 0

    def __post_init__(self) -> None:
        self.index_attribute = wire.cached_attribute("penstock.output.index", self.index)

    def chunk(self, new_id: NewId, row: PlanRow, step: Step) -> bytes | None:
        """The span of a row that computes tokens that are known."""
        rest = [
            self.index_attribute,
            wire.cached_attribute("penstock.chunk.start", row.start),
            wire.cached_attribute("penstock.chunk.tokens", row.num_tokens),
            step.id_attribute,
            step.link,
        ]
        if self.was_preempted:
            rest.append(wire.cached_attribute("penstock.chunk.recomputed", value=True))
        request = self.request
        parent_id = request.decode_id if request.is_decoding else request.prefill_id
        return request.child(new_id(8), parent_id, _CHUNK, step.begin_ns, step.waited_ns, b"".join(rest))

    def decode_step(self, new_id: NewId, step: Step, num_tokens: int) -> bytes | None:
        """The span of a row that computes next tokens."""
        tokens = wire.cached_attribute("penstock.step.generated_tokens", num_tokens)
        rest = self.index_attribute + tokens + step.id_attribute + step.link
        request = self.request
        return request.child(new_id(8), request.decode_id, _DECODE_STEP, step.begin_ns, step.waited_ns, rest)

    def decoded(self, new_id: NewId, step: Step, num_tokens: int) -> bytes | None:
        """Adds a step to the window. Returns the span of the window if it is complete with that."""
        window = self.window
        window.append(step)
        self.window_tokens += num_tokens
        return self.take_window(new_id) if len(window) >= MOST_STEPS_OF_WINDOW else None

    def take_window(self, new_id: NewId) -> bytes | None:
        """Ends the window. Returns its span, unless it has no steps or there is no more room for it."""
        window = self.window
        if not window:
            return None
        first, last = window[0], window[-1]
        rest = [
            self.index_attribute,
            wire.cached_attribute("penstock.window.steps", len(window)),
            wire.cached_attribute("penstock.window.tokens", self.window_tokens),
            wire.cached_attribute("penstock.window.mixed_steps", sum([step.prefills for step in window])),
            wire.array_attribute("penstock.window.step_durations", b"".join([s.seconds for s in window])),
            first.link,
        ]
        if last is not first:
            rest.append(last.link)
        self.window, self.window_tokens = [], 0
        request, times = self.request, (first.begin_ns, last.waited_ns)
        return request.child(new_id(8), request.decode_id, _WINDOW, *times, b"".join(rest))
