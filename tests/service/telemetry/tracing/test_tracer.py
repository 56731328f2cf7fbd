"""What the tracer makes of entries of the journal: steps, chunks, windows, events, and what is bounded."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.runtime.loop.interface import InFlightReport, Paused, Resumed, StepShape, WeightsBroken
from penstock.runtime.loop.journal import Changed, Noted, Preempted
from penstock.runtime.requests.request import RequestTiming
from penstock.runtime.scheduling.plan import Speculated
from penstock.service.telemetry.options import TraceLevel
from penstock.service.telemetry.tracing import tracer as tracer_module
from penstock.service.telemetry.tracing.notes import Happened, Opened
from penstock.service.telemetry.tracing.request_spans import (
    MOST_CHILDREN,
    MOST_EVENTS,
    MOST_REQUEST_LINKS,
    MOST_STEPS_OF_WINDOW,
)
from tests.service.telemetry.tracing.traced import (
    MS,
    OFFSET_NS,
    Traced,
    applied,
    closed,
    decode,
    linked,
    prefill,
)

TIMING = RequestTiming(
    received_ns=0,
    arrived_ns=2 * MS,
    scheduled_ns=9 * MS,
    first_token_ns=30 * MS,
    finished_ns=60 * MS,
    preemptions=0,
    cached_prompt_tokens=1,
)
"""Of an output that `run` lets run."""


def run(traced, name="r"):
    """One output: two chunks of its prompt, then three tokens one by one."""
    traced.step(prefill(name, 1, 4), begin_ns=10 * MS, end_ns=20 * MS)
    traced.step(prefill(name, 5, 2, samples=True), begin_ns=12 * MS, end_ns=30 * MS)
    for end_ns in (40 * MS, 50 * MS, 60 * MS):
        traced.step(decode(name), begin_ns=end_ns - 15 * MS, end_ns=end_ns)


# -- steps --


def test_a_step_has_a_trace_of_its_own():
    traced = Traced()
    context = traced.open()
    traced.step(prefill("r", 0, 4), decode("stranger"), begin_ns=10 * MS, end_ns=20 * MS)
    (step,) = traced.named("engine.step")
    assert (step.parent_id, step.kind, step.status) == ("", "INTERNAL", "UNSET")
    assert step.trace_id != context.trace_id.hex()
    assert step.attributes == {
        "penstock.step.id": 7,
        "penstock.step.kind": "mixed",
        "penstock.step.rows": 2,
        "penstock.step.tokens": 5,
        "penstock.step.decode_steps": 1,
        "penstock.step.generated_tokens": 1,
        "penstock.step.recorded_requests": 1,
        "penstock.step.bucket.tokens": 8,
        "penstock.step.bucket.rows": 4,
        "penstock.outputs.running": 3,
        "penstock.outputs.waiting": 2,
        "penstock.kv.pages_used": 7,
    }
    start_ns, end_ns = OFFSET_NS + 10 * MS - 3, OFFSET_NS + 20 * MS + 2
    assert (step.start_ns, step.end_ns) == (start_ns, end_ns)
    parts = [(part.name, part.start_ns, part.end_ns) for part in traced.recorder.children(step)]
    assert parts == [
        ("schedule", start_ns, start_ns + 1),
        ("pack", start_ns + 1, start_ns + 2),
        ("dispatch", start_ns + 2, start_ns + 3),
        ("wait", start_ns + 3, end_ns - 2),
        ("emit", end_ns - 2, end_ns),
    ]
    assert [(link.trace_id, link.span_id) for link in step.links] == [
        (context.trace_id.hex(), context.span_id.hex())
    ]


def test_a_step_without_a_recorded_request_records_nothing():
    traced = Traced()
    traced.open("r")
    traced.step(prefill("other", 0, 4), begin_ns=10 * MS, end_ns=20 * MS)
    assert not traced.spans


def test_a_runner_that_does_not_say_its_shape():
    traced = Traced()
    traced.open()
    traced.step(decode("r"), begin_ns=10, end_ns=20, shape=None)
    (step,) = traced.named("engine.step")
    assert not [name for name in step.attributes if "bucket" in name]


def test_a_step_for_which_something_was_compiled():
    traced = Traced()
    traced.open()
    traced.step(decode("r"), begin_ns=10, end_ns=20, shape=StepShape(8, 4, compiled=True))
    (step,) = traced.named("engine.step")
    assert step.attributes["penstock.step.compiled"] is True


def test_a_step_links_to_each_request_once_and_to_few():
    traced = Traced()
    traced.open("many", num_outputs=3)
    contexts = [traced.open(f"r{i}") for i in range(MOST_REQUEST_LINKS + 5)]
    rows = [decode("many"), decode("many\x001"), decode("many\x002")]
    rows += [decode(f"r{i}") for i in range(len(contexts))]
    traced.step(*rows, begin_ns=10, end_ns=20)
    (step,) = traced.named("engine.step")
    assert len({link.span_id for link in step.links}) == len(step.links) == MOST_REQUEST_LINKS
    assert step.attributes["penstock.step.recorded_requests"] == len(contexts) + 1


# -- chunks and windows --


def test_a_request_is_linked_to_its_steps_and_they_to_it():
    traced = Traced()
    context = traced.open(at_ns=2 * MS)
    run(traced)
    traced.end("r", TIMING, 4)
    traced.close(context)
    steps = traced.named("engine.step")
    chunks, (window,) = traced.children(context, "prefill"), traced.children(context, "decode")
    assert [linked(chunks, step) for step in steps] == [[chunks[0]], [chunks[1]], [], [], []]
    assert [(chunk.start_ns, chunk.end_ns) for chunk in chunks] == [
        (OFFSET_NS + 10 * MS, OFFSET_NS + 20 * MS),
        (OFFSET_NS + 20 * MS, OFFSET_NS + 30 * MS),
    ], "the device begins with a step when it is done with the one before"
    assert [chunk.attributes for chunk in chunks] == [
        {
            "penstock.output.index": 0,
            "penstock.chunk.start": 1,
            "penstock.chunk.tokens": 4,
            "penstock.step.id": 7,
        },
        {
            "penstock.output.index": 0,
            "penstock.chunk.start": 5,
            "penstock.chunk.tokens": 2,
            "penstock.step.id": 8,
        },
    ]
    assert window.name == "decode_window"
    assert (window.start_ns, window.end_ns) == (OFFSET_NS + 30 * MS, OFFSET_NS + 60 * MS)
    assert window.attributes == {
        "penstock.output.index": 0,
        "penstock.window.steps": 3,
        "penstock.window.tokens": 3,
        "penstock.window.mixed_steps": 0,
        "penstock.window.step_durations": [0.01, 0.01, 0.01],
    }
    assert [link.span_id for link in window.links] == [steps[2].span_id, steps[4].span_id]
    (request,) = traced.named("text_completion toy")
    assert all(linked([step], request) for step in steps)
    assert {span.trace_id for span in (*chunks, window)} == {request.trace_id}


def test_children_lie_within_their_phase():
    traced = Traced()
    context = traced.open(at_ns=2 * MS)
    run(traced)
    traced.end("r", TIMING, 4)
    traced.close(context)
    for name in ("prefill", "decode"):
        (phase,) = traced.named(name)
        for child in traced.children(context, name):
            assert phase.start_ns <= child.start_ns <= child.end_ns <= phase.end_ns


def test_a_window_ends_after_so_many_steps_and_goes_out_at_once():
    traced = Traced()
    traced.open()
    for i in range(1, MOST_STEPS_OF_WINDOW + 3):
        traced.step(decode("r", 4), begin_ns=i * MS, end_ns=(i + 1) * MS, made={"r": i % 5}, num_steps=4)
    (window,) = traced.named("decode_window")
    assert window.attributes["penstock.window.steps"] == MOST_STEPS_OF_WINDOW
    assert window.attributes["penstock.window.tokens"] == sum(i % 5 for i in range(1, 65))
    assert len(window.attributes["penstock.window.step_durations"]) == MOST_STEPS_OF_WINDOW


def test_a_window_ends_with_the_shape_of_its_steps_unless_it_is_short():
    traced = Traced()
    traced.open()
    shapes = [StepShape(8, 8)] * 10 + [StepShape(16, 16)] * 10 + [StepShape(8, 8)] * 3
    for i, shape in enumerate(shapes, 1):
        traced.step(decode("r"), begin_ns=i * MS, end_ns=(i + 1) * MS, shape=shape)
    (window,) = traced.named("decode_window")
    assert window.attributes["penstock.window.steps"] == 20


def test_steps_that_compute_prompts_too_are_told_in_the_window():
    traced = Traced()
    context = traced.open()
    traced.step(decode("r"), prefill("other", 0, 7), begin_ns=10, end_ns=20)
    traced.step(decode("r"), begin_ns=20, end_ns=30)
    traced.end("r", RequestTiming(arrived_ns=0, scheduled_ns=1, first_token_ns=2, finished_ns=30), 2)
    traced.close(context)
    (window,) = traced.named("decode_window")
    assert window.attributes["penstock.window.mixed_steps"] == 1


def test_a_row_that_was_put_off_is_in_the_window_without_a_token():
    traced = Traced()
    traced.open()
    traced.step(decode("r"), begin_ns=10, end_ns=20, made={"r": 0})
    traced.end("r", RequestTiming(arrived_ns=0, scheduled_ns=1, first_token_ns=2, finished_ns=30), 0)
    (window,) = traced.named("decode_window")
    assert (window.attributes["penstock.window.steps"], window.attributes["penstock.window.tokens"]) == (1, 0)


def test_a_step_and_a_request_tell_what_was_proposed():
    traced = Traced()
    context = traced.open()
    found = (Speculated("lookup", (2, 1), (1, 1)), Speculated("other", (3,), (0,)))
    rows = (decode("r"), decode("stranger"))
    traced.step(*rows, begin_ns=10, end_ns=20, made={"r": 3}, speculated=found)
    times = RequestTiming(arrived_ns=0, scheduled_ns=1, first_token_ns=2, finished_ns=30)
    traced.end("r", dataclasses.replace(times, proposed_tokens=4, accepted_tokens=3), 3)
    traced.close(context)
    (step,), (whole,) = traced.named("engine.step"), traced.named("text_completion toy")
    assert step.attributes["penstock.step.proposed_tokens"] == 6
    assert step.attributes["penstock.step.accepted_tokens"] == 2
    assert whole.attributes["penstock.usage.proposed_tokens"] == 4
    assert whole.attributes["penstock.usage.accepted_tokens"] == 3


def test_each_output_has_windows_of_its_own():
    traced = Traced()
    context = traced.open(num_outputs=2)
    traced.step(prefill("r", 0, 3, samples=True), prefill("r\x001", 2, 1), begin_ns=10 * MS, end_ns=20 * MS)
    traced.step(decode("r"), prefill("r\x001", 2, 1, samples=True), begin_ns=20 * MS, end_ns=30 * MS)
    traced.step(decode("r"), decode("r\x001"), begin_ns=30 * MS, end_ns=40 * MS)
    times = RequestTiming(arrived_ns=0, scheduled_ns=9 * MS, first_token_ns=20 * MS, finished_ns=40 * MS)
    traced.end("r", times, 3)
    traced.end("r\x001", times, 2)
    traced.close(context, num_queued=2)
    prefills, decodes = traced.children(context, "prefill"), traced.children(context, "decode")
    assert [(c.name, c.attributes["penstock.output.index"]) for c in prefills] == [
        ("prefill_chunk", 0),
        ("prefill_chunk", 1),
    ]
    assert sorted((c.name, c.attributes["penstock.output.index"]) for c in decodes) == [
        ("decode_window", 0),
        ("decode_window", 1),
        ("prefill_chunk", 1),
    ], "once the request has a token, it decodes"
    (request,) = traced.named("text_completion toy")
    assert request.attributes["gen_ai.usage.output_tokens"] == 5


# -- levels --


def test_requests_alone():
    traced = Traced(TraceLevel.REQUESTS)
    context = traced.open(at_ns=2 * MS)
    run(traced)
    traced.end("r", TIMING, 4)
    traced.close(context)
    assert {span.name for span in traced.spans} == {
        "text_completion toy", "tokenize", "submit", "queue", "prefill", "decode", "reply"
    }  # fmt: skip


def test_one_span_for_each_request_and_step():
    traced = Traced(TraceLevel.DETAILED)
    context = traced.open(at_ns=2 * MS)
    run(traced)
    traced.end("r", TIMING, 4)
    traced.close(context)
    steps, decodes = traced.named("engine.step"), traced.children(context, "decode")
    assert [span.name for span in decodes] == ["decode_step"] * 3
    assert [linked(decodes, step) for step in steps[2:]] == [[span] for span in decodes]
    assert decodes[0].attributes == {
        "penstock.output.index": 0,
        "penstock.step.id": 9,
        "penstock.step.generated_tokens": 1,
    }
    assert [span.name for span in traced.children(context, "prefill")] == ["prefill_chunk"] * 2
    assert not traced.named("decode_window")


def test_the_level_changes_while_a_request_runs():
    """What is complete so far goes out, and the next batch is recorded as the new level says."""
    traced = Traced(TraceLevel.STEPS)
    context = traced.open()
    levels = (TraceLevel.STEPS, TraceLevel.DETAILED, TraceLevel.REQUESTS, TraceLevel.OFF, TraceLevel.STEPS)
    for number, level in enumerate(levels, 1):
        traced.recorder.tracing.level = level
        for i in range(2):
            begin_ns = (10 * number + i) * MS
            traced.step(decode("r"), begin_ns=begin_ns, end_ns=begin_ns + MS)
    timing = RequestTiming(arrived_ns=1, scheduled_ns=2, first_token_ns=3, finished_ns=60 * MS)
    traced.end("r", timing, 10)
    traced.close(context)
    below = traced.children(context, "decode")
    assert sorted((span.name, (span.start_ns - OFFSET_NS) // MS) for span in below) == [
        ("decode_step", 20),
        ("decode_step", 21),
        ("decode_window", 10),
        ("decode_window", 50),
    ]
    assert len(traced.named("engine.step")) == 6
    assert len(traced.named("text_completion toy")) == 1


def test_a_request_that_was_begun_is_recorded_to_its_end_although_the_level_is_off():
    traced = Traced()
    context = traced.open()
    traced.recorder.tracing.level = TraceLevel.OFF
    traced.end("r", TIMING, 4)
    traced.close(context)
    assert len(traced.named("text_completion toy")) == 1


# -- events --


def events(traced):
    (request,) = traced.named("text_completion toy")
    return [(event.name, event.at_ns - OFFSET_NS, event.attributes) for event in request.events]


def test_a_preemption_is_an_event_and_what_is_computed_again_says_so():
    traced = Traced()
    context = traced.open(at_ns=2 * MS)
    traced.step(prefill("r", 0, 6, samples=True), begin_ns=10 * MS, end_ns=30 * MS)
    traced.step(decode("r"), begin_ns=30 * MS, end_ns=40 * MS)
    traced.read(Preempted(41 * MS, ("other", "r"), (9, 8)))
    traced.step(prefill("r", 0, 8, samples=True), begin_ns=50 * MS, end_ns=55 * MS)
    traced.step(decode("r"), begin_ns=55 * MS, end_ns=60 * MS)
    traced.end("r", TIMING, 4)
    traced.close(context)
    assert events(traced) == [
        ("preempted", 41 * MS, {"penstock.output.index": 0, "penstock.tokens.computed": 8})
    ]
    below = traced.children(context, "decode")
    assert [span.name for span in below] == ["decode_window", "prefill_chunk", "decode_window"]
    assert below[1].attributes["penstock.chunk.recomputed"] is True
    (first,) = traced.children(context, "prefill")
    assert "penstock.chunk.recomputed" not in first.attributes


def test_changes_are_events_of_the_requests_in_the_engine_and_end_windows():
    traced = Traced()
    context = traced.open(at_ns=2 * MS)
    traced.step(decode("r"), begin_ns=30 * MS, end_ns=40 * MS)
    traced.read(Changed(41 * MS, applied(5)), Changed(42 * MS, Paused(InFlightReport())))
    traced.read(Changed(43 * MS, Resumed()), Changed(44 * MS, WeightsBroken("a bad file")))
    traced.step(decode("r"), begin_ns=50 * MS, end_ns=60 * MS)
    traced.end("r", TIMING, 4, generation=5)
    traced.read(Changed(61 * MS, applied(6)))
    traced.close(context)
    assert events(traced) == [
        (
            "weights_updated",
            41 * MS,
            {
                "penstock.weights.generation": 5,
                "penstock.weights.label": "w5",
                "penstock.weights.pause": 0.003,
            },
        ),
        ("paused", 42 * MS, {}),
        ("resumed", 43 * MS, {}),
        ("weights_broken", 44 * MS, {"penstock.weights.problem": "a bad file"}),
    ]
    (request,) = traced.named("text_completion toy")
    assert request.attributes["penstock.weights.generation"] == 5
    assert len(traced.children(context, "decode")) == 2


def test_what_the_service_saw_is_an_event_too():
    traced = Traced()
    context = traced.open()
    traced.end("r", TIMING, 4)
    stall = Happened("stalled", 70 * MS, {"penstock.stall.duration": 2.5, "penstock.stall.gave_up": True})
    traced.close(context, happened=(stall,), error="StalledReader")
    assert events(traced) == [("stalled", 70 * MS, dict(stall.attributes))]
    (request,) = traced.named("text_completion toy")
    assert (request.status, request.status_message) == ("ERROR", "StalledReader")


# -- ends --


def phases(traced, context):
    (request,) = traced.named("text_completion toy")
    made = traced.recorder.children(request)
    assert sum(span.duration_ns for span in made) == request.duration_ns
    return [(span.name, span.duration_ns // MS) for span in made]


ENGINE = [("queue", 7), ("prefill", 21), ("decode", 30), ("reply", 40)]


@pytest.mark.parametrize("closed_first", [True, False])
def test_it_does_not_matter_who_ends_first(closed_first):
    traced = Traced()
    context = traced.open(at_ns=2 * MS)
    run(traced)
    if closed_first:
        traced.close(context)
        assert not traced.named("text_completion toy"), "the engine is not done with it"
    traced.end("r", TIMING, 4)
    if not closed_first:
        traced.close(context)
    assert phases(traced, context) == [("tokenize", 1), ("submit", 1), *ENGINE]
    (request,) = traced.named("text_completion toy")
    assert request.parent_id == context.parent_id.hex()
    assert request.attributes == {
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "penstock.preemptions": 0,
        "penstock.weights.generation": 1,
    }
    assert traced.tracer.num_followed == 0


def test_a_cancelled_request_has_no_reply_and_ends_with_its_caller():
    """The engine drops it a moment later."""
    traced = Traced()
    context = traced.open(at_ns=2 * MS)
    run(traced)
    traced.close(context, end_ns=50 * MS, attributes={"error.type": "CANCELLED"})
    traced.cancel("r", TIMING, 4)
    assert phases(traced, context) == [
        ("tokenize", 1), ("submit", 1), ("queue", 7), ("prefill", 21), ("decode", 20)
    ]  # fmt: skip
    (request,) = traced.named("text_completion toy")
    assert request.attributes["error.type"] == "CANCELLED"
    assert request.attributes["gen_ai.usage.output_tokens"] == 4
    assert request.status == "UNSET"


def test_a_request_that_the_engine_never_had():
    traced = Traced()
    context = traced.context()
    traced.read(Noted(0, Opened(context)))
    traced.close(context, error="QueueFull", num_queued=0, attributes={"error.type": "QueueFull"})
    assert phases(traced, context) == [("tokenize", 1), ("submit", 99)]


def test_a_row_of_a_plan_that_is_older_than_the_output_is_not_its_own():
    """An id is used again while a step of its former output is in flight."""
    traced = Traced()
    traced.open("r", at_ns=10 * MS)
    traced.step(decode("r"), begin_ns=9 * MS, end_ns=20 * MS)
    assert not traced.spans


# -- bounds --


def test_spans_below_a_request_are_bounded_and_what_is_left_out_is_counted():
    traced = Traced(TraceLevel.DETAILED)
    context = traced.open()
    for i in range(1, MOST_CHILDREN + 11):
        traced.step(decode("r"), begin_ns=i * MS, end_ns=(i + 1) * MS)
    traced.end("r", TIMING, MOST_CHILDREN + 10)
    traced.close(context)
    assert len(traced.named("decode_step")) == MOST_CHILDREN
    (request,) = traced.named("text_completion toy")
    assert request.attributes["penstock.spans.left_out"] == 10
    assert len(traced.named("engine.step")) == MOST_CHILDREN + 10


def test_events_of_a_request_are_bounded_and_what_is_left_out_is_counted():
    traced = Traced()
    context = traced.open()
    for i in range(MOST_EVENTS + 3):
        traced.read(Changed(i, Resumed()))
    traced.end("r", TIMING, 1)
    traced.close(context)
    (request,) = traced.named("text_completion toy")
    assert len(request.events) == MOST_EVENTS
    assert request.attributes["penstock.events.left_out"] == 3


def test_outputs_that_never_end_are_followed_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(tracer_module, "MOST_FOLLOWED", 10)
    traced = Traced()
    oldest = traced.open("oldest", num_outputs=3)
    contexts = [traced.open(f"r{i}") for i in range(12)]
    assert traced.tracer.num_followed == 10
    traced.step(decode("oldest"), begin_ns=10, end_ns=20)
    assert not traced.spans, "it is followed no more"
    traced.step(decode("r11"), begin_ns=20, end_ns=30)
    assert len(linked(traced.named("engine.step"), _span_of(contexts[-1], traced))) == 1
    service = RequestTiming(
        arrived_ns=2 * MS, scheduled_ns=9 * MS, first_token_ns=30 * MS, finished_ns=60 * MS
    )
    traced.close(oldest, timing=service, num_queued=3, num_tokens=21)
    (request,) = traced.named("text_completion toy")
    assert phases(traced, oldest) == [("tokenize", 1), ("submit", 1), *ENGINE], "from the service's times"
    assert request.attributes["gen_ai.usage.output_tokens"] == 21


def _span_of(context, traced):
    traced.close(context, num_queued=0, attributes={"x": 1})
    found = [span for span in traced.named("text_completion toy") if span.span_id == context.span_id.hex()]
    traced.recorder.clear()
    return found[0]


def test_notes_of_requests_that_never_came_to_the_engine_are_kept_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(tracer_module, "MOST_FOLLOWED", 10)
    traced = Traced()
    for _ in range(30):
        traced.read(Noted(0, Opened(traced.context())))
    assert len(traced.tracer._requests) == 10


def test_memory_of_a_request_does_not_grow_with_its_steps():
    traced = Traced()
    context = traced.open()
    for i in range(1, 1000):
        traced.step(decode("r"), begin_ns=i * MS, end_ns=(i + 1) * MS)
    (output,) = traced.tracer._requests[context.span_id].outputs.values()
    assert len(output.window) < MOST_STEPS_OF_WINDOW
    assert not traced.tracer._made


def test_an_end_that_the_journal_dropped_does_not_keep_a_request_for_ever():
    traced = Traced()
    context = traced.open()
    traced.close(context, end_ns=100 * MS)
    traced.now_ns = 100 * MS + int(tracer_module.LONGEST_WAIT_S * 1e9) - 1
    traced.read()
    assert not traced.named("text_completion toy")
    traced.now_ns += 1
    traced.read()
    assert len(traced.named("text_completion toy")) == 1
    assert traced.tracer.num_followed == 0
    traced.end("r", TIMING, 4)
    assert len(traced.named("text_completion toy")) == 1


def test_an_id_is_used_again_although_the_journal_dropped_the_end_of_the_first():
    traced = Traced()
    first = traced.open("r")
    second = traced.open("r", at_ns=70 * MS)
    traced.end("r", TIMING, 3)
    traced.close(second)
    traced.close(first)
    traced.now_ns = 20 * 10**9
    traced.read()
    assert {span.span_id for span in traced.named("text_completion toy")} == {
        first.span_id.hex(),
        second.span_id.hex(),
    }
    assert traced.tracer.num_followed == 0


def test_what_has_ended_for_its_caller_is_recorded_when_the_server_stops():
    traced = Traced()
    traced.close(traced.open("ended"), end_ns=100 * MS)
    traced.open("running")
    traced.now_ns = 100 * MS
    traced.tracer.close()
    assert len(traced.named("text_completion toy")) == 1


def test_a_request_that_the_tracer_was_not_told_of_is_recorded_by_what_the_service_knows():
    """The journal has dropped its note."""
    traced = Traced()
    traced.read(Noted(0, closed(traced.context(), timing=TIMING, num_tokens=3)))
    (request,) = traced.named("text_completion toy")
    assert request.attributes["gen_ai.usage.output_tokens"] == 3
    assert [name for name, _ in phases(traced, None)] == [
        "tokenize", "submit", "queue", "prefill", "decode", "reply"
    ]  # fmt: skip


def test_a_note_of_somebody_else_is_passed_over():
    traced = Traced()
    traced.read(Noted(0, "something else"))
    assert not traced.spans
