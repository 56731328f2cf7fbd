"""Makes the trace of one engine step: a span without a parent, and below it one for each part of its time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.runtime.loop.interface import StepRecord, StepShape
from penstock.service.telemetry.otlp import wire

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
    """`ids` are ID_BYTES random bytes, the same as for `step_trace`."""
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
    """The spans of a step. `requests` are links to the recorded requests that it computed."""
    started, scheduled, packed, dispatched, waiting, waited, _, delivered = (
        at_ns + wall_offset_ns for at_ns in record[4:]
    )
    trace, step_id = wire.head(ids[:16]), ids[16:24]
    load, cached = record.load, wire.cached_attribute
    rest = [
        id_attribute,
        cached("penstock.step.kind", kind),
        cached("penstock.step.rows", record.num_rows),
        cached("penstock.step.tokens", record.num_tokens if prefills else record.num_rows),
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
