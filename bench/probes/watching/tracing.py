"""Measures what traces cost in processor time, at each level, for each step and for each request.

    python -m bench.probes.watching.tracing                    # 64 streams, as the demo model serves them

No model runs and nothing listens: a scheduler plans steps of requests that are all recorded, and the entries
that an engine's journal would have of them are given to the tracer in batches as large as the journal's. Also
measured are the part of the event loop, and the sending of spans up to the bytes that go to a collector. The
last column is what all of it takes of one core, if the device makes `--steps-per-s` steps.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from penstock.runtime.loop.interface import StepRecord, StepShape
from penstock.runtime.loop.journal import Ended, Entry, Journal, Noted, Queued
from penstock.runtime.prompting.jobs import Job
from penstock.runtime.prompting.prompts import TokenPrompt
from penstock.runtime.requests.request import Request, StoppingParams
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.plan import StepResult
from penstock.runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from penstock.service.telemetry.options import TraceLevel
from penstock.service.telemetry.otlp.outbox import BATCH, AnySpan, SpanBatches
from penstock.service.telemetry.otlp.wire import AttributeValue
from penstock.service.telemetry.tracing.notes import Begun, Closed, Opened, RequestContext, WallClock
from penstock.service.telemetry.tracing.service_spans import CURRENT_RPC, Telemetry
from penstock.service.telemetry.tracing.tracer import Tracer

_METHOD = "penstock.v1.InferenceService/Stream"
_STEP_NS = 5_000_000


@dataclass(frozen=True, slots=True)
class Load:
    """What runs."""

    streams: int
    prompt: int
    """Tokens of a prompt."""
    tokens: int
    """Tokens of an output."""
    steps: int


class _Outlet:
    """Keeps spans."""

    def __init__(self, level: TraceLevel) -> None:
        self.level = level
        self.kept: list[AnySpan] = []

    def emit(self, spans: Sequence[bytes]) -> None:
        self.kept += spans


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor time in seconds, and what it was spent on."""

    event_loop_s: float
    tracer_s: float
    sending_s: float
    num_spans: int


def recorded(load: Load, batch_steps: int, *, traced: bool) -> tuple[list[list[Entry]], int]:
    """Return the batches of a journal, and how many requests have ended in them, all of which are recorded,
    or none (`traced`). Each stream sends one request after the other.
    """
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=load.streams,
            max_num_batched_tokens=max(512, load.streams),
            max_model_len=load.prompt + load.tokens + 1,
            page_size=16,
            num_pages=load.streams * (2 + (load.prompt + load.tokens) // 16),
            eos_token_ids=frozenset(),
            max_queued_requests=load.streams,
            prefix_cache_pages=0,
        )
    )
    entries: list[Entry] = []
    batches: list[list[Entry]] = []
    running: dict[str, tuple[Request, RequestContext, int]] = {}
    num_requests = now_ns = 0
    for step in range(1, load.steps + 1):
        now_ns = step * _STEP_NS
        while len(running) < load.streams:
            num_requests += 1
            context = _context(num_requests)
            request = Request(
                f"r{num_requests}",
                tuple(range(load.prompt)),
                # the first ones end one after the other
                stopping=StoppingParams(max_tokens=load.tokens - len(running) if step == 1 else load.tokens),
                trace_id=context.trace_id.hex() if traced else "",
                span_id=context.span_id.hex() if traced else "",
            )
            running[request.request_id] = request, context, now_ns
            scheduler.add(request, now_ns)
            notes = [Noted(now_ns, Opened(context))] if traced else []
            entries += [*notes, Queued(now_ns, request)]
        plan = scheduler.schedule(now_ns)
        assert plan is not None, "there are requests"
        sampled = [(7,) * row.max_samples if row.samples else () for row in plan.rows]
        result = StepResult(sampled, [()] * len(plan.rows))
        times = [now_ns + part for part in (0, 100, 200, 400, 500, 4_000_000, 4_100_000, 4_300_000)]
        outputs = scheduler.commit(plan, result, times[5], scheduler.accept(plan, result, times[5]))
        shape = StepShape(plan.num_tokens, load.streams)
        entries.append(StepRecord._make([plan, outputs, scheduler.load(), shape, *times, ()]))
        for output in outputs:
            if output.last:
                request, context, start_ns = running.pop(output.request_id)
                entries.append(Ended(times[7], request, output, load.tokens))
                if traced:
                    entries.append(Noted(times[7], _closed(context, start_ns, times[7])))
        if step % batch_steps == 0:
            batches.append(entries)
            entries = []
    return batches, num_requests - len(running)


def _context(number: int) -> RequestContext:
    spread = number * 0x9E3779B97F4A7C15
    return RequestContext(
        trace_id=(spread % 2**128).to_bytes(16, "big"),
        span_id=(spread % 2**64).to_bytes(8, "big"),
        parent_id=(spread // 3 % 2**64).to_bytes(8, "big"),
        trace_state="",
        wall_offset_ns=1_700_000_000_000_000_000,
    )


def _closed(context: RequestContext, start_ns: int, end_ns: int) -> Closed:
    attributes: dict[str, AttributeValue] = {f"gen_ai.request.something.{i}": i for i in range(10)}
    attributes |= {"gen_ai.operation.name": "chat", "gen_ai.response.finish_reasons": ["max_tokens"]}
    return Closed(
        context=context,
        name="text_completion demo",
        start_ns=start_ns - 2,
        end_ns=end_ns,
        begun=(Begun("tokenize", start_ns - 2), Begun("submit", start_ns - 1)),
        attributes=attributes,
        happened=(),
        error="",
        num_queued=1,
        timing=None,
        num_tokens=0,
    )


def spent_s(work: Callable[[], object]) -> float:
    """Return the processor time of this thread in seconds."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def event_loop(num_requests: int) -> tuple[float, list[ReadableSpan]]:
    """Measure what the event loop spends on so many requests, and the spans of their RPCs."""
    ended: list[ReadableSpan] = []

    class Keep:
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            """Do nothing."""

        def on_end(self, span: ReadableSpan) -> None:
            ended.append(span)

        _on_ending = on_start

        def shutdown(self) -> None:
            """Do nothing."""

    class Sampling:
        level = TraceLevel.STEPS
        provider = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False)

    processor: Any = Keep()
    Sampling.provider.add_span_processor(processor)
    sampling: Any = Sampling
    telemetry, journal = Telemetry(sampling), Journal()
    journal.read_by(lambda entries: None)
    ok: Any = type("Code", (), {"name": "OK"})
    job = Job(
        request_id="r", prompt=TokenPrompt((1,)), sampling=ResolvedSampling(), stopping=StoppingParams()
    )

    def serve() -> None:
        for _ in range(num_requests):
            rpc = telemetry.rpc(_METHOD, (("user-agent", "probe"),))
            CURRENT_RPC.set(rpc.span)
            request = telemetry.request(job, "demo", journal)
            request.tokenized(1)
            request.enters("submit")
            request.submits(1)
            request.queued()
            request.finished([], None)
            request.end(1)
            rpc.end(ok)

    # In a context of its own, or what the caller logs afterwards would belong to the last call.
    return copy_context().run(spent_s, serve), ended


def measured(load: Load, level: TraceLevel) -> tuple[Cost, int]:
    """Measure what a level costs, and how many requests have ended meanwhile."""
    batches, num_requests = recorded(load, batch_steps=20, traced=bool(level))
    outlet = _Outlet(level)
    tracer = Tracer(outlet, WallClock(), now_ns=lambda: 0)
    tracer_s = sum(spent_s(lambda batch=batch: tracer.read(batch)) for batch in batches)  # type: ignore[misc]
    event_loop_s, rpcs = event_loop(num_requests) if level else (0.0, [])
    spans = [*outlet.kept, *rpcs]
    made = SpanBatches(Resource({"service.name": "penstock"}))
    parts = [spans[first : first + BATCH] for first in range(0, len(spans), BATCH)]
    sending_s = spent_s(lambda: [made.request(part) for part in parts])
    return Cost(event_loop_s, tracer_s, sending_s, len(spans)), num_requests


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.probes.watching.tracing", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--prompt", type=int, default=64, metavar="N", help="tokens; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="default: %(default)s")
    parser.add_argument("--steps-per-s", type=float, default=200, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    load = Load(args.streams, args.prompt, args.tokens, args.steps)
    print(
        "| level | spans per step | tracer, us/step | sending, us/step | event loop, us/request | of a core |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    for level in TraceLevel:
        cost, num_requests = measured(load, level)
        seconds = args.steps / args.steps_per_s
        share = 100 * (cost.event_loop_s + cost.tracer_s + cost.sending_s) / seconds
        print(
            f"| {level.name.lower()} | {cost.num_spans / args.steps:.1f} "
            f"| {1e6 * cost.tracer_s / args.steps:.1f} | {1e6 * cost.sending_s / args.steps:.1f} "
            f"| {1e6 * cost.event_loop_s / num_requests:.1f} | {share:.2f} % |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
