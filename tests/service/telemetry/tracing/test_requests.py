"""Spans of RPCs and requests, with their phases: names, parents, attributes, how errors and cancellations are
marked, and what is never recorded.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from penstock.runtime.adapters.interface import AdapterTensors
from penstock.service.requests import generate as generate_module
from penstock.service.telemetry.options import TraceLevel
from penstock.v1 import control_pb2, inference_pb2, types_pb2
from tests.service.codecs import byte_codec
from tests.service.rig import collect, failure_of, fake, generate, serving, stream, until
from tests.service.updatable import updatable
from tests.service.weights_rig import fake_tensors, push, steps
from tests.support.otlp import Recorder

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def recorder():
    """Without what the engine's steps add."""
    return Recorder(TraceLevel.REQUESTS)


PHASES = ["tokenize", "submit", "queue", "prefill", "decode", "reply"]


def assert_tiled(recorder, request, names):
    """Check that the phases are these, each begins where the one before ends, and together they last as long
    as the request.
    """
    phases = recorder.children(request)
    assert [phase.name for phase in phases] == names
    assert (phases[0].start_ns, phases[-1].end_ns) == (request.start_ns, request.end_ns)
    assert [a.end_ns for a in phases[:-1]] == [b.start_ns for b in phases[1:]]
    assert sum(phase.duration_ns for phase in phases) == request.duration_ns
    assert {phase.trace_id for phase in phases} == {request.trace_id}


@pytest.mark.parametrize("method", ["Generate", "Stream"])
async def test_spans_of_a_request(recorder, method):
    fields: dict[str, Any] = {
        "sampling": {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": 11},
        "stopping": {"max_tokens": 5},
    }
    async with serving(tracing=recorder.tracing) as rig:
        if method == "Generate":
            await rig.inference.Generate(generate("a", request_id="one", **fields))
        else:
            await collect(rig.inference.Stream(stream("a", request_id="one", **fields)))
        await until(lambda: len(recorder.spans) == 8)
    spans = recorder.spans
    rpc, request = spans[f"penstock.v1.InferenceService/{method}"], spans["text_completion fake"]
    assert rpc.kind == "SERVER"
    assert rpc.parent_id == ""
    assert rpc.attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": f"penstock.v1.InferenceService/{method}",
        "rpc.response.status_code": "OK",
    }
    assert request.parent_id == rpc.span_id
    assert request.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.response.id": "one",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 11,
        "gen_ai.request.max_tokens": 5,
        "penstock.request.min_p": 0.0,
        "penstock.request.stop_strings": 0,
        "gen_ai.usage.input_tokens": 1,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["max_tokens"],
        "penstock.preemptions": 0,
        "penstock.weights.generation": 1,
    }
    assert {span.status for span in spans.values()} == {"UNSET"}
    assert rpc.start_ns <= request.start_ns <= request.end_ns <= rpc.end_ns
    assert_tiled(recorder, request, PHASES)
    assert spans["tokenize"].attributes == {"gen_ai.usage.input_tokens": 1}


async def test_weight_updates_and_pauses_are_recorded_like_every_rpc(recorder):
    tensors = fake_tensors(1)
    async with serving(updatable(), tracing=recorder.tracing) as rig:
        await push(rig, steps(tensors))
        await rig.control.Pause(control_pb2.PauseRequest())
        name = "penstock.v1.InferenceService/UpdateWeights"
        await until(lambda: {name, "penstock.v1.ControlService/Pause"} <= set(recorder.spans))
        assert recorder.spans[name].attributes["rpc.response.status_code"] == "OK"
        recorder.clear()
        await failure_of(push(rig, steps(tensors, update_id="other")[:-1]))
        await until(lambda: name in recorder.spans)
    assert recorder.spans[name].attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert recorder.spans[name].attributes["error.type"] == "INVALID_ARGUMENT"


async def test_cached_tokens_adapter_and_priority_of_a_request(recorder):
    async with serving(
        fake(page_size=1, scheduling_policy="priority", max_adapters=1), tracing=recorder.tracing
    ) as rig:
        rig.engine.adapters.load("sql", AdapterTensors({"r": 8}, ()))
        await rig.inference.Generate(generate("wxy", adapter="sql"))
        await until(lambda: "text_completion fake" in recorder.spans)
        recorder.clear()
        await rig.inference.Generate(generate("wxyz", priority=-7, adapter="sql"))
        await until(lambda: "text_completion fake" in recorder.spans)
    attributes = recorder.spans["text_completion fake"].attributes
    assert attributes["gen_ai.usage.input_tokens"] == 4
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 3
    assert attributes["penstock.request.priority"] == -7
    assert attributes["penstock.request.adapter"] == "sql"


async def test_several_outputs_under_a_grammar(recorder):
    """Compiling the grammar is a phase of its own. Reasons are in the order of the outputs."""
    engine = fake(hold=True, scripts={("a", 1): [98, 256]})
    asked = {"sampling": {"n": 3}, "stopping": {"max_tokens": 5}, "constraint": {"regex": "[a-z]*"}}
    async with serving(engine, tracing=recorder.tracing) as rig:
        call = asyncio.ensure_future(rig.inference.Generate(generate("a", **asked)))
        await until(lambda: len(engine.seen) == 3)
        engine.release()
        await call
        await until(lambda: len(recorder.spans) == 9)
    spans = recorder.spans
    attributes = spans["text_completion fake"].attributes
    assert attributes["gen_ai.response.finish_reasons"] == ["max_tokens", "eos", "max_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == 5 + 2 + 5
    assert spans["grammar"].parent_id == spans["text_completion fake"].span_id
    assert attributes["gen_ai.request.choice.count"] == 3
    assert_tiled(recorder, spans["text_completion fake"], [PHASES[0], "grammar", *PHASES[1:]])


async def test_chat_is_named_so(recorder):
    chat = {"messages": [types_pb2.ChatMessage(role="user", content="hi")]}
    async with serving(tracing=recorder.tracing) as rig:
        await rig.inference.Generate(generate(chat=chat, stopping={"max_tokens": 1}))
        await until(lambda: "chat fake" in recorder.spans)
    assert recorder.spans["chat fake"].attributes["gen_ai.operation.name"] == "chat"


async def test_traceparent_is_adopted(recorder):
    metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
    async with serving(tracing=recorder.tracing) as rig:
        await rig.inference.Generate(generate("y"), metadata=metadata)
        await until(lambda: len(recorder.spans) == 8)
    rpc = recorder.spans["penstock.v1.InferenceService/Generate"]
    assert rpc.trace_id == TRACE
    assert rpc.parent_id == PARENT
    assert rpc.proto.flags & 0x200, "the parent is in another process"


async def test_the_engine_knows_the_trace_of_a_request_and_when_it_came(recorder):
    """Exemplars of metrics and lines of the log lead to it."""
    sampled = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
    unsampled = (("traceparent", f"00-{TRACE}-{PARENT}-00"),)
    async with serving(tracing=recorder.tracing) as rig:
        await rig.inference.Generate(generate("y", sampling={"n": 2}), metadata=sampled)
        await rig.inference.Generate(generate("y"), metadata=unsampled)
        chat = {"messages": [types_pb2.ChatMessage(role="user", content="hi")]}
        await rig.inference.Generate(generate(chat=chat, stopping={"max_tokens": 1}))
        first, second, other, chatting = rig.engine.seen
    request = recorder.spans["text_completion fake"]
    assert (first.trace_id, first.span_id) == (second.trace_id, second.span_id) == (TRACE, request.span_id)
    assert (other.trace_id, other.span_id) == ("", "")
    assert [seen.operation for seen in (first, other, chatting)] == ["text_completion"] * 2 + ["chat"]
    assert 0 < first.received_ns == second.received_ns < other.received_ns < chatting.received_ns


async def test_all_spans_keep_the_callers_tracestate():
    recorder = Recorder(TraceLevel.DETAILED)
    metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "one=1,ot=th:8"))
    async with serving(tracing=recorder.tracing) as rig:
        await rig.inference.Generate(generate("y"), metadata=metadata)
    states = {span.name: span.proto.trace_state for span in recorder.finished if span.trace_id == TRACE}
    assert set(states.values()) == {"one=1,ot=th:8"}
    assert {*PHASES, "prefill_chunk", "text_completion fake"} <= set(states)


@pytest.mark.parametrize(("members", "kept"), [(2, True), (3, False)])
async def test_a_long_tracestate_is_not_repeated_in_every_span(recorder, members, kept):
    state = ",".join(f"k{number}={'v' * 250}" for number in range(members))
    metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", state))
    async with serving(tracing=recorder.tracing) as rig:
        await rig.inference.Generate(generate("y"), metadata=metadata)
        await until(lambda: len(recorder.spans) == 8)
    assert {span.proto.trace_state for span in recorder.finished} == {state if kept else ""}
    assert {span.trace_id for span in recorder.finished} == {TRACE}


async def test_unsampled_records_nothing(recorder):
    metadata = (("traceparent", f"00-{TRACE}-{PARENT}-00"),)
    async with serving(tracing=recorder.tracing) as rig:
        await rig.inference.Generate(generate("y"), metadata=metadata)
        await collect(rig.inference.Stream(stream("y"), metadata=metadata))
        assert not recorder.spans
        await rig.control.GetServerInfo(control_pb2.GetServerInfoRequest())
        await until(lambda: bool(recorder.spans))
    assert set(recorder.spans) == {"penstock.v1.ControlService/GetServerInfo"}


@pytest.mark.parametrize("header", ["", "00-zz-00-01", "garbage", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
async def test_bad_traceparent_is_ignored(recorder, header):
    async with serving(tracing=recorder.tracing) as rig:
        await rig.inference.Generate(generate("y"), metadata=(("traceparent", header),))
        await until(lambda: len(recorder.spans) == 8)
    assert recorder.spans["penstock.v1.InferenceService/Generate"].parent_id == ""


async def test_concurrent_requests_do_not_mix(recorder):
    async with serving(tracing=recorder.tracing) as rig:
        await asyncio.gather(
            *(rig.inference.Generate(generate("y", request_id=f"g{i}")) for i in range(10)),
            *(collect(rig.inference.Stream(stream("y", request_id=f"s{i}"))) for i in range(10)),
        )
        await until(lambda: len(recorder.finished) == 160)
    spans = recorder.finished
    rpcs = {s.span_id: s for s in spans if s.kind == "SERVER"}
    requests = [s for s in spans if s.name == "text_completion fake"]
    assert sorted(rpcs) == sorted(r.parent_id for r in requests), "one request below each RPC"
    for request in requests:
        rpc = rpcs[request.parent_id]
        method = {"g": "Generate", "s": "Stream"}[request.attributes["gen_ai.response.id"][0]]
        assert rpc.name.endswith(method)


# -- errors and cancels --


async def test_the_callers_fault_is_no_error_of_the_server(recorder):
    async with serving(tracing=recorder.tracing) as rig:
        await failure_of(rig.inference.Generate(generate("")))
        await failure_of(rig.raw("InferenceService/Generate", b"\xff"))
        await until(lambda: len(recorder.finished) == 2)
    for span in recorder.finished:
        assert span.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
        assert span.attributes["error.type"] == "INVALID_ARGUMENT"
        assert span.status == "UNSET"


async def test_the_servers_fault_is_an_error(recorder):
    async with serving(fake(hold=True), tracing=recorder.tracing) as rig:
        call = rig.inference.Generate(generate("a"))
        await until(lambda: bool(rig.engine.seen))
        rig.engine.die()
        await failure_of(call)
        await until(lambda: "penstock.v1.InferenceService/Generate" in recorder.spans)
    rpc, request = (
        recorder.spans["penstock.v1.InferenceService/Generate"],
        recorder.spans["text_completion fake"],
    )
    assert rpc.attributes["rpc.response.status_code"] == "INTERNAL"
    assert (rpc.status, rpc.status_message) == ("ERROR", "ENGINE_FAILURE")
    assert request.status == "ERROR"
    assert request.attributes["error.type"] == "EngineFailure"


async def test_refused_by_the_engine_ends_the_request_span(recorder):
    async with serving(fake(max_model_len=4), tracing=recorder.tracing) as rig:
        await failure_of(rig.inference.Generate(generate("aaaaaa")))
        await until(lambda: len(recorder.spans) == 3)
    assert recorder.spans["text_completion fake"].attributes["error.type"] == "PromptTooLong"
    assert set(recorder.spans) == {
        "penstock.v1.InferenceService/Generate",
        "text_completion fake",
        "tokenize",
    }


@pytest.mark.parametrize("method", ["Generate", "Stream"])
async def test_a_cancel_is_a_cancel(recorder, method):
    """It is neither OK nor the server's error, on both spans, and the spans are ended."""
    async with serving(fake(hold=True), tracing=recorder.tracing) as rig:
        if method == "Generate":
            call = rig.inference.Generate(generate("a"))
        else:
            call = rig.inference.Stream(stream("a"))
        await until(lambda: bool(rig.engine.seen))
        rig.engine.step(2)
        await until(lambda: rig.engine.num_steps == 2)
        call.cancel()
        await until(lambda: f"penstock.v1.InferenceService/{method}" in recorder.spans)
    rpc, request = (
        recorder.spans[f"penstock.v1.InferenceService/{method}"],
        recorder.spans["text_completion fake"],
    )
    assert rpc.attributes["rpc.response.status_code"] == "CANCELLED"
    assert rpc.attributes["error.type"] == request.attributes["error.type"] == "CANCELLED"
    assert rpc.status == "UNSET"
    assert "gen_ai.response.finish_reasons" not in request.attributes


async def test_a_deadline_is_told_from_a_cancel(recorder):
    async with serving(fake(hold=True), tracing=recorder.tracing) as rig:
        # the time until the request is in the engine depends on the machine
        for timeout_s in (0.3, 3.0, 15.0):
            failure = await failure_of(rig.inference.Generate(generate("a"), timeout=timeout_s))
            assert failure.code.name == "DEADLINE_EXCEEDED"
            if rig.engine.seen:
                break
        await until(lambda: "penstock.v1.InferenceService/Generate" in recorder.spans)
    rpc = recorder.spans["penstock.v1.InferenceService/Generate"]
    assert rpc.attributes["rpc.response.status_code"] == "DEADLINE_EXCEEDED"
    assert rpc.status == "ERROR"


async def test_an_abort_is_ok(recorder):
    async with serving(fake(hold=True, max_num_seqs=1), tracing=recorder.tracing) as rig:
        first = asyncio.ensure_future(rig.inference.Generate(generate("a")))
        await until(lambda: len(rig.engine.seen) == 1)
        second = asyncio.ensure_future(rig.inference.Generate(generate("a", request_id="w")))
        await until(lambda: len(rig.engine.seen) == 2)
        await rig.inference.Abort(inference_pb2.AbortRequest(request_id_prefix="w"))
        await second
        await until(lambda: "queue" in recorder.spans)
        rig.engine.release()
        spans = recorder.spans
        await first
    assert spans["text_completion fake"].attributes["gen_ai.response.finish_reasons"] == ["aborted"]
    assert spans["queue"].end_ns > spans["queue"].start_ns
    assert not {"prefill", "decode"} & set(spans), "it never came so far"


async def test_an_abort_before_the_engine_knows_the_request_ends_its_spans(recorder, monkeypatch):
    monkeypatch.setattr(generate_module, "INLINE_CHARS", 0)
    gate = threading.Event()
    engine = fake(codec=byte_codec())
    monkeypatch.setattr(engine.text, "encode", lambda text, **_: gate.wait(20) and [*text.encode()])
    async with serving(engine, tracing=recorder.tracing) as rig:
        call = asyncio.ensure_future(rig.inference.Generate(generate("ab", request_id="w")))
        request = inference_pb2.AbortRequest(request_id_prefix="w")
        async with asyncio.timeout(20):
            while not (await rig.inference.Abort(request)).results:
                pass
        gate.set()
        await call
        await until(lambda: "penstock.v1.InferenceService/Generate" in recorder.spans)
    span = recorder.spans["text_completion fake"]
    assert span.attributes["gen_ai.response.finish_reasons"] == ["aborted"]
    assert (span.attributes["gen_ai.usage.input_tokens"], span.attributes["gen_ai.usage.output_tokens"]) == (
        2,
        0,
    )
    assert recorder.spans["tokenize"].end_ns <= span.end_ns
    assert not {"prefill", "decode"} & set(recorder.spans)
    assert not engine.seen


# -- what is recorded --


async def test_no_prompt_and_no_output_text_anywhere():
    recorder = Recorder(TraceLevel.DETAILED)
    secret = "SECRETPROMPT"
    chat = {"messages": [types_pb2.ChatMessage(role="user", content=secret)]}
    script = [*b"SECRETOUTPUT"]
    engine = fake(scripts={secret: script})
    stopping = {"stop": ["SECRETSTOP"]}
    cache = {"cache_salt": "SECRETSALT"}
    async with serving(engine, tracing=recorder.tracing) as rig:
        reply = await rig.inference.Generate(generate(secret, stopping=stopping, cache=cache))
        assert reply.outputs[0].text == "SECRETOUTPUT"
        await collect(rig.inference.Stream(stream(secret, stopping=stopping, cache=cache)))
        await rig.inference.Generate(generate(chat=chat, stopping={"max_tokens": 2}))
        await rig.control.Tokenize(control_pb2.TokenizeRequest(text=secret))
        await failure_of(rig.inference.Generate(generate(secret, stopping={"stop": [""]})))
    names = [span.name for span in recorder.finished]
    assert (names.count("text_completion fake"), names.count("chat fake")) == (2, 1)
    assert {"engine.step", "prefill_chunk", "decode_step", "penstock.v1.ControlService/Tokenize"} <= set(
        names
    )
    for span in recorder.finished:
        assert b"SECRET" not in span.proto.SerializeToString()


@pytest.mark.parametrize("seed", [2**63, 2**64 - 1])
async def test_seeds_beyond_int64_are_not_recorded(recorder, seed):
    """OTLP has only signed integers; the exporter would fail for the whole batch."""
    async with serving(tracing=recorder.tracing) as rig:
        await rig.inference.Generate(generate("y", sampling={"seed": seed}))
        await until(lambda: "text_completion fake" in recorder.spans)
    assert "gen_ai.request.seed" not in recorder.spans["text_completion fake"].attributes


async def test_health_checks_and_polls_leave_no_spans(recorder):
    """Unless a poll is part of a trace that is recorded."""
    async with serving(tracing=recorder.tracing) as rig:
        await rig.health_of()
        await rig.control.GetLoad(control_pb2.GetLoadRequest())
        unsampled = (("traceparent", f"00-{TRACE}-{PARENT}-00"),)
        await rig.control.GetLoad(control_pb2.GetLoadRequest(), metadata=unsampled)
        sampled = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
        await rig.control.GetLoad(control_pb2.GetLoadRequest(), metadata=sampled)
        await until(lambda: bool(recorder.spans))
    (span,) = recorder.finished
    assert span.name == "penstock.v1.ControlService/GetLoad"
    assert span.trace_id == TRACE
