"""Spans as we write them, against OpenTelemetry's own encoder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags, TraceState

from penstock.service.telemetry.otlp import wire

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
INT64 = st.integers(-(2**63), 2**63 - 1)
SIMPLE = st.one_of(TEXT, st.booleans(), INT64, st.floats(allow_nan=False))
VALUES = st.one_of(SIMPLE, st.lists(INT64, max_size=5), st.lists(TEXT, max_size=5))
ATTRIBUTES = st.dictionaries(TEXT.filter(bool), VALUES, max_size=6)
TRACE_IDS, SPAN_IDS = st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1)
TIMES = st.integers(0, 2**63)
EVENTS = st.lists(st.tuples(TEXT.filter(bool), TIMES, ATTRIBUTES), max_size=3)
STATES = st.sampled_from([{}, {"vendor": "one"}, {"ot": "th:8", "b": "2"}])


def context(trace_id, span_id, state=None):
    return SpanContext(trace_id, span_id, False, TraceFlags(1), TraceState(list((state or {}).items())))


def trace_bytes(trace_id):
    return trace_id.to_bytes(16, "big")


def span_bytes(span_id):
    return span_id.to_bytes(8, "big")


@given(
    trace_id=TRACE_IDS,
    span_id=SPAN_IDS,
    parent=st.none() | SPAN_IDS,
    name=TEXT,
    times=st.tuples(TIMES, TIMES),
    attributes=ATTRIBUTES,
    events=EVENTS,
    links=st.lists(st.tuples(TRACE_IDS, SPAN_IDS), max_size=3),
    state=STATES,
    error=st.none() | TEXT,
)
def test_spans_are_those_of_opentelemetrys_encoder(
    trace_id, span_id, parent, name, times, attributes, events, links, state, error
):
    theirs = ReadableSpan(
        name,
        context(trace_id, span_id, state),
        None if parent is None else context(trace_id, parent, state),
        Resource({}),
        attributes,
        [Event(what, values, at_ns) for what, at_ns, values in events],
        [Link(context(*link)) for link in links],
        status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, error),
        start_time=times[0],
        end_time=times[1],
    )
    expected = encode_spans([theirs]).resource_spans[0].scope_spans[0].spans[0]
    head = wire.head(trace_bytes(trace_id), ",".join(f"{key}={value}" for key, value in state.items()))
    rest = [
        wire.attributes(attributes),
        *(wire.event(what, at_ns, values) for what, at_ns, values in events),
        *(wire.link(trace_bytes(link[0]), span_bytes(link[1])) for link in links),
        b"" if error is None else wire.error(error),
    ]
    named, body, (start_ns, end_ns) = wire.named(name), b"".join(rest), times
    made = (
        wire.root(head, span_bytes(span_id), named, start_ns, end_ns, body)
        if parent is None
        else wire.span(head, span_bytes(span_id), span_bytes(parent), named, start_ns, end_ns, body)
    )
    (ours,) = ScopeSpans.FromString(made).spans
    if error is None:
        assert expected.status.code == ours.status.code == 0
        expected.ClearField("status")  # theirs writes that there is none
    assert ours == expected


@given(st.lists(st.floats(allow_nan=False), max_size=70))
def test_arrays_are_made_of_elements_that_were_written_before(values):
    made = wire.array_attribute("a", b"".join([wire.element(value) for value in values]))
    assert made == wire.attribute("a", values)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_an_integer_beyond_64_bits_is_refused(value):
    with pytest.raises(ValueError, match="64 bits"):
        wire.attribute("a", value)


def test_cached_attributes_of_equal_values_keep_their_types():
    made = [wire.cached_attribute("a", value) for value in (1, True, 1.0)]
    assert made == [wire.attribute("a", value) for value in (1, True, 1.0)]
    assert len(set(made)) == 3
