"""A refusal leaves one line in the log, however many there are, and no line holds a secret."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from penstock.runtime.errors import InvalidRequest, NotReady, UnsupportedFeature, Violation
from penstock.service.telemetry.logs.lines import LineBudget
from penstock.service.telemetry.logs.refusals import LINES_PER_SECOND, Refusal, RefusalLog, fields_of
from penstock.v1 import control_pb2, types_pb2
from tests.service.rig import failure_of, fake, generate, serving, stream, until

SECRET = "XYZZYSECRET"
LOGGER = "penstock.service.telemetry.logs.refusals"
AUTHORIZATION = (("authorization", f"Bearer {SECRET}"),)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def test_the_budget_of_lines() -> None:
    now = 0.0
    budget = LineBudget(10, clock=lambda: now)
    assert [budget.take() for _ in range(12)] == [True] * 10 + [False] * 2
    now += 0.25
    assert [budget.take() for _ in range(4)] == [True] * 2 + [False] * 2
    now += 1000
    assert [budget.take() for _ in range(12)] == [True] * 10 + [False] * 2


def test_fields_have_no_values() -> None:
    fields = [
        "sampling.logit_bias[17]",
        "sampling.logit_bias[18]",
        "",
        "stopping.stop[3]",
        "chat.tools[secret",
    ]
    assert fields_of(InvalidRequest([Violation(field, "bad") for field in fields])) == [
        "sampling.logit_bias[]", "stopping.stop[]", "chat.tools[]"
    ]  # fmt: skip
    assert fields_of(UnsupportedFeature(["adapter"])) == ["adapter"]
    assert fields_of(NotReady()) == []
    assert len(fields_of(InvalidRequest([Violation(f"f{i}", "") for i in range(1000)]))) == 5


async def test_what_is_left_out_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    refusals = RefusalLog(clock=lambda: 0.0)
    for i in range(LINES_PER_SECOND + 7):
        refusals.tell(Refusal("a/B", "UNAVAILABLE", "BUSY", f"r{i}", "", ()))
    assert len(lines(caplog)) == LINES_PER_SECOND
    await until(lambda: len(lines(caplog)) > LINES_PER_SECOND)
    assert lines(caplog)[LINES_PER_SECOND:] == [
        "refused 7 more calls within about a second, without a line for each"
    ]


async def test_the_line_of_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    async with serving() as rig:
        bad = generate("a", request_id="mine", sampling={"top_p": 7.0, "logit_bias": {9999: 1.0}})
        await failure_of(rig.inference.Generate(bad))
        made = await failure_of(rig.inference.Stream(stream("a", model="other")).read())
        await until(lambda: len(lines(caplog)) == 2)
    first, second = lines(caplog)
    assert first == (
        "refused 'penstock.v1.InferenceService/Generate': INVALID_ARGUMENT INVALID_FIELD, request 'mine', "
        "key '', fields ['sampling.logit_bias[]', 'sampling.top_p']"
    )
    assert second == (
        "refused 'penstock.v1.InferenceService/Stream': NOT_FOUND UNKNOWN_MODEL, request "
        f"'{made.request_id}', key ''"
    )


async def test_answers_and_cancels_leave_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    async with serving(fake(hold=True)) as rig:
        call = rig.inference.Generate(generate("a"))
        silent: Any = rig.channel.stream_stream("/penstock.v1.InferenceService/Generate")()
        await until(lambda: bool(rig.engine.seen) and rig.server.admission.active_work == 2)
        call.cancel()
        silent.cancel()
        await until(lambda: rig.server.admission.active_work == 0)
        rig.engine.release()
        await rig.inference.Generate(generate("y"))
    assert lines(caplog) == []


async def test_a_flood_leaves_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    async with serving() as rig:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(failure_of(rig.inference.Generate(generate(""))) for _ in range(500)))
        took_s = loop.time() - began
        await until(lambda: any("more calls" in line for line in lines(caplog)))
    assert len([line for line in lines(caplog) if "request" in line]) <= LINES_PER_SECOND * (2 + took_s)


async def test_nothing_secret_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """At the level that logs most, for every way in which a request with a secret is refused."""
    caplog.set_level(logging.DEBUG)
    chat: dict[str, Any] = {"messages": [types_pb2.ChatMessage(role=SECRET, content=SECRET)]}
    refused = [
        generate(SECRET, stopping={"stop": ["", SECRET]}),
        generate(SECRET, model=f"{SECRET}-model"),
        generate(SECRET, cache={"cache_salt": SECRET * 100}),
        generate(SECRET, constraint={"regex": f"[{SECRET}"}),
        generate(SECRET, constraint={"json_schema": f'{{"type": "{SECRET}"}}'}),
        generate(SECRET * 100),
        generate(chat=chat),
        generate(chat=chat | {"template_options_json": SECRET}),
        generate(chat=chat | {"chat_template": "{{ raise_exception('" + SECRET + "') }}"}),
    ]
    async with serving() as rig:
        for request in refused:
            failure = await failure_of(rig.inference.Generate(request, metadata=AUTHORIZATION))
            assert failure.reason
        garbled = b"\xff" + SECRET.encode()
        call: Any = rig.channel.unary_unary("/penstock.v1.InferenceService/Generate")
        await failure_of(call(garbled, metadata=AUTHORIZATION))
        await failure_of(
            rig.control.Tokenize(
                control_pb2.TokenizeRequest(chat=types_pb2.ChatPrompt(**chat)), metadata=AUTHORIZATION
            )
        )
        await rig.inference.Generate(
            generate(SECRET[-1:], cache={"cache_salt": SECRET}), metadata=AUTHORIZATION
        )
        await until(lambda: len(lines(caplog)) >= LINES_PER_SECOND)
    assert caplog.records
    assert SECRET not in caplog.text
