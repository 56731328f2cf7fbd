"""SetTracing: the level, what became of the spans, and a server that has nowhere to send them to."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from penstock.service.telemetry.options import TraceLevel
from penstock.v1 import control_pb2, telemetry_pb2
from tests.service.rig import failure_of, generate, serving
from tests.support.otlp import WAIT_S, Fine, OtlpReceiver, Partial, Recorder, tracing_to

LEVELS = [
    (telemetry_pb2.TRACE_LEVEL_OFF, TraceLevel.OFF),
    (telemetry_pb2.TRACE_LEVEL_REQUESTS, TraceLevel.REQUESTS),
    (telemetry_pb2.TRACE_LEVEL_STEPS, TraceLevel.STEPS),
    (telemetry_pb2.TRACE_LEVEL_DETAILED, TraceLevel.DETAILED),
]


def asked(level: Any = 0) -> telemetry_pb2.SetTracingRequest:
    return telemetry_pb2.SetTracingRequest(level=level)


async def test_a_level_is_set_and_told(caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    recorder = Recorder(TraceLevel.REQUESTS)
    async with serving(tracing=recorder.tracing) as rig:
        told = await rig.control.SetTracing(asked())
        assert (told.previous, told.current) == (telemetry_pb2.TRACE_LEVEL_REQUESTS,) * 2
        assert "from now on" not in caplog.text
        before = told.current
        for number, level in LEVELS:
            told = await rig.control.SetTracing(asked(number))
            assert (told.previous, told.current) == (before, number)
            assert recorder.tracing.level is level
            before = number
        assert "traces: level DETAILED from now on, STEPS until now" in caplog.text
        told = await rig.control.SetTracing(asked())
        assert (told.previous, told.current) == (before, before)
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert control_pb2.FEATURE_TRACING in info.features


async def test_the_level_counts_from_the_next_call_on() -> None:
    recorder = Recorder(TraceLevel.REQUESTS)
    async with serving(tracing=recorder.tracing) as rig:
        await rig.inference.Generate(generate("y", request_id="first"))
        await rig.control.SetTracing(asked(telemetry_pb2.TRACE_LEVEL_OFF))
        await rig.inference.Generate(generate("y", request_id="second"))
        await rig.control.SetTracing(asked(telemetry_pb2.TRACE_LEVEL_REQUESTS))
        await rig.inference.Generate(generate("y", request_id="third"))
    ids = {(span.attributes or {}).get("gen_ai.response.id") for span in recorder.finished}
    assert ids - {None} == {"first", "third"}


async def test_what_became_of_the_spans_is_told() -> None:
    with OtlpReceiver() as receiver:
        tracing = tracing_to(receiver, max_waiting_spans=3)
        receiver.always = Partial(2)
        tracer = tracing.provider.get_tracer("test")
        async with serving(tracing=tracing) as rig:
            for _ in range(3):
                tracer.start_span("a").end()
            assert tracing.flush(WAIT_S)
            receiver.always = Fine()
            told = await rig.control.SetTracing(asked(telemetry_pb2.TRACE_LEVEL_OFF))
            assert (told.spans_exported, told.spans_dropped, told.spans_failed) == (1, 0, 2)
            assert tracing.flush(WAIT_S), "the span of SetTracing itself is on its way, too"
            tracing.shutdown(WAIT_S)
            tracer.start_span("late").end()
            told = await rig.control.SetTracing(asked())
            assert (told.spans_dropped, told.spans_failed) == (1, 2)


async def test_a_server_without_a_collector() -> None:
    off = telemetry_pb2.TRACE_LEVEL_OFF
    async with serving() as rig:
        for level in (0, off):
            told = await rig.control.SetTracing(asked(level))
            assert told == telemetry_pb2.SetTracingResponse(previous=off, current=off)
        failure = await failure_of(rig.control.SetTracing(asked(telemetry_pb2.TRACE_LEVEL_STEPS)))
        assert (failure.code.name, failure.reason) == ("UNIMPLEMENTED", "UNSUPPORTED_FEATURE")
        assert failure.info.metadata["field"] == "level"
        assert "--otlp-endpoint" in failure.message
        info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert control_pb2.FEATURE_TRACING not in info.features


@pytest.mark.parametrize("has_collector", [False, True])
async def test_a_level_that_there_is_not(has_collector: bool) -> None:
    recorder = Recorder()
    async with serving(tracing=recorder.tracing if has_collector else None) as rig:
        failure = await failure_of(rig.control.SetTracing(asked(9)))
    assert failure.violations == {"level": "9 is no value of TraceLevel"}
    assert recorder.tracing.level is TraceLevel.STEPS
    recorder.tracing.shutdown(0.0)
