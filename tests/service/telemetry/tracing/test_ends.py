"""The trace of every way in which a request can end, as a collector gets it over OTLP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from itertools import groupby
from typing import Any

import pytest

from penstock.runtime.errors import EngineFailure
from penstock.runtime.loop.interface import InFlightPolicy
from penstock.service.replies import outputs
from penstock.service.rpcs import ending
from penstock.service.telemetry.options import TraceLevel
from penstock.v1 import inference_pb2
from tests.service.h2peer import Peer
from tests.service.rig import Rig, collect, failure_of, fake, generate, read_all, serving, stream, until
from tests.support.otlp import OtlpReceiver, ReceivedSpan, children_of, tracing_to

STREAM = "penstock.v1.InferenceService/Stream"
GENERATE = "penstock.v1.InferenceService/Generate"
BEFORE = ["tokenize", "submit"]
ALL = [*BEFORE, "queue", "prefill", "decode", "reply"]
SAMPLED = (("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),)
UNSAMPLED = (("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"),)


class Trace:
    """What a collector got of one request."""

    def __init__(self, receiver: OtlpReceiver, request_id: str) -> None:
        self.spans = receiver.spans
        (self.request,) = [s for s in self.spans if s.attributes.get("gen_ai.response.id") == request_id]
        (self.rpc,) = [s for s in self.spans if s.span_id == self.request.parent_id]
        self.phases = children_of(self.request, self.spans)

    def below(self, phase: str) -> list[str]:
        """Return the names of the spans below a phase."""
        (above,) = [span for span in self.phases if span.name == phase]
        return [span.name for span in children_of(above, self.spans)]

    @property
    def events(self) -> list[str]:
        return [event.name for event in self.request.events]

    @property
    def steps(self) -> list[ReceivedSpan]:
        """The steps that say that they computed it."""
        ids = self.request.trace_id, self.request.span_id
        linked = [s for s in self.spans if s.name == "engine.step"]
        return [s for s in linked if ids in [(link.trace_id, link.span_id) for link in s.links]]

    def check(self, names: list[str], method: str = STREAM) -> None:
        """Check that it is one trace, whose phases are these and tile the request, and that its links lead
        both ways.
        """
        assert (self.rpc.name, self.rpc.kind) == (method, "SERVER")
        assert [phase.name for phase in self.phases] == names
        assert sum(phase.duration_ns for phase in self.phases) == self.request.duration_ns
        assert self.phases[0].start_ns == self.request.start_ns
        assert [a.end_ns for a in self.phases[:-1]] == [b.start_ns for b in self.phases[1:]]
        assert self.rpc.start_ns <= self.request.start_ns <= self.request.end_ns
        below = [span for phase in self.phases for span in children_of(phase, self.spans)]
        assert {s.trace_id for s in (*self.phases, *below)} == {self.rpc.trace_id}
        assert bool(below) == ("prefill" in names)
        steps = {(step.trace_id, step.span_id) for step in self.steps}
        linked = {(link.trace_id, link.span_id) for span in below for link in span.links}
        assert linked <= steps
        assert bool(linked) == bool(steps)
        assert self.rpc.trace_id not in {trace_id for trace_id, _ in steps}


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@contextlib.asynccontextmanager
async def traced(
    receiver: OtlpReceiver, level: TraceLevel = TraceLevel.STEPS, *, options: dict[str, Any] | None = None,
    **engine: Any
) -> AsyncIterator[Rig]:  # fmt: skip
    """Run a server. When it has stopped, the receiver has all its spans."""
    async with serving(fake(**engine), tracing=tracing_to(receiver, level), **(options or {})) as rig:
        yield rig


async def begun(rig: Rig, steps: int = 2, **fields: Any) -> Any:
    """Make a stream that has its first tokens."""
    call = rig.inference.Stream(stream("a", request_id="r", **fields), metadata=SAMPLED)
    await until(lambda: len(rig.engine.seen) == 1)
    rig.engine.step(steps)
    num_tokens = 0
    async with asyncio.timeout(20):
        while num_tokens < steps:  # deltas may be merged
            num_tokens += len((await call.read()).delta.token_ids)
    return call


async def test_it_finishes(receiver: OtlpReceiver) -> None:
    async with traced(receiver) as rig:
        call = rig.inference.Stream(stream("a", request_id="r", stopping={"max_tokens": 5}), metadata=SAMPLED)
        await collect(call)
    trace = Trace(receiver, "r")
    trace.check(ALL)
    assert (trace.below("prefill"), trace.below("decode")) == (["prefill_chunk"], ["decode_window"])
    assert len(trace.steps) == 5
    assert trace.rpc.attributes["rpc.response.status_code"] == "OK"
    assert trace.request.attributes["gen_ai.response.finish_reasons"] == ["max_tokens"]
    assert (trace.request.status, trace.events) == ("UNSET", [])
    assert trace.request.trace_id == SAMPLED[0][1].split("-")[1]


async def test_its_caller_cancels_it_while_it_decodes(receiver: OtlpReceiver) -> None:
    async with traced(receiver, hold=True) as rig:
        call = await begun(rig, steps=3)
        call.cancel()
        await until(lambda: bool(rig.engine.cancelled))
    trace = Trace(receiver, "r")
    trace.check(ALL[:-1])
    assert trace.below("decode") == ["decode_window"]
    assert trace.request.attributes["error.type"] == "CANCELLED"
    assert trace.request.attributes["gen_ai.usage.output_tokens"] == 3
    assert trace.rpc.attributes["rpc.response.status_code"] == "CANCELLED"
    assert (trace.request.status, trace.rpc.status) == ("UNSET", "UNSET")


async def test_its_caller_cancels_it_while_it_waits(receiver: OtlpReceiver) -> None:
    async with traced(receiver, hold=True, max_num_seqs=1) as rig:
        runs = asyncio.ensure_future(rig.inference.Generate(generate("a"), metadata=UNSAMPLED))
        await until(lambda: len(rig.engine.seen) == 1)
        call = rig.inference.Stream(stream("a", request_id="r"), metadata=SAMPLED)
        await until(lambda: len(rig.engine.seen) == 2)
        call.cancel()
        await until(lambda: bool(rig.engine.cancelled))
        runs.cancel()
    trace = Trace(receiver, "r")
    assert trace.phases[2].name == "queue"
    assert "decode" not in [phase.name for phase in trace.phases]
    assert trace.request.attributes["error.type"] == "CANCELLED"
    assert not trace.steps


async def test_its_deadline_passes(receiver: OtlpReceiver) -> None:
    for timeout_s in (1.0, 10.0, 60.0):  # a busy machine may need longer until two tokens are there
        name = f"within {timeout_s} s"
        async with traced(receiver, hold=True) as rig:
            asked = generate("a", request_id=name)
            call = rig.inference.Generate(asked, timeout=timeout_s, metadata=SAMPLED)
            failing = asyncio.ensure_future(failure_of(call))
            await until(lambda: bool(rig.engine.seen) or failing.done())  # noqa: B023 -- awaited here
            rig.engine.step(2)
            await until(lambda: rig.engine.num_steps == 2 or failing.done())  # noqa: B023 -- awaited here
            assert (await failing).code.name == "DEADLINE_EXCEEDED"
            await until(lambda: len(rig.engine.cancelled) == len(rig.engine.seen))
            if rig.engine.num_steps == 2:
                break
    trace = Trace(receiver, name)
    trace.check(ALL[:-1], GENERATE)
    assert trace.rpc.attributes["rpc.response.status_code"] == "DEADLINE_EXCEEDED"
    assert trace.rpc.status == "ERROR"
    assert trace.request.attributes["error.type"] == "CANCELLED"


async def test_its_time_limit_passes(receiver: OtlpReceiver) -> None:
    async with traced(receiver, hold=True) as rig:
        call = await begun(rig, stopping={"time_limit": {"seconds": 60}})
        rig.engine.pass_time_limits()
        assert (await _rest(call))[-1].HasField("summary")
    trace = Trace(receiver, "r")
    trace.check(ALL)
    assert trace.request.attributes["gen_ai.response.finish_reasons"] == ["time_limit"]
    assert trace.request.status == "UNSET"


async def test_it_is_aborted(receiver: OtlpReceiver) -> None:
    async with traced(receiver, hold=True) as rig:
        call = await begun(rig)
        await rig.inference.Abort(inference_pb2.AbortRequest(request_ids=inference_pb2.RequestIds(ids=["r"])))
        assert (await _rest(call))[-1].HasField("summary")
    trace = Trace(receiver, "r")
    trace.check(ALL)
    assert trace.request.attributes["gen_ai.response.finish_reasons"] == ["aborted"]
    assert trace.rpc.attributes["rpc.response.status_code"] == "OK"


async def test_it_is_preempted(receiver: OtlpReceiver) -> None:
    async with traced(receiver, hold=True) as rig:
        call = await begun(rig)
        rig.engine.preempt()
        rig.engine.release()
        assert (await _rest(call))[-1].HasField("summary")
    trace = Trace(receiver, "r")
    trace.check(ALL)
    (event,) = trace.request.events
    assert event.name == "preempted"
    assert event.attributes == {"penstock.output.index": 0, "penstock.tokens.computed": 2}
    assert trace.request.start_ns < event.at_ns < trace.request.end_ns
    assert [name for name, _ in groupby(trace.below("decode"))] == [
        "decode_window",
        "prefill_chunk",
        "decode_window",
    ]


async def test_the_engine_dies(receiver: OtlpReceiver) -> None:
    async with traced(receiver, hold=True) as rig:
        call = await begun(rig)
        rig.engine.die()
        assert (await failure_of(_rest(call))).code.name == "INTERNAL"
    trace = Trace(receiver, "r")
    trace.check(ALL)
    assert (trace.request.status, trace.request.attributes["error.type"]) == ("ERROR", "EngineFailure")
    assert (trace.rpc.status, trace.rpc.status_message) == ("ERROR", "ENGINE_FAILURE")
    assert "gen_ai.response.finish_reasons" not in trace.request.attributes
    assert trace.request.attributes["gen_ai.usage.output_tokens"] == 2


async def test_one_of_its_outputs_fails(receiver: OtlpReceiver) -> None:
    """The others are cancelled then."""
    async with traced(receiver, hold=True) as rig:
        request = generate("a", request_id="r", sampling={"n": 2})
        call = asyncio.ensure_future(failure_of(rig.inference.Generate(request, metadata=SAMPLED)))
        await until(lambda: len(rig.engine.seen) == 2)
        rig.engine.step(2)
        await until(lambda: rig.engine.num_steps == 2)
        rig.engine.fail("r\x001", EngineFailure("a bad row"))
        assert (await call).code.name == "INTERNAL"
        await until(lambda: bool(rig.engine.cancelled))
    trace = Trace(receiver, "r")
    trace.check(ALL[:-1], GENERATE)
    assert (trace.request.status, trace.request.attributes["error.type"]) == ("ERROR", "EngineFailure")
    assert trace.below("decode") == ["decode_window"] * 2
    assert trace.request.attributes["gen_ai.usage.output_tokens"] == 4


async def test_the_engine_refuses_it(receiver: OtlpReceiver) -> None:
    async with traced(receiver, hold=True, max_num_seqs=1, max_queued_requests=1) as rig:
        others = [asyncio.ensure_future(collect(rig.inference.Stream(stream("a")))) for _ in range(2)]
        await until(lambda: len(rig.engine.seen) == 2)
        call = rig.inference.Stream(stream("a", request_id="r"), metadata=SAMPLED)
        failure = await failure_of(_rest(call))
        rig.engine.release()
        await asyncio.gather(*others)
    assert failure.code.name == "RESOURCE_EXHAUSTED"
    spans = receiver.spans
    trace = Trace(receiver, "r")
    assert trace.phases[0].name == "tokenize"
    assert sum(phase.duration_ns for phase in trace.phases) == trace.request.duration_ns
    assert not {"queue", "prefill"} & {phase.name for phase in trace.phases}
    assert not trace.steps
    assert trace.request.status == "ERROR"
    assert trace.rpc.attributes["rpc.response.status_code"] == "RESOURCE_EXHAUSTED"
    assert len([s for s in spans if s.name == "text_completion fake"]) == 3


async def test_a_request_that_is_refused_for_its_fields_is_an_rpc_only(receiver: OtlpReceiver) -> None:
    async with traced(receiver) as rig:
        await failure_of(_rest(rig.inference.Stream(stream(""), metadata=SAMPLED)))
    (span,) = receiver.spans
    assert span.name == STREAM


async def test_weights_are_updated_and_the_engine_pauses_while_it_runs(receiver: OtlpReceiver) -> None:
    async with traced(receiver, hold=True) as rig:
        call = await begun(rig)
        rig.engine.go_live("new")
        rig.engine.step(1)
        await call.read()
        await asyncio.wrap_future(rig.engine.pause(InFlightPolicy.KEEP))
        await asyncio.wrap_future(rig.engine.resume())
        rig.engine.release()
        assert (await _rest(call))[-1].HasField("summary")
    trace = Trace(receiver, "r")
    trace.check(ALL)
    assert trace.events == ["weights_updated", "paused", "resumed"]
    updated = trace.request.events[0]
    assert updated.attributes["penstock.weights.generation"] == 2
    assert updated.attributes["penstock.weights.label"] == "new"
    assert trace.request.attributes["penstock.weights.generation"] == 2
    assert len(trace.below("decode")) == 3, "a window ends with each change"


async def test_its_reader_stalls_and_is_given_up(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has long ended it."""
    monkeypatch.setattr(ending, "LAST_WORDS_S", 0.2)
    async with (
        traced(receiver, options={"stall_limit_s": 0.5}) as rig,
        Peer(rig.server.address) as peer,
    ):
        request = stream("a", request_id="r", stopping={"max_tokens": 5})
        await peer.call("/" + STREAM, request.SerializeToString())
        await until(lambda: rig.server.sends.num_stalled == 1)
    trace = Trace(receiver, "r")
    trace.check(ALL)
    (event,) = trace.request.events
    assert (event.name, event.attributes["penstock.stall.gave_up"]) == ("stalled", True)
    assert event.attributes["penstock.stall.duration"] >= 0.5
    assert trace.phases[-1].duration_ns >= 5e8, "all that time is the reply's"
    assert trace.rpc.attributes["rpc.response.status_code"] == "RESOURCE_EXHAUSTED"


async def test_its_reader_comes_back(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "STALL_S", 0.05)
    async with (
        traced(receiver, options={"stall_limit_s": 3600.0}) as rig,
        Peer(rig.server.address) as peer,
    ):
        request = stream("a", request_id="r", stopping={"max_tokens": 5})
        number = await peer.call("/" + STREAM, request.SerializeToString())
        await until(lambda: rig.engine.num_steps == 5)
        await asyncio.sleep(0.2)
        await peer.open_window(number, 60_000)
        await peer.until(lambda: peer.ended(number))
    trace = Trace(receiver, "r")
    trace.check(ALL)
    assert {event.name for event in trace.request.events} == {"stalled"}
    assert not any(event.attributes["penstock.stall.gave_up"] for event in trace.request.events)
    assert max(event.attributes["penstock.stall.duration"] for event in trace.request.events) >= 0.1
    assert trace.rpc.attributes["rpc.response.status_code"] == "OK"


async def test_an_unsampled_request_leaves_nothing_and_its_steps_neither(receiver: OtlpReceiver) -> None:
    async with traced(receiver, TraceLevel.DETAILED) as rig:
        await collect(rig.inference.Stream(stream("a", request_id="u"), metadata=UNSAMPLED))
        await rig.inference.Generate(generate("a", request_id="v"), metadata=UNSAMPLED)
    assert not receiver.spans


async def test_beside_an_unsampled_request_only_the_sampled_one_is_linked(receiver: OtlpReceiver) -> None:
    async with traced(receiver, hold=True) as rig:
        other = asyncio.ensure_future(
            collect(rig.inference.Stream(stream("a", request_id="u"), metadata=UNSAMPLED))
        )
        await until(lambda: len(rig.engine.seen) == 1)
        rig.engine.step(3)
        await until(lambda: rig.engine.num_steps == 3)
        one = asyncio.ensure_future(
            collect(
                rig.inference.Stream(
                    stream("a", request_id="r", stopping={"max_tokens": 2}), metadata=SAMPLED
                )
            )
        )
        await until(lambda: len(rig.engine.seen) == 2)
        rig.engine.release()
        await asyncio.gather(one, other)
    trace = Trace(receiver, "r")
    trace.check(ALL)
    steps = [span for span in receiver.spans if span.name == "engine.step"]
    assert len(steps) == len(trace.steps) == 3, "one lets it in, and two make its tokens"
    assert [len(step.links) for step in steps] == [1, 1, 1]
    assert steps[0].attributes["penstock.step.rows"] == 2


async def test_over_http_too() -> None:
    with OtlpReceiver("http/protobuf") as receiver:
        async with traced(receiver, TraceLevel.DETAILED) as rig:
            await collect(rig.inference.Stream(stream("a", request_id="r"), metadata=SAMPLED))
        trace = Trace(receiver, "r")
        trace.check(ALL)
        assert set(trace.below("decode")) == {"decode_step"}


async def _rest(call: Any) -> list[Any]:
    """Return the messages that were not read yet."""
    return [message async for message in read_all(call)]
