"""/v1/responses over HTTP, called with openai's own client, before a gRPC server on the fake engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.responses import Response, ResponseFailedEvent, ResponseTextDeltaEvent
from pydantic import BaseModel

from penstock.openai.routes.responses import writing
from tests.service.codecs import MARKERS, QWEN_TEMPLATE, QWEN_VOCAB, byte_codec
from tests.service.openai.responses.sent_events import accumulated, events_of
from tests.service.openai.rig import FrontRig, front_rig
from tests.service.rig import WAIT_S, fake, until

# Ids of calls are new each time, so prompts to which scripts belong must not have them.
TEMPLATE = QWEN_TEMPLATE.replace("#{{ c.id }}", "").replace("#{{ m.tool_call_id }}", "")
TEMPLATE = TEMPLATE.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}", 1)
CODEC = byte_codec(TEMPLATE, MARKERS)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "get", "parameters": PARAMETERS, "strict": True}
CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call>'


def scripted(scripts: dict[str, str], **options: Any) -> Any:
    """Make an engine that writes these texts, which may hold markers, to these prompts."""
    tokens = {prompt: CODEC.encode(text, add_special_tokens=False) for prompt, text in scripts.items()}
    return fake(
        **{"codec": CODEC, "vocab_size": QWEN_VOCAB, "max_model_len": 2000, "scripts": tokens, **options}
    )


async def post(rig: FrontRig, **fields: Any) -> Any:
    """Return the reply to a request, as it came."""
    return await rig.http.post("/v1/responses", json={"model": "fake", "input": "hi", **fields})


async def test_a_text_is_answered() -> None:
    async with front_rig(scripted({"s:Be brief.|u:hi|a:": "Hello."})) as rig:
        response = await rig.openai.responses.create(model="fake", input="hi", instructions="Be brief.")
        assert (response.output_text, response.status, response.model) == ("Hello.", "completed", "fake")
        assert response.usage is not None
        assert (response.usage.input_tokens, response.usage.output_tokens) == (19, 7)
        assert [request.request_id for request in rig.engine.seen] == [response.id]
        assert response.id.startswith("resp_")


async def test_a_stream_comes_to_the_same_answer() -> None:
    async with front_rig(scripted({"u:hi|a:": "<think>\nHm.\n</think>\n\nHello, é."})) as rig:
        whole = (await post(rig)).json()
        streamed = accumulated(events_of((await post(rig, stream=True)).text))
        assert [item["content"][0]["text"] for item in whole["output"]] == ["Hm.", "Hello, é."]
        for response in (whole, streamed):
            response["output"] = [{**item, "id": ""} for item in response["output"]]
            for name in ("id", "created_at", "completed_at"):
                response.pop(name)
        assert whole == streamed
        async with rig.openai.responses.stream(model="fake", input="hi") as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(deltas) == final.output_text == "Hello, é."


async def test_answers_are_as_the_front_describes_them() -> None:
    async with front_rig(scripted({"u:hi|a:": "Hello."})) as rig:
        components = (await rig.http.get("/openapi.json")).json()["components"]
        whole = (await post(rig)).json()
        events = events_of((await post(rig, stream=True)).text)
    for name, values in {"Response": [whole], "ResponseEvent": events}.items():
        schema = {"$ref": f"#/components/schemas/{name}", "components": components}
        for value in values:
            jsonschema.Draft202012Validator(schema).validate(value)


class Place(BaseModel):
    city: str


async def test_a_format_is_parsed() -> None:
    async with front_rig(scripted({"u:hi|a:": '{"city": "Rome"}'})) as rig:
        parsed = await rig.openai.responses.parse(model="fake", input="hi", text_format=Place)
        assert parsed.output_parsed == Place(city="Rome")
        async with rig.openai.responses.stream(model="fake", input="hi", text_format=Place) as stream:
            assert (await stream.get_final_response()).output_parsed == Place(city="Rome")


async def test_logprobs_spell_the_text_and_not_the_reasoning() -> None:
    """Every token of the fake engine is a byte. Its values are those of the same request in gRPC."""
    fields: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    async with front_rig(scripted({"u:hi|a:": "<think>\nHm.\n</think>\n\nHi, é."})) as rig:
        whole = (await post(rig, **fields)).json()["output"][1]["content"][0]
        events = events_of((await post(rig, stream=True, **fields)).text)
        client = rig.front.backend.client
        grpc = await client.generate(messages=[{"role": "user", "content": "hi"}], logprobs=1)
    assert bytes(byte for entry in whole["logprobs"] for byte in entry["bytes"]) == "Hi, é.".encode()
    assert grpc.logprobs is not None
    values = list(grpc.logprobs.sampled)[-8:-1]  # the text is followed by the end token
    assert [entry["logprob"] for entry in whole["logprobs"]] == values
    assert [len(entry["top_logprobs"]) for entry in whole["logprobs"]] == [1] * 7
    assert accumulated(events)["output"][1]["content"][0] == whole
    sent = [
        entry
        for event in events
        if event["type"].endswith("text.delta")
        for entry in event.get("logprobs", ())
    ]
    assert sent == whole["logprobs"]


async def test_too_many_logprobs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MOST_ENTRIES", 10)
    fields: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    async with front_rig(scripted({"u:hi|a:": "Hi there."})) as rig:
        whole = await post(rig, **fields)
        events = events_of((await post(rig, stream=True, **fields)).text)
        enough = await post(rig, **fields, max_output_tokens=5)
    assert (whole.status_code, whole.json()["error"]["code"]) == (400, "response_too_large")
    assert events[-1]["type"] == "response.failed"
    assert "ask for fewer" in accumulated(events)["error"]["message"]
    assert len(enough.json()["output"][0]["content"][0]["logprobs"]) == 5


async def test_an_agent_with_a_form_calls_its_tool_and_then_answers_in_that_form() -> None:
    """Agents with an output type send tools and a form together."""
    called = '<tool_call>get{"city": "Rome"}</tool_call>'
    scripts = {"T:get|u:hi|a:": CALL, f"T:get|u:hi|a:{called}|t:28=get|a:": '{"city": "Rome"}'}
    async with front_rig(scripted(scripts)) as rig:
        fields: Any = {"model": "fake", "tools": [TOOL], "text_format": Place}
        items: list[Any] = [{"role": "user", "content": "hi"}]
        first = await rig.openai.responses.parse(input=items, **fields)
        (call,) = first.output
        assert call.type == "function_call"
        assert call.parsed_arguments == {"city": "Rome"}
        items += first.output
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "28"})
        second = await rig.openai.responses.parse(input=items, **fields)
        assert second.output_parsed == Place(city="Rome")


@pytest.mark.parametrize("streams", [False, True])
async def test_an_agent_calls_a_tool_and_goes_on(streams: bool) -> None:
    """All items of an answer are sent back as they came, as agents do."""
    called = '<tool_call>get{"city": "Rome"}</tool_call>'
    scripts = {
        "T:get|u:hi|a:": f"<think>\nHm.\n</think>\n\nI look.\n{CALL}",
        f"T:get|u:hi|a:Hm.I look.{called}|t:28=get|a:": "It is warm.",
    }
    async with front_rig(scripted(scripts)) as rig:

        async def answer(items: list[Any]) -> Response:
            asked: Any = {"model": "fake", "input": items, "tools": [TOOL]}
            if not streams:
                whole: Response = await rig.openai.responses.create(**asked)
                return whole
            async with rig.openai.responses.stream(**asked) as stream:
                return await stream.get_final_response()

        items: list[Any] = [{"role": "user", "content": "hi"}]
        first = await answer(items)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        (call,) = (item for item in first.output if item.type == "function_call")
        assert (call.name, json.loads(call.arguments)) == ("get", {"city": "Rome"})
        items += [item.model_dump() for item in first.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "28"})
        assert (await answer(items)).output_text == "It is warm."


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": [{"role": "user", "content": "x"}] * 20_001}, "input", "invalid_value"),
    ({"tools": [TOOL] * 1001}, "tools", "invalid_value"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "unsupported_value"),
    ({"frobnicate": 1}, "frobnicate", "unknown_parameter"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
    ({"reasoning": {"context": "all_turns"}}, "reasoning.context", "unsupported_parameter"),
    ({"input": 5}, "input", "invalid_type"),
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name", "missing_required_parameter"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "unsupported_value"),
    ({"temperature": 300}, "temperature", "invalid_value"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    (
        {"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]},
        "input[0].call_id",
        "invalid_value",
    ),
    ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools[0].parameters", "invalid_value"),
]


@pytest.mark.parametrize("streams", [False, True])
async def test_what_is_wrong_is_named_before_a_stream_begins(streams: bool) -> None:
    async with front_rig(scripted({})) as rig:
        for fields, param, code in REFUSED:
            reply = await post(rig, stream=streams, **fields)
            error = reply.json()["error"]
            assert (reply.status_code, error["param"], error["code"]) == (400, param, code), error["message"]
        reply = await post(rig, stream=streams, model="other")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


async def test_an_output_at_its_limit_is_incomplete() -> None:
    async with front_rig(scripted({"u:hi|a:": "Hello."})) as rig:
        response = await rig.openai.responses.create(model="fake", input="hi", max_output_tokens=3)
        assert (response.output_text, response.status) == ("Hel", "incomplete")
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"


async def test_a_failure_midway_is_told_once_and_ends_the_stream() -> None:
    """openai's client gives the caller the event "response.failed", and then the stream is over."""
    engine = scripted({"u:hi|a:": "Hello, you."}, hold=True)
    async with front_rig(engine) as rig, asyncio.timeout(3 * WAIT_S):
        stream = await rig.openai.responses.create(model="fake", input="hi", stream=True)
        engine.step(5)
        events = []
        async for event in stream:
            events.append(event)
            if isinstance(event, ResponseTextDeltaEvent):
                engine.die()
        last = events[-1]
        assert isinstance(last, ResponseFailedEvent)
        assert last.response.error is not None
        assert (last.response.status, last.response.error.code) == ("failed", "server_error")
        assert last.response.output_text
        assert sum(event.type == "response.failed" for event in events) == 1


async def test_an_aborted_request_is_no_answer() -> None:
    engine = scripted({"u:hi|a:": "Hello, you."}, hold=True)
    async with front_rig(engine) as rig, asyncio.timeout(3 * WAIT_S):
        whole = asyncio.create_task(rig.openai.responses.create(model="fake", input="hi"))
        await until(lambda: len(engine.seen) == 1)
        engine.abort(all_requests=True)
        with pytest.raises(openai.InternalServerError, match="aborted"):
            await whole
