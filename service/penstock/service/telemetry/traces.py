"""Traces: one SERVER span for each RPC, and below it one span for each request, with its phases. Uses
OpenTelemetry without a global provider.

Spans are built on the event loop. The phases are added after the request ended, from the engine's monotonic
times, so the engine's thread does nothing for them. No span is ever made current, because a stream's
generator may be closed in another context. Parents are passed explicitly instead, from the interceptor to the
servicer, through `CURRENT_RPC`, which belongs to the RPC's own task. Spans never hold text of a prompt or an
output, nor stop strings, which may quote a prompt, nor cache salts, which keep tenants apart only while
others do not know them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import grpc
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from penstock.runtime.generation.jobs import Job
from penstock.runtime.generation.prompts import ChatPrompt
from penstock.runtime.requests.request import Finish, RequestTiming
from penstock.service.limits.admission import PACKAGE
from penstock.service.telemetry.options import TraceLevel
from penstock.service.telemetry.otlp.tracing import Tracing

CURRENT_RPC: ContextVar[Span] = ContextVar("penstock_rpc_span", default=trace.INVALID_SPAN)
PROVIDER = "penstock"
_SERVER_FAULTS = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
"""Codes that mark a server's span as an error, by OpenTelemetry's semantic conventions. The others are the
caller's fault.
"""
_POLLS = frozenset({"penstock.v1.ControlService/GetLoad"})
"""RPCs that routers call again and again. They are recorded only as a part of a trace that is recorded
anyway.
"""
_PROPAGATOR = TraceContextTextMapPropagator()


class Telemetry:
    """Makes the service's spans. Without `tracing` nothing is recorded."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        self._tracing = tracing
        provider = trace.NoOpTracerProvider() if tracing is None else tracing.provider
        self._tracer = provider.get_tracer("penstock.service")

    def rpc(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> RpcTrace:
        """Start the span of one RPC; `method` is "penstock.v1.Service/Method". The caller's traceparent
        becomes its parent. Services other than ours, such as health, are not recorded.
        """
        is_on = self._tracing is not None and self._tracing.level is not TraceLevel.OFF
        if not is_on or not method.startswith(PACKAGE):
            return UNTRACED
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        parent = _PROPAGATOR.extract(carrier, context=trace.set_span_in_context(trace.INVALID_SPAN))
        if method in _POLLS and not trace.get_current_span(parent).get_span_context().trace_flags.sampled:
            return UNTRACED
        span = self._tracer.start_span(
            method,
            context=parent,
            kind=SpanKind.SERVER,
            attributes={"rpc.system.name": "grpc", "rpc.method": method},
        )
        return RpcTrace(span)

    def request(self, job: Job, model: str) -> RequestTrace:
        """Start the span of one request, below the RPC of this task."""
        operation = "chat" if isinstance(job.prompt, ChatPrompt) else "text_completion"
        parent = CURRENT_RPC.get()
        if not parent.is_recording():
            return RequestTrace(self._tracer, trace.INVALID_SPAN)
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=trace.set_span_in_context(parent),
            attributes=_request_attributes(job, operation, model),
        )
        return RequestTrace(self._tracer, span)


@dataclass(frozen=True, slots=True)
class RpcTrace:
    """The span of one RPC."""

    span: Span

    def end(self, code: grpc.StatusCode, description: str = "") -> None:
        """Record how the RPC ended. A cancellation is recorded, too; it is neither OK nor the
        server's error.
        """
        self.span.set_attribute("rpc.response.status_code", code.name)
        if code is not grpc.StatusCode.OK:
            self.span.set_attribute("error.type", code.name)
        if code.name in _SERVER_FAULTS:
            self.span.set_status(Status(StatusCode.ERROR, description))
        self.span.end()


UNTRACED = RpcTrace(trace.INVALID_SPAN)
"""Stands for an RPC that is not recorded."""


class RequestTrace:
    """The span of one request, and the phases below it."""

    def __init__(self, tracer: trace.Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._wall_offset_ns = time.time_ns() - time.monotonic_ns()
        """Taken once, so that all phases move together if the wall clock is set meanwhile."""

    def phase(
        self, name: str, start_ns: int, end_ns: int, attributes: Mapping[str, AttributeValue] | None = None
    ) -> None:
        """Record a child span between two monotonic times."""
        if not self._span.is_recording():
            return
        child = self._tracer.start_span(
            name,
            context=trace.set_span_in_context(self._span),
            start_time=start_ns + self._wall_offset_ns,
            attributes=attributes,
        )
        child.end(end_ns + self._wall_offset_ns)

    def started(self, num_prompt_tokens: int) -> None:
        self._span.set_attribute("gen_ai.usage.input_tokens", num_prompt_tokens)

    def finished(
        self, finishes: Sequence[Finish], timing: RequestTiming | None, num_completion_tokens: int
    ) -> None:
        """Record usage, reasons and phases, because all outputs have ended."""
        if not self._span.is_recording():
            return
        self._span.set_attribute("gen_ai.usage.output_tokens", num_completion_tokens)
        self._span.set_attribute("gen_ai.response.finish_reasons", tuple(f.reason.value for f in finishes))
        if timing is None:
            return
        self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", timing.cached_prompt_tokens)
        self._span.set_attribute("penstock.preemptions", timing.preemptions)
        for name, start_ns, end_ns in phases(timing):
            self.phase(name, start_ns, end_ns)

    def end(self, error: BaseException | None = None, *, cancelled: bool = False) -> None:
        """End the span. A cancellation is marked, and is no error."""
        if cancelled:
            self._span.set_attribute("error.type", "CANCELLED")
        elif error is not None:
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        self._span.end()


def phases(timing: RequestTiming) -> Sequence[tuple[str, int, int]]:
    """The name, start and end of each phase that a request went through. The last phase ends with the
    request.
    """
    marks = [
        ("queue", timing.arrived_ns, timing.scheduled_ns),
        ("prefill", timing.scheduled_ns, timing.first_token_ns),
        ("decode", timing.first_token_ns, timing.finished_ns),
    ]
    return [(name, start, end or timing.finished_ns) for name, start, end in marks if start]


def _request_attributes(job: Job, operation: str, model: str) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": job.request_id,
        "gen_ai.request.temperature": job.sampling.temperature,
        "gen_ai.request.top_p": job.sampling.top_p,
        "gen_ai.request.top_k": job.sampling.top_k,
        "penstock.request.min_p": job.sampling.min_p,
        "penstock.request.stop_strings": len(job.stopping.stop),
    }
    if job.priority:
        attributes["penstock.request.priority"] = job.priority
    if job.stopping.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = job.stopping.max_tokens
    if job.sampling.seed is not None and job.sampling.seed < 2**63:  # OTLP's integers are signed
        attributes["gen_ai.request.seed"] = job.sampling.seed
    return attributes
