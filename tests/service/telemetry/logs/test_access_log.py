"""A call has one line in the log, and never two: of the access log, or of its refusal."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

import grpc
import pytest

from penstock.service.telemetry.logs import access_log, refusals
from penstock.service.telemetry.logs.access_log import AccessLine, AccessLog
from penstock.service.telemetry.logs.spans import ids_of, note_span
from penstock.service.telemetry.options import TraceLevel
from penstock.service.telemetry.tracing.service_spans import CURRENT_RPC
from penstock.service.usage.meter import Course, Outcome, Usage
from penstock.shared.logs import JsonLines, OneLine
from penstock.v1 import control_pb2
from tests.service.rig import collect, failure_of, fake, generate, serving, stream, until
from tests.support.otlp import Recorder

ACCESS, REFUSED = access_log.LOGGER, "penstock.service.telemetry.logs.refusals"
GENERATE, STREAM = "penstock.v1.InferenceService/Generate", "penstock.v1.InferenceService/Stream"
SECRET = "xyzzy"
SECONDS = re.compile(r"\d+\.\d{3} s")


@pytest.fixture(autouse=True)
def level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def lines(caplog: pytest.LogCaptureFixture, logger: str = ACCESS) -> list[str]:
    """Return the lines of a log, with S for each time."""
    messages = [record.getMessage() for record in caplog.records if record.name == logger]
    return [SECONDS.sub("S", message) for message in messages]


def access_lines(caplog: pytest.LogCaptureFixture) -> list[AccessLine]:
    return [record.msg for record in caplog.records if isinstance(record.msg, AccessLine)]


async def test_the_line_of_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(fake(page_size=1, cached=["ab", "x"])) as rig:
        await rig.inference.Generate(generate("abc", request_id="r", stopping={"max_tokens": 4}))
        await collect(rig.inference.Stream(stream("xy", request_id="s", sampling={"n": 3})))
    assert lines(caplog) == [
        (
            f"answered '{GENERATE}': OK after S, request 'r', key '', first token after S, "
            "tokens: 3 of the prompt, 2 of them cached, 4 generated, finished by max_tokens"
        ),
        (
            f"answered '{STREAM}': OK after S, request 's', key '', first token after S, "
            "tokens: 2 of the prompt, 1 of them cached, 65 generated, finished by 2 eos, context_full"
        ),
    ]
    for line in access_lines(caplog):
        assert line.course.first_token_s is not None
        assert 0 < line.course.first_token_s <= line.course.seconds
    assert lines(caplog, REFUSED) == []


async def test_a_refused_call_has_the_line_of_its_refusal_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as rig:
        await failure_of(rig.inference.Generate(generate("a", sampling={"top_p": 7.0})))
        await failure_of(rig.inference.Stream(stream("a", model="other")).read())
        await until(lambda: len(lines(caplog, REFUSED)) == 2)
    assert lines(caplog) == []


async def test_a_call_that_fails_later_has_the_line_of_the_access_log_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(fake(hold=True)) as rig:
        call = rig.inference.Generate(generate("abc", request_id="r"))
        await until(lambda: bool(rig.engine.seen))
        rig.engine.die()
        await failure_of(call)
        await until(lambda: bool(lines(caplog)))
    (line,) = lines(caplog)
    assert line == (
        f"failed '{GENERATE}': INTERNAL ENGINE_FAILURE after S, request 'r', key '', "
        "tokens: 3 of the prompt, 0 of them cached, 0 generated"
    )
    assert lines(caplog, REFUSED) == []


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_whose_client_has_gone(caplog: pytest.LogCaptureFixture, streamed: bool) -> None:
    async with serving(fake(hold=True)) as rig:
        if streamed:
            call = rig.inference.Stream(stream("abc", request_id="r"))
        else:
            call = rig.inference.Generate(generate("abc", request_id="r"))
        await until(lambda: bool(rig.engine.seen))
        call.cancel()
        await until(lambda: bool(lines(caplog)))
    (line,) = lines(caplog)
    assert line.startswith(f"vanished '{STREAM if streamed else GENERATE}': CANCELLED after S, request 'r'")


async def test_a_call_whose_deadline_has_passed(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(fake(hold=True)) as rig:
        for timeout_s in (0.3, 3.0, 15.0):  # a busy machine may need longer until the engine has it
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await rig.inference.Generate(generate("abc"), timeout=timeout_s)
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if rig.engine.seen:
                break
        await until(lambda: bool(lines(caplog)))
    assert lines(caplog)[0].startswith(f"vanished '{GENERATE}': DEADLINE_EXCEEDED after S, request")


async def test_without_an_access_log_an_error_still_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(fake(hold=True), access_log=False) as rig:
        call = rig.inference.Generate(generate("abc", request_id="r"))
        await until(lambda: bool(rig.engine.seen))
        rig.engine.die()
        await failure_of(call)
        await until(lambda: bool(lines(caplog, REFUSED)))
    assert lines(caplog) == []
    assert lines(caplog, REFUSED) == [f"refused '{GENERATE}': INTERNAL ENGINE_FAILURE, request 'r', key ''"]


async def test_other_rpcs_have_no_line(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as rig:
        await rig.control.Tokenize(control_pb2.TokenizeRequest(text="abc"))
        await rig.control.GetLoad(control_pb2.GetLoadRequest())
    assert lines(caplog) == lines(caplog, REFUSED) == []


async def test_a_flood_has_few_lines_and_the_rest_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    log = AccessLog(clock=lambda: 0.0)
    usage = Usage("", GENERATE, "r", Outcome.ANSWERED)
    course = Course("OK", 0.5, None, ())
    assert all(log.tell(usage, course) for _ in range(access_log.LINES_PER_SECOND + 7))
    await until(lambda: len(lines(caplog)) > access_log.LINES_PER_SECOND)
    assert lines(caplog)[access_log.LINES_PER_SECOND :] == [
        "7 more calls ended within about a second, without a line for each"
    ]


async def test_the_count_of_lines_that_were_left_out_belongs_to_no_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Recorder(TraceLevel.REQUESTS)
    span = recorder.tracing.provider.get_tracer("test").start_span("call")
    CURRENT_RPC.set(span)  # this test's task serves a call that is recorded
    caplog.handler.addFilter(note_span)
    try:
        log = AccessLog(clock=lambda: 0.0)
        usage, course = Usage("", GENERATE, "r", Outcome.ANSWERED), Course("OK", 0.5, None, ())
        for _ in range(access_log.LINES_PER_SECOND + 1):
            log.tell(usage, course)
        await until(lambda: len(lines(caplog)) > access_log.LINES_PER_SECOND)
    finally:
        caplog.handler.removeFilter(note_span)
    of_log = [ids_of(record) for record in caplog.records if record.name == ACCESS]
    assert of_log[0]["span_id"]
    assert of_log[-1] == {}


async def test_nothing_that_a_caller_wrote_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving() as rig:
        await rig.inference.Generate(
            generate(SECRET, stopping={"stop": [SECRET]}, cache={"cache_salt": SECRET}),
            metadata=(("authorization", f"Bearer {SECRET}"),),
        )
    assert len(lines(caplog)) == 1
    said = caplog.text + json.dumps([dict(line.fields()) for line in access_lines(caplog)])
    assert SECRET not in said


def test_ids_are_quoted_and_cut() -> None:
    usage = Usage("k" * 500, STREAM, "forged'\n" + "r" * 500, Outcome.VANISHED)
    line = AccessLine(usage, Course("CANCELLED", 0.5, None, ()))
    assert "forged'\\n" in str(line)
    assert "\n" not in str(line)
    assert len(str(line)) < 600
    assert all(len(str(value)) <= 128 for value in line.fields().values())


async def test_lines_name_the_trace_of_a_call_that_is_recorded() -> None:
    """In both formats, and only of such a call."""
    said: list[tuple[str, dict[str, Any]]] = []

    class Formats(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append((OneLine(ids_of).format(record), json.loads(JsonLines(ids_of).format(record))))

    handler = Formats()
    handler.addFilter(note_span)
    logger = logging.getLogger("penstock")
    logger.addHandler(handler)
    recorder = Recorder(TraceLevel.REQUESTS)
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    try:
        async with serving(tracing=recorder.tracing) as rig:
            for flags, name in (("01", "sampled"), ("00", "not")):
                metadata = (("traceparent", f"00-{trace}-{parent}-{flags}"),)
                await rig.inference.Generate(generate("y", request_id=name), metadata=metadata)
            await failure_of(
                rig.inference.Generate(
                    generate("y", model="x"), metadata=(("traceparent", f"00-{trace}-{parent}-01"),)
                )
            )
            await until(lambda: len(said) == 3)
            await until(lambda: len(recorder.named(GENERATE)) == 2)
    finally:
        logger.removeHandler(handler)
    (text, fields), (plain, without), (refused, of_refusal) = said
    assert text.endswith(f", trace {trace}")
    assert fields["trace_id"] == of_refusal["trace_id"] == trace
    assert {fields["span_id"], of_refusal["span_id"]} == {span.span_id for span in recorder.named(GENERATE)}
    assert trace not in plain
    assert "trace_id" not in without
    assert refused.endswith(f", trace {trace}")
    assert {name: fields[name] for name in ("outcome", "method", "request_id", "key", "code", "reason")} == {
        "outcome": "answered",
        "method": GENERATE,
        "request_id": "sampled",
        "key": "",
        "code": "OK",
        "reason": "",
    }
    assert fields["finish_reasons"] == {"eos": 1}
    assert (fields["prompt_tokens"], fields["cached_prompt_tokens"], fields["generated_tokens"]) == (1, 0, 2)
    assert of_refusal["code"] == "NOT_FOUND"
    assert of_refusal["fields"] == []
    assert refusals.LINES_PER_SECOND < access_log.LINES_PER_SECOND


async def test_many_calls_at_once_have_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as rig:
        await asyncio.gather(
            *(rig.inference.Generate(generate("y", request_id=f"r{i}")) for i in range(50)),
            *(collect(rig.inference.Stream(stream("y", request_id=f"s{i}"))) for i in range(50)),
        )
    assert {line.usage.request_id for line in access_lines(caplog)} == {
        *(f"r{i}" for i in range(50)),
        *(f"s{i}" for i in range(50)),
    }
    assert len(lines(caplog)) == 100
