"""Makes the spans of recorded requests, of their phases, and of engine steps.

`request_spans` makes the span of a request that has ended, and those of its phases. `tiled` divides a request
into phases that leave no gap: each ends where the next one begins.

`FollowedRequest` and `FollowedOutput` are what is known of requests that are recorded and have not ended;
they make the spans below their phases. A span of a chunk or a window is sent as soon as it is complete. So a
request that never ends holds no more memory than a short one.

`step_trace` makes the trace of one engine step: a span without a parent, and below it one for each part of
its time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.runtime.loop.interface import StepRecord, StepShape
from penstock.runtime.prompting.results import merged_timing
from penstock.runtime.requests.request import RequestTiming
from penstock.runtime.scheduling.plan import PlanRow
from penstock.service.telemetry.otlp import wire
from penstock.service.telemetry.otlp.wire import Attributes
from penstock.service.telemetry.tracing.notes import Begun, Closed, Happened, RequestContext

QUEUE, PREFILL, DECODE, REPLY = "queue", "prefill", "decode", "reply"
_NUMBERS = {"tokenize": 1, "grammar": 2, "submit": 3, QUEUE: 4, PREFILL: 5, DECODE: 6, REPLY: 7}


class Phase(NamedTuple):
    """A part of a request. Times are monotonic ns."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes


def phase_id(request_id: bytes, name: str) -> bytes:
    """Make the id of a phase's span. It follows from the id of the request's span, so that spans below a
    phase can be sent before the phase has ended, and whoever makes them need not know each other.
    """
    return (int.from_bytes(request_id, "big") ^ _NUMBERS[name]).to_bytes(8, "big")


def engine_phases(timing: RequestTiming, *, has_ended: bool) -> list[Begun]:
    """List the phases that the engine's times tell of. `has_ended`: whether the engine ended the request,
    rather than its caller, so that what comes after is the reply.
    """
    marks = [
        (QUEUE, timing.arrived_ns),
        (PREFILL, timing.scheduled_ns),
        (DECODE, timing.first_token_ns),
        (REPLY, timing.finished_ns if has_ended else 0),
    ]
    return [Begun(name, at_ns) for name, at_ns in marks if at_ns]


def tiled(begun: Sequence[Begun], start_ns: int, end_ns: int) -> list[Phase]:
    """List the phases of a request that lasted from `start_ns` to `end_ns`; `begun` are in their order.
    Together they last exactly as long as the request: the first begins with it, and the last ends with it. A
    phase that began only after the request had ended for its caller is left out.
    """
    kept: list[Begun] = []
    at_ns = start_ns
    for phase in begun:
        if kept and phase.at_ns >= end_ns:
            break
        at_ns = max(at_ns, phase.at_ns) if kept else start_ns
        kept.append(Begun(phase.name, at_ns, phase.attributes))
    ends = [*(phase.at_ns for phase in kept[1:]), end_ns]
    return [
        Phase(phase.name, phase.at_ns, end, phase.attributes) for phase, end in zip(kept, ends, strict=True)
    ]


MOST_REQUEST_LINKS = 32
"""A step has links to so many of the recorded requests that it computed."""
ID_BYTES = 16 + 8 * 6
"""How many random bytes the ids of a step's trace and of its spans take."""

_STEP, _SCHEDULE, _PACK, _DISPATCH, _WAIT, _EMIT = (
    wire.named(name) for name in ("engine.step", "schedule", "pack", "dispatch", "wait", "emit")
)


class Step(NamedTuple):
    """What the spans of requests say about a step that is recorded."""

    begin_ns: int
    """When the device began it: it was dispatched, and the step before was done. Monotonic."""
    waited_ns: int
    """When its tokens were on the host."""
    shape: StepShape | None
    prefills: bool
    """Whether it computed tokens of prompts, too."""
    id_attribute: bytes
    link: bytes
    """A link to its span."""
    seconds: bytes
    """How long the device took, as an element of an array."""


def step_of(record: StepRecord, *, ids: bytes, begin_ns: int, prefills: bool) -> Step:
    """Describe a step. `ids` are ID_BYTES random bytes, the same as for `step_trace`."""
    seconds = wire.element((record.waited_ns - begin_ns) / 1e9)
    id_attribute = wire.attribute("penstock.step.id", record.plan.step_id)
    link = wire.link(ids[:16], ids[16:24])
    return Step(begin_ns, record.waited_ns, record.shape, prefills, id_attribute, link, seconds)


def step_trace(
    record: StepRecord,
    *,
    ids: bytes,
    kind: str,
    prefills: bool,
    id_attribute: bytes,
    wall_offset_ns: int,
    requests: Sequence[bytes],
    num_generated: int,
) -> list[bytes]:
    """Make the spans of a step. `requests` are links to the recorded requests that it computed."""
    started, scheduled, packed, dispatched, waiting, waited, _, delivered = (
        at_ns + wall_offset_ns for at_ns in record[4:12]
    )
    trace, step_id = wire.head(ids[:16]), ids[16:24]
    load, cached = record.load, wire.cached_attribute
    num_tokens = record.num_tokens if prefills or record.speculated else record.num_rows
    rest = [
        id_attribute,
        cached("penstock.step.kind", kind),
        cached("penstock.step.rows", record.num_rows),
        cached("penstock.step.tokens", num_tokens),
        cached("penstock.step.decode_steps", record.num_steps),
        cached("penstock.step.generated_tokens", num_generated),
        cached("penstock.step.recorded_requests", len(requests)),
        cached("penstock.outputs.running", load.num_running),
        cached("penstock.outputs.waiting", load.num_waiting),
        cached("penstock.kv.pages_used", load.pages_used),
    ]
    if record.shape is not None:
        rest.append(cached("penstock.step.bucket.tokens", record.shape.tokens))
        rest.append(cached("penstock.step.bucket.rows", record.shape.rows))
        if record.shape.compiled:
            rest.append(cached("penstock.step.compiled", value=True))
    if record.speculated:
        proposed = sum([sum(one.proposed) for one in record.speculated])
        accepted = sum([sum(one.accepted) for one in record.speculated])
        rest.append(cached("penstock.step.proposed_tokens", proposed))
        rest.append(cached("penstock.step.accepted_tokens", accepted))
    rest += requests[:MOST_REQUEST_LINKS]
    span = wire.span
    return [
        wire.root(trace, step_id, _STEP, started, delivered, b"".join(rest)),
        span(trace, ids[24:32], step_id, _SCHEDULE, started, scheduled),
        span(trace, ids[32:40], step_id, _PACK, scheduled, packed),
        span(trace, ids[40:48], step_id, _DISPATCH, packed, dispatched),
        span(trace, ids[48:56], step_id, _WAIT, waiting, waited),
        span(trace, ids[56:64], step_id, _EMIT, waited, delivered),
    ]


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
        """Note an event of its span."""
        if len(self.events) >= MOST_EVENTS:
            self.num_events_left_out += 1
            return
        at_ns = what.at_ns + self.context.wall_offset_ns
        self.events.append(wire.event(what.name, at_ns, what.attributes))

    def child(
        self, span_id: bytes, parent_id: bytes, name: bytes, start_ns: int, end_ns: int, rest: bytes
    ) -> bytes | None:
        """Make a span below one of its phases, between monotonic times; None where there is no more room for
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
        """Make the span of a row that computes tokens that are known."""
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
        """Make the span of a row that computes next tokens."""
        tokens = wire.cached_attribute("penstock.step.generated_tokens", num_tokens)
        rest = self.index_attribute + tokens + step.id_attribute + step.link
        request = self.request
        return request.child(new_id(8), request.decode_id, _DECODE_STEP, step.begin_ns, step.waited_ns, rest)

    def decoded(self, new_id: NewId, step: Step, num_tokens: int) -> bytes | None:
        """Add a step to the window. Returns the span of the window if it is complete with that."""
        window = self.window
        window.append(step)
        self.window_tokens += num_tokens
        return self.take_window(new_id) if len(window) >= MOST_STEPS_OF_WINDOW else None

    def take_window(self, new_id: NewId) -> bytes | None:
        """End the window. Returns its span, unless it has no steps or there is no more room for it."""
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


def request_spans(followed: FollowedRequest, closed: Closed) -> list[bytes]:
    """Make the span of the request, and one for each of its phases. `followed` is what is known of it from
    the engine, which may be nothing: then the service's own times are taken.
    """
    context = closed.context
    for what in closed.happened:
        followed.happened(what)
    timing = merged_timing(followed.timings) or closed.timing
    begun = list(closed.begun)
    known: dict[str, wire.AttributeValue] = {}
    if timing is not None:
        has_ended = closed.timing is not None or (followed.is_settled and not followed.was_cancelled)
        begun += engine_phases(timing, has_ended=has_ended)
        known = {
            "gen_ai.usage.output_tokens": followed.num_tokens if closed.timing is None else closed.num_tokens,
            "gen_ai.usage.cache_read.input_tokens": timing.cached_prompt_tokens,
            "penstock.preemptions": timing.preemptions,
        }
        if timing.proposed_tokens:
            known["penstock.usage.proposed_tokens"] = timing.proposed_tokens
            known["penstock.usage.accepted_tokens"] = timing.accepted_tokens
    if followed.weights_generation is not None:
        known["penstock.weights.generation"] = followed.weights_generation
    if followed.num_left_out:
        known["penstock.spans.left_out"] = followed.num_left_out
    if followed.num_events_left_out:
        known["penstock.events.left_out"] = followed.num_events_left_out
    rest = [wire.attributes({**known, **closed.attributes}), *followed.events]
    if closed.error:
        rest.append(wire.error(closed.error))
    offset_ns, head, span_id = context.wall_offset_ns, followed.head, context.span_id
    start_ns, end_ns = closed.start_ns + offset_ns, closed.end_ns + offset_ns
    name = wire.named(closed.name)
    return [
        wire.span(head, span_id, context.parent_id, name, start_ns, end_ns, b"".join(rest)),
        *(
            wire.span(
                head,
                phase_id(span_id, phase.name),
                span_id,
                wire.named(phase.name),
                phase.start_ns + offset_ns,
                phase.end_ns + offset_ns,
                wire.attributes(phase.attributes),
            )
            for phase in tiled(begun, closed.start_ns, closed.end_ns)
        ),
    ]
