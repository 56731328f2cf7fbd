"""A tracer whose journal is written by hand, or by an engine with a real scheduler."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.runtime.loop.interface import Applied, InFlightReport, StepRecord, StepShape, WeightsVersion
from penstock.runtime.loop.journal import Cancelled, Ended, Entry, Journal, Noted, Queued
from penstock.runtime.requests.request import (
    Finish,
    FinishReason,
    Request,
    RequestTiming,
    StepOutput,
)
from penstock.runtime.scheduling.load import Load
from penstock.runtime.scheduling.plan import Plan, PlanRow, Speculated
from penstock.service.telemetry.options import TraceLevel
from penstock.service.telemetry.tracing.notes import Begun, Closed, Opened, RequestContext, WallClock
from penstock.service.telemetry.tracing.tracer import Tracer
from tests.support.otlp import ReceivedSpan, Recorder

OFFSET_NS = 1_700_000_000_000_000_000
"""How far Unix time is ahead of the monotonic clock."""
MS = 1_000_000
SHAPE = StepShape(tokens=8, rows=4)
_LOAD = Load(
    num_running=3, num_waiting=2, waiting_prompt_tokens=5, pages_used=7, pages_cached=1, pages_total=9
)


class Traced:
    """A tracer, what it is told, and what it has sent."""

    def __init__(self, level: TraceLevel = TraceLevel.STEPS) -> None:
        self.recorder = Recorder(level)
        self.journal = Journal()
        clock = WallClock(lambda: 0, lambda: OFFSET_NS)
        self.now_ns = 0
        self.tracer = Tracer(self.recorder.tracing, clock, now_ns=lambda: self.now_ns)
        self._ids = itertools.count(1)
        self._step_ids = itertools.count(7)

    @property
    def spans(self) -> list[ReceivedSpan]:
        """What was sent so far."""
        return self.recorder.finished

    def named(self, name: str) -> list[ReceivedSpan]:
        return self.recorder.named(name)

    def read(self, *entries: Entry) -> None:
        """Have the tracer read these entries, as one batch of the journal."""
        self.tracer.read(entries)

    def open(self, name: str = "r", *, at_ns: int = 0, num_outputs: int = 1) -> RequestContext:
        """Begin a request that is recorded, whose outputs are queued at `at_ns`."""
        context = self.context()
        self.read(Noted(at_ns, Opened(context)))
        for index in range(num_outputs):
            self.read(Queued(at_ns, request(output_name(name, index), context)))
        return context

    def context(self) -> RequestContext:
        number = next(self._ids)
        return RequestContext(
            trace_id=number.to_bytes(16, "big"),
            span_id=(number << 32).to_bytes(8, "big"),
            parent_id=(number << 40).to_bytes(8, "big"),
            trace_state="",
            wall_offset_ns=OFFSET_NS,
        )

    def step(
        self,
        *rows: PlanRow,
        begin_ns: int,
        end_ns: int,
        made: dict[str, int] | None = None,
        shape: StepShape | None = SHAPE,
        num_steps: int = 1,
        speculated: tuple[Speculated, ...] = (),
    ) -> None:
        """Have a step read that the device worked on from `begin_ns` to `end_ns`. Each row that samples makes
        one token, unless `made` says how many.
        """
        number = {row.request_id: int(row.samples) for row in rows} | (made or {})
        outputs = [StepOutput(name, (1,) * num) for name, num in number.items() if num]
        self.read(
            StepRecord(
                Plan(next(self._step_ids), tuple(rows), num_steps=num_steps),
                outputs,
                _LOAD,
                shape,
                started_ns=begin_ns - 3,
                scheduled_ns=begin_ns - 2,
                packed_ns=begin_ns - 1,
                dispatched_ns=begin_ns,
                waiting_ns=begin_ns,
                waited_ns=end_ns,
                committed_ns=end_ns + 1,
                delivered_ns=end_ns + 2,
                speculated=speculated,
            )
        )

    def end(self, name: str, timing: RequestTiming, num_tokens: int, generation: int = 1) -> None:
        """End an output in the engine."""
        output = StepOutput(
            name, finish=Finish(FinishReason.EOS), timing=timing, weights_generation=generation
        )
        self.read(Ended(timing.finished_ns, request(name, None), output, num_tokens))

    def cancel(self, name: str, timing: RequestTiming, num_tokens: int) -> None:
        """Drop an output in the engine."""
        self.read(Cancelled(timing.finished_ns, request(name, None), timing, num_tokens))

    def close(self, context: RequestContext, **fields: Any) -> None:
        """End the request for its caller."""
        self.read(Noted(0, closed(context, **fields)))

    def children(self, context: RequestContext, phase: str) -> list[ReceivedSpan]:
        """Return the spans below a phase of this request, by their beginning."""
        (above,) = [
            span for span in self.spans if (span.name, span.parent_id) == (phase, context.span_id.hex())
        ]
        return self.recorder.children(above)


def output_name(name: str, index: int) -> str:
    return name if index == 0 else f"{name}\x00{index}"


def request(name: str, context: RequestContext | None) -> Request:
    made = Request(name, (1, 2, 3))
    if context is None:
        return made
    return replace(made, trace_id=context.trace_id.hex(), span_id=context.span_id.hex())


def closed(context: RequestContext, **fields: Any) -> Closed:
    """Return the note of a request's end: by default one output, which lasted from 0 to 100 ms."""
    given: dict[str, Any] = {
        "name": "text_completion toy",
        "start_ns": 0,
        "end_ns": 100 * MS,
        "begun": (Begun("tokenize", 0), Begun("submit", 1 * MS)),
        "attributes": {},
        "happened": (),
        "error": "",
        "num_queued": 1,
        "timing": None,
        "num_tokens": 0,
    }
    return Closed(context=context, **(given | fields))


def prefill(name: str, start: int, num_tokens: int, *, samples: bool = False) -> PlanRow:
    return PlanRow(name, 0, start, num_tokens, (1,) * num_tokens, samples=samples)


def decode(name: str, max_samples: int = 1) -> PlanRow:
    return PlanRow(name, 0, 5, 1, None, samples=True, max_samples=max_samples)


def applied(generation: int) -> Applied:
    """Make a weight update to this generation."""
    return Applied(
        WeightsVersion(f"w{generation}", generation),
        WeightsVersion(f"w{generation - 1}", generation - 1),
        InFlightReport(),
        paused_ns=3 * MS,
        applied_at=dt.datetime.now(dt.UTC),
    )


def linked(spans: Sequence[ReceivedSpan], to: ReceivedSpan) -> list[ReceivedSpan]:
    """Those with a link to this span."""
    return [
        span for span in spans if (to.trace_id, to.span_id) in [(k.trace_id, k.span_id) for k in span.links]
    ]
