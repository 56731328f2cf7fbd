"""What the service records of RPCs and requests, on the event loop.

The SERVER span of an RPC is made by OpenTelemetry's SDK, which samples it. A request below it only notes what
happens to it. When it has ended, a note in the engine's journal has its span and those of its phases made on
the journal's thread, from the engine's times, too.

No span is ever made current, because a stream's generator may be closed in another context. Parents are
passed explicitly instead, from the interceptor to the servicer, through `CURRENT_RPC`, which belongs to the
RPC's own task. Spans never hold text of a prompt or an output, nor stop strings, which may quote a prompt,
nor cache salts, which keep tenants apart only while others do not know them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from random import Random
from typing import TYPE_CHECKING

import grpc
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.runtime.loop.journal import Journal, Noted
from penstock.runtime.prompting.jobs import Job
from penstock.runtime.requests.request import Finish, RequestTiming
from penstock.service.limits.admission import PACKAGES
from penstock.service.telemetry.otlp.wire import SCOPE, Attributes, AttributeValue
from penstock.service.telemetry.tracing.notes import (
    Begun,
    Closed,
    Happened,
    Opened,
    RequestContext,
    WallClock,
)

if TYPE_CHECKING:
    from penstock.service.telemetry.otlp.tracing import Tracing

CURRENT_RPC: ContextVar[Span] = ContextVar("penstock_rpc_span", default=trace.INVALID_SPAN)
RECEIVED_NS: ContextVar[int] = ContextVar("penstock_received_ns", default=0)
"""When the message of this task's RPC had come, in monotonic ns; 0 before that."""
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
_MOST_STALLS = 64
MOST_TRACE_STATE = 512
"""A `tracestate` with more characters is not passed on, because every span of a request repeats it. W3C asks
for so many at least.
"""
_PROPAGATOR = TraceContextTextMapPropagator()


class Telemetry:
    """Makes the service's spans. Without `tracing` nothing is recorded."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        self._tracing = tracing
        self._tracer = None if tracing is None else tracing.provider.get_tracer(SCOPE)
        self._new_id = Random().randbytes
        self.wall_clock = WallClock()

    def rpc(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> RpcTrace:
        """Start the span of one RPC; `method` is "penstock.v1.Service/Method". The caller's traceparent
        becomes its parent. Services other than ours, such as health, are not recorded.
        """
        tracing, tracer = self._tracing, self._tracer
        if tracing is None or tracer is None or not tracing.level or not method.startswith(PACKAGES):
            return UNTRACED
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        if len(carrier.get("tracestate", "")) > MOST_TRACE_STATE:
            del carrier["tracestate"]
        parent = _PROPAGATOR.extract(carrier, context=trace.set_span_in_context(trace.INVALID_SPAN))
        if method in _POLLS and not trace.get_current_span(parent).get_span_context().trace_flags.sampled:
            return UNTRACED
        offset_ns = self.wall_clock.looked_at()
        span = tracer.start_span(
            method,
            context=parent,
            kind=SpanKind.SERVER,
            attributes={"rpc.system.name": "grpc", "rpc.method": method},
            start_time=time.monotonic_ns() + offset_ns,
        )
        return RpcTrace(span, offset_ns)

    def request(self, job: Job, model: str, journal: Journal) -> RequestTrace:
        """Start the trace of one request, below the RPC of this task."""
        parent = CURRENT_RPC.get().get_span_context()
        if not parent.trace_flags.sampled:
            return RequestTrace(job, model, journal, None)
        context = RequestContext(
            trace_id=parent.trace_id.to_bytes(16, "big"),
            span_id=self._new_id(8),
            parent_id=parent.span_id.to_bytes(8, "big"),
            trace_state=parent.trace_state.to_header(),
            wall_offset_ns=self.wall_clock.offset_ns,
        )
        return RequestTrace(job, model, journal, context)


class RpcTrace:
    """The span of one RPC."""

    __slots__ = ("_wall_offset_ns", "span")

    def __init__(self, span: Span, wall_offset_ns: int = 0) -> None:
        self.span = span
        self._wall_offset_ns = wall_offset_ns

    def end(self, code: grpc.StatusCode, description: str = "") -> None:
        """Record how the RPC ended. A cancellation is recorded, too; it is neither OK nor the
        server's error.
        """
        self.span.set_attribute("rpc.response.status_code", code.name)
        if code is not grpc.StatusCode.OK:
            self.span.set_attribute("error.type", code.name)
        if code.name in _SERVER_FAULTS:
            self.span.set_status(Status(StatusCode.ERROR, description))
        self.span.end(time.monotonic_ns() + self._wall_offset_ns)


UNTRACED = RpcTrace(trace.INVALID_SPAN)
"""Stands for an RPC that is not recorded."""


class RequestTrace:
    """What happens to one request, for its span. It records nothing if the RPC is not sampled."""

    def __init__(self, job: Job, model: str, journal: Journal, context: RequestContext | None) -> None:
        """`context` is None if nothing is recorded."""
        self.operation = job.operation
        """The name that the request has by OpenTelemetry's conventions."""
        self._context = context
        if context is None:
            return
        self._journal = journal
        self._name = f"{self.operation} {model}"
        self._start_ns = time.monotonic_ns()
        self._attributes = _request_attributes(job, self.operation, model)
        self._begun = [Begun("tokenize", self._start_ns)]
        self._happened: list[Happened] = []
        self._timing: RequestTiming | None = None
        self._num_queued = 0

    @property
    def ids(self) -> tuple[str, str]:
        """The ids of its trace and of its span, in hexadecimal digits; empty if it is not recorded."""
        return (
            ("", "") if self._context is None else (self._context.trace_id.hex(), self._context.span_id.hex())
        )

    def tokenized(self, num_tokens: int) -> None:
        """Note that the prompt has this many tokens, before it is cut."""
        if self._context is not None:
            begun = self._begun[-1]
            self._begun[-1] = begun._replace(attributes={"gen_ai.usage.input_tokens": num_tokens})

    def enters(self, phase: str) -> None:
        """Begin another phase now, and end the one before."""
        if self._context is not None:
            self._begun.append(Begun(phase, time.monotonic_ns()))

    def submits(self, num_prompt_tokens: int) -> None:
        """Note that what follows is up to the engine, whose journal is told to look for it."""
        if self._context is not None:
            self._attributes["gen_ai.usage.input_tokens"] = num_prompt_tokens
            self._journal.write(Noted(time.monotonic_ns(), Opened(self._context)))

    def queued(self) -> None:
        """Note that the engine has taken one output."""
        if self._context is not None:
            self._num_queued += 1

    def stalled(self, since_ns: int, seconds: float, gave_up: bool) -> None:
        """Note that nobody took what waited, from this monotonic time on, for that long."""
        if self._context is not None and len(self._happened) < _MOST_STALLS:
            told: Attributes = {"penstock.stall.duration": seconds, "penstock.stall.gave_up": gave_up}
            self._happened.append(Happened("stalled", since_ns, told))

    def finished(self, finishes: Sequence[Finish], timing: RequestTiming | None) -> None:
        """Note that all outputs have ended, and were read."""
        if self._context is not None:
            reasons = [finish.reason.value for finish in finishes]
            self._attributes["gen_ai.response.finish_reasons"] = reasons
            self._timing = timing

    def end(self, num_tokens: int, error: BaseException | None = None, *, cancelled: bool = False) -> None:
        """Note that the request has ended for its caller, who has got `num_tokens` generated tokens. A
        cancellation is marked, and is no error. Must be called once.
        """
        context = self._context
        if context is None:
            return
        name = "" if error is None or cancelled else type(error).__name__
        if name or cancelled:
            self._attributes["error.type"] = name or "CANCELLED"
        end_ns = time.monotonic_ns()
        closed = Closed(
            context=context,
            name=self._name,
            start_ns=self._start_ns,
            end_ns=end_ns,
            begun=tuple(self._begun),
            attributes=self._attributes,
            happened=tuple(self._happened),
            error=name,
            num_queued=self._num_queued,
            timing=self._timing,
            num_tokens=num_tokens,
        )
        self._journal.write(Noted(end_ns, closed))


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
    if job.n > 1:
        attributes["gen_ai.request.choice.count"] = job.n
    if job.adapter is not None:
        attributes["penstock.request.adapter"] = job.adapter
    if job.priority:
        attributes["penstock.request.priority"] = job.priority
    if job.stopping.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = job.stopping.max_tokens
    if job.sampling.seed is not None and job.sampling.seed < 2**63:  # OTLP's integers are signed
        attributes["gen_ai.request.seed"] = job.sampling.seed
    return attributes
