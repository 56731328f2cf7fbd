"""The tracer behind a real scheduler and a real engine's thread, on the runner without a model: what traces
say must agree with what the requests got.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from penstock.runtime.loop.core import EngineCore
from penstock.runtime.loop.interface import InFlightPolicy
from penstock.runtime.loop.journal import Noted
from penstock.runtime.loop.stepping import Pacer
from penstock.runtime.requests.request import CacheParams, Request, StoppingParams, output_id, outputs_of
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from penstock.service.telemetry.options import TraceLevel
from penstock.service.telemetry.tracing.notes import Opened
from tests.service.telemetry.tracing.traced import Traced, closed, linked
from tests.service.telemetry.tracing.traced import request as named
from tests.support.collector import Collector, Gate
from tests.support.scheduler.fake_runner import EOS, VOCAB, LazyRunner

WAIT_S = 20.0


def core(traced: Traced, *, window: int = 1, **limits: int) -> EngineCore:
    options: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 12,
        "max_model_len": 60,
        "page_size": 4,
        "num_pages": 24,
        "max_queued_requests": 100,
    }
    config = SchedulerConfig(eos_token_ids=EOS, **(options | limits))
    engine = EngineCore(
        LazyRunner(config),
        Scheduler(config),
        vocab_size=VOCAB,
        pacer=Pacer(10.0, window),
        journal=traced.journal,
    )
    traced.tracer.follow(traced.journal)
    engine.start()
    return engine


def held(engine: EngineCore) -> Gate:
    """Hold the engine's thread until the gate is opened, so that what comes meanwhile comes at once."""
    gate = Gate()
    engine.submit(Request("held", (1,), stopping=StoppingParams(max_tokens=2, ignore_eos=True)), gate)
    assert gate.reached.wait(WAIT_S)
    return gate


def some_requests(seed: int) -> list[tuple[Request, int]]:
    """Make requests, and say how many outputs each has."""
    rng = random.Random(seed)
    shared = rng.choices(range(VOCAB), k=20)
    return [
        (
            Request(
                f"r{i}",
                (*shared[: rng.randint(1, 20)], *rng.choices(range(VOCAB), k=rng.randint(0, 9))),
                ResolvedSampling(seed=i),
                StoppingParams(max_tokens=rng.randint(5, 25), ignore_eos=rng.random() < 0.5),
                cache=CacheParams(bypass=rng.random() < 0.2),
            ),
            1 + i % 3,
        )
        for i in range(9)
    ]


@pytest.mark.parametrize("level", [TraceLevel.STEPS, TraceLevel.DETAILED])
@pytest.mark.parametrize(("num_pages", "window"), [(24, 1), (24, 8), (15, 1)])
def test_traces_agree_with_what_requests_got(level, num_pages, window):
    """Every second request is recorded. With few pages, some are preempted."""
    traced, sink = Traced(level), Collector()
    engine = core(traced, window=window, num_pages=num_pages)
    gate = held(engine)
    recorded = {}
    asked = some_requests(num_pages + window)
    for i, (request, n) in enumerate(asked):
        context = traced.context() if i % 2 else None
        if context is not None:
            recorded[request.request_id] = context
            traced.journal.write(Noted(0, Opened(context)))
            ids = named("x", context)
            request = Request(
                request.request_id,
                request.prompt_token_ids,
                request.sampling,
                request.stopping,
                cache=request.cache,
                trace_id=ids.trace_id,
                span_id=ids.span_id,
            )
        for output in outputs_of(request, n):
            engine.submit(output, sink)
    gate.open()
    try:
        for request, n in asked:
            for index in range(n):
                sink.last(output_id(request.request_id, index))
        for request, n in asked:
            if request.request_id in recorded:
                context = recorded[request.request_id]
                note = closed(context, num_queued=n, end_ns=2**62, attributes={"id": request.request_id})
                traced.journal.write(Noted(0, note))
        traced.journal.flush()
    finally:
        engine.shutdown()
    traced.tracer.close()
    assert traced.tracer.num_followed == 0

    spans = traced.recorder.finished
    requests = {span.attributes["id"]: span for span in traced.named("text_completion toy")}
    assert set(requests) == set(recorded)
    steps = {(step.trace_id, step.span_id): step for step in traced.named("engine.step")}
    below = [s for s in spans if s.name in ("prefill_chunk", "decode_window", "decode_step")]
    num_preempted = 0
    for request, n in asked:
        if request.request_id not in recorded:
            continue
        span = requests[request.request_id]
        phases = {phase.name: phase for phase in traced.recorder.children(span)}
        mine = [s for s in below if s.parent_id in {phase.span_id for phase in phases.values()}]
        tokens: Counter[int] = Counter()
        computed: Counter[int] = Counter()
        for child in mine:
            above = phases["prefill"] if child.parent_id == phases["prefill"].span_id else phases["decode"]
            assert above.start_ns <= child.start_ns <= child.end_ns <= above.end_ns
            index = child.attributes["penstock.output.index"]
            assert child.links, "it is linked to a step"
            for link in child.links:
                step = steps[link.trace_id, link.span_id]
                assert linked([step], span), "and the step to the request"
                assert step.start_ns <= child.end_ns
            if child.name == "prefill_chunk":
                computed[index] += child.attributes["penstock.chunk.tokens"]
            else:
                key = (
                    "penstock.window.tokens"
                    if level is TraceLevel.STEPS
                    else "penstock.step.generated_tokens"
                )
                tokens[index] += child.attributes[key]
        preempted = [event for event in span.events if event.name == "preempted"]
        assert len(preempted) == span.attributes["penstock.preemptions"]
        num_preempted += len(preempted)
        for index in range(n):
            made = len(sink.tokens(output_id(request.request_id, index)))
            again = [e for e in preempted if e.attributes["penstock.output.index"] == index]
            if not again:
                assert tokens[index] == made - 1, "the last chunk of the prompt makes the first token"
                if n == 1:
                    cached = span.attributes["gen_ai.usage.cache_read.input_tokens"]
                    assert computed[index] == len(request.prompt_token_ids) - cached
        assert span.attributes["gen_ai.usage.output_tokens"] == sum(
            len(sink.tokens(output_id(request.request_id, index))) for index in range(n)
        )
    assert bool(num_preempted) == (num_pages == 15), "the test has requests of both kinds"
    for step in steps.values():
        assert step.links
        parts = traced.recorder.children(step)
        assert [part.name for part in parts] == ["schedule", "pack", "dispatch", "wait", "emit"]
        assert step.start_ns == parts[0].start_ns
        assert step.end_ns == parts[-1].end_ns


def test_an_update_that_recomputes_is_seen_by_those_that_run():
    traced = Traced()
    engine = core(traced)
    gate = held(engine)
    context = traced.context()
    traced.journal.write(Noted(0, Opened(context)))
    ids = named("r", context)
    request = Request(
        "r", (1, 2, 3), stopping=StoppingParams(max_tokens=40, ignore_eos=True), trace_id=ids.trace_id,
        span_id=ids.span_id,
    )  # fmt: skip
    first = Gate()
    engine.submit(request, first)
    gate.open()
    assert first.reached.wait(WAIT_S), "it runs"
    update = engine.changes.update(lambda: None, "new", InFlightPolicy.RECOMPUTE)
    first.open()
    try:
        assert update.result(WAIT_S).version.generation == 2
        first.sink.last("r")
        traced.journal.write(Noted(0, closed(context, end_ns=2**62)))
        traced.journal.flush()
    finally:
        engine.shutdown()
    (span,) = traced.named("text_completion toy")
    assert sorted(event.name for event in span.events) == ["preempted", "weights_updated"]
    assert any("penstock.chunk.recomputed" in chunk.attributes for chunk in traced.named("prefill_chunk"))
    assert span.attributes["penstock.weights.generation"] == 2
