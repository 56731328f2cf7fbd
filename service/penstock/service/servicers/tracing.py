"""Serves SetTracing: changes how much is traced, and tells what became of the spans."""

from __future__ import annotations

import logging

from penstock.service.requests.convert_params import Violations
from penstock.service.requests.support import check_supported
from penstock.service.telemetry.options import TraceLevel
from penstock.service.telemetry.otlp.tracing import Tracing
from penstock.v1 import telemetry_pb2

log = logging.getLogger(__name__)

_LEVELS = {
    telemetry_pb2.TRACE_LEVEL_OFF: TraceLevel.OFF,
    telemetry_pb2.TRACE_LEVEL_REQUESTS: TraceLevel.REQUESTS,
    telemetry_pb2.TRACE_LEVEL_STEPS: TraceLevel.STEPS,
    telemetry_pb2.TRACE_LEVEL_DETAILED: TraceLevel.DETAILED,
}
_NUMBERS = {level: number for number, level in _LEVELS.items()}
_LACKING = {"level": (telemetry_pb2.TRACE_LEVEL_OFF,)}
_WHY = {"level": "the server was started without --otlp-endpoint, so spans have nowhere to go"}


def set_tracing(
    request: telemetry_pb2.SetTracingRequest, tracing: Tracing | None
) -> telemetry_pb2.SetTracingResponse:
    """Change the level, if the request has one. Without `tracing` the level is OFF and stays so. Raises
    InvalidRequest and UnsupportedFeature.
    """
    bad = Violations()
    if request.level and request.level not in _LEVELS:
        bad.add("level", f"{request.level} is no value of TraceLevel")
    bad.raise_if_any()
    if tracing is None:
        check_supported(request, _LACKING, _WHY)
        off = telemetry_pb2.TRACE_LEVEL_OFF
        return telemetry_pb2.SetTracingResponse(previous=off, current=off)
    check_supported(request)
    previous = tracing.level
    if request.level:
        tracing.level = _LEVELS[request.level]
    if tracing.level is not previous:
        log.info("traces: level %s from now on, %s until now", tracing.level.name, previous.name)
    return telemetry_pb2.SetTracingResponse(
        previous=_NUMBERS[previous],
        current=_NUMBERS[tracing.level],
        spans_exported=tracing.exported,
        spans_dropped=tracing.dropped,
        spans_failed=tracing.failed,
    )
