"""Makes the span of a request that has ended, and those of its phases."""

from __future__ import annotations

from penstock.runtime.generation.results import merged_timing
from penstock.service.telemetry.otlp import wire
from penstock.service.telemetry.tracing.followed import FollowedRequest
from penstock.service.telemetry.tracing.notes import Closed
from penstock.service.telemetry.tracing.phases import engine_phases, phase_id, tiled


def request_spans(followed: FollowedRequest, closed: Closed) -> list[bytes]:
    """The span of the request, and one for each of its phases. `followed` is what is known of it from the
    engine, which may be nothing: then the service's own times are taken.
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
