"""/v1/messages and /v1/messages/count_tokens over HTTP, before a gRPC server on the fake engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.errors import EngineFailure
from tests.service.key_rig import key, write
from tests.service.openai.messages.sent_messages import accumulated, events_of
from tests.service.openai.responses.test_serving import PARAMETERS, scripted
from tests.service.openai.rig import FrontRig, front_rig
from tests.service.rig import fake, until

HI: dict[str, Any] = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "fake", "max_tokens": 500, "messages": [HI]}
TOOL: dict[str, Any] = {"name": "get", "input_schema": PARAMETERS}
CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"
VERSION = {"anthropic-version": "2023-06-01"}


async def post(rig: FrontRig, **fields: Any) -> Any:
    """Return the reply to a request, as it came."""
    return await rig.http.post("/v1/messages", json=BODY | fields)


async def both(rig: FrontRig, **fields: Any) -> dict[str, Any]:
    """Return the message, which a stream's events come to as well, but for its id."""
    whole = await post(rig, **fields)
    assert whole.status_code == 200, whole.text
    message: dict[str, Any] = whole.json()
    streamed = accumulated(events_of((await post(rig, stream=True, **fields)).text))
    for made in (message, streamed):
        assert made.pop("id").startswith("msg_")
        for block in made["content"]:
            assert block["type"] != "tool_use" or block.pop("id")
    assert message == streamed
    return message


@pytest.mark.parametrize(
    ("written", "fields", "content", "reason"),
    [
        ("Hello, é.", {}, [{"type": "text", "text": "Hello, é."}], ("end_turn", None)),
        ("", {}, [], ("end_turn", None)),
        ("Hello, you.", {"max_tokens": 5}, [{"type": "text", "text": "Hello"}], ("max_tokens", None)),
        (
            "Hello, you.",
            {"stop_sequences": ["x", ", y"]},
            [{"type": "text", "text": "Hello"}],
            ("stop_sequence", ", y"),
        ),
        (
            THOUGHT + "Hello.",
            {},
            [
                {"type": "thinking", "thinking": "Hm.", "signature": "penstock-unsigned"},
                {"type": "text", "text": "Hello."},
            ],
            ("end_turn", None),
        ),
        (
            THOUGHT + "Hello.",
            {
                "thinking": {"type": "adaptive", "display": "omitted"},
                "messages": [{"role": "user", "content": "o"}],
            },
            [
                {"type": "thinking", "thinking": "", "signature": "penstock-reasoning:SG0u"},
                {"type": "text", "text": "Hello."},
            ],
            ("end_turn", None),
        ),
        (
            "Look." + CALL,
            {"tools": [TOOL]},
            [
                {"type": "text", "text": "Look."},
                {"type": "tool_use", "name": "get", "input": {"city": "Rome"}},
            ],
            ("tool_use", None),
        ),
        (
            CALL + CALL,
            {"tools": [TOOL]},
            [{"type": "tool_use", "name": "get", "input": {"city": "Rome"}}] * 2,
            ("tool_use", None),
        ),
        (
            CALL + CALL,
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            [{"type": "tool_use", "name": "get", "input": {"city": "Rome"}}],
            ("tool_use", None),
        ),
        (
            CALL,
            {"tools": [TOOL], "max_tokens": CALL.index('me"}') - len("tool_call>")},
            [{"type": "tool_use", "name": "get", "input": {"city": "Ro"}}],
            ("max_tokens", None),
        ),
        (
            "a" * 3000,
            {"max_tokens": 5000},
            [{"type": "text", "text": "a" * 1993}],
            ("model_context_window_exceeded", None),
        ),
    ],
    ids=[
        "text",
        "nothing",
        "max_tokens",
        "stop",
        "thinking",
        "omitted",
        "call",
        "calls",
        "one call",
        "call that is cut off",
        "context",
    ],
)
async def test_an_answer_and_its_stream(
    written: str, fields: dict[str, Any], content: list[dict[str, Any]], reason: tuple[str, str | None]
) -> None:
    prompts = ("u:hi|a:", "T:get|u:hi|a:", "u:o|a:<think>")
    scripts = dict.fromkeys(prompts, written) | {"u:o|a:<think>": written.removeprefix("<think>")}
    async with front_rig(scripted(scripts, tokens_per_step=7)) as rig:
        message = await both(rig, **fields)
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "fake")
    assert message["content"] == content
    assert (message["stop_reason"], message["stop_sequence"]) == reason


async def test_a_stream_tells_each_delta_and_a_call_in_order() -> None:
    async with front_rig(scripted({"T:get|u:hi|a:": THOUGHT + "Yes." + CALL})) as rig:
        sent = (await post(rig, tools=[TOOL], stream=True)).text
    told = [
        (event["type"], event.get("index"), event.get("delta", {}).get("type")) for event in events_of(sent)
    ]
    assert [one for i, one in enumerate(told) if told[i - 1 : i] != [one]] == [
        ("message_start", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]


async def test_usage_tells_what_was_in_the_cache() -> None:
    async with front_rig(scripted({"u:hi|a:": THOUGHT + "Hi."}, page_size=1, cached=["u:h"])) as rig:
        message = (await post(rig)).json()
        (started, *_) = events_of((await post(rig, stream=True)).text)
    assert message["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 13,  # the tags of the thinking are one token each, and the end is one
        "output_tokens_details": {"thinking_tokens": 7},
    }
    assert started["message"]["usage"]["input_tokens"] == 7


async def test_an_agent_calls_a_tool_and_goes_on() -> None:
    told = 'T:get|u:hi|a:Look.<tool_call>get{"city": "Rome"}</tool_call>|t:Error:\n28=get|a:'
    async with front_rig(scripted({"T:get|u:hi|a:": "Look." + CALL, told: "It is warm."})) as rig:
        message = (await post(rig, tools=[TOOL])).json()
        (call,) = (block for block in message["content"] if block["type"] == "tool_use")
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "28", "is_error": True}
        turns = [
            HI,
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": [result]},
        ]
        last = (await post(rig, tools=[TOOL], messages=turns)).json()
    assert last["content"] == [{"type": "text", "text": "It is warm."}]


async def test_a_schema_is_followed() -> None:
    async with front_rig(scripted({"u:hi|a:": '{"city": "Rome"} and more'})) as rig:
        message = await both(rig, output_config={"format": {"type": "json_schema", "schema": PARAMETERS}})
    assert message["content"] == [{"type": "text", "text": '{"city": "Rome"}'}]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "u:hi|a:"),
        ({"system": "s", "tools": [TOOL]}, "T:get|s:s|u:hi|a:"),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, "u:hi|a:"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "u:hi|a:<think>"),
    ],
)
async def test_tokens_are_counted_as_those_of_the_prompt(fields: dict[str, Any], prompt: str) -> None:
    """Each byte is a token, and so is the tag."""
    async with front_rig(scripted({}, page_size=1, cached=["u:", "T:"])) as rig:
        body = {name: value for name, value in (BODY | fields).items() if name != "max_tokens"}
        told = (await rig.http.post("/v1/messages/count_tokens", json=body)).json()
        usage = (await post(rig, **fields)).json()["usage"]
    assert told == {"input_tokens": len(prompt.replace("<think>", "T"))}
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == told["input_tokens"]


async def test_counting_asks_for_a_conversation_of_the_model() -> None:
    async with front_rig() as rig:
        for body, status in ((BODY, 400), ({"model": "other", "messages": [HI]}, 404)):
            reply = await rig.http.post("/v1/messages/count_tokens", json=body)
            assert reply.status_code == status, reply.text


def envelope_of(reply: Any) -> tuple[int, str]:
    """Return the status and the type of an error, whose envelope must be Anthropic's."""
    told = reply.json()
    assert told.keys() == {"type", "error", "request_id"}
    assert told["type"] == "error"
    assert told["error"].keys() == {"type", "message"}
    assert told["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    return reply.status_code, told["error"]["type"]


async def test_errors_have_anthropics_envelope_wherever_they_arise() -> None:
    settings = {"max_body_bytes": 2000, "max_waiting_body_bytes": 2000}
    json_type = {"content-type": "application/json"}
    async with front_rig(settings=settings) as rig:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            asked: list[tuple[str, dict[str, Any], tuple[int, str]]] = [
                ("POST", {"content": "{", "headers": json_type}, (400, "invalid_request_error")),
                ("POST", {"content": "{}"}, (415, "invalid_request_error")),
                ("POST", {"json": {}}, (400, "invalid_request_error")),
                ("POST", {"json": {"x": "y" * 3000}}, (413, "request_too_large")),
                ("GET", {}, (405, "invalid_request_error")),
            ]
            for method, content, expected in asked:
                assert envelope_of(await rig.http.request(method, path, **content)) == expected, content
        assert envelope_of(await post(rig, model="x")) == (404, "not_found_error")
        thread = await post(rig, thread={"type": "create"})
        assert thread.json()["error"].pop("details")["error_code"] == "thread_unsupported_request"
        unknown = await rig.http.post("/v1/messages/batches", json={})
        assert envelope_of(unknown) == (404, "not_found_error")
        too_long = await post(rig, messages=[{"role": "user", "content": "x" * 100}])
        assert envelope_of(too_long) == (400, "invalid_request_error")
        assert "prompt is too long: 103 tokens > 63 maximum" in too_long.json()["error"]["message"]
        rig.engine.die("the device is gone")
        assert envelope_of(await post(rig)) == (503, "overloaded_error")
        await rig.front.life.drain(0.0)
        draining = await post(rig)
        assert envelope_of(draining) == (503, "overloaded_error")
        assert draining.headers["retry-after"]


async def test_keys_come_in_anthropics_header(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys.json", [key("one"), key("slow", requests_per_minute=1)])
    async with front_rig(scripted({}), keys=keys, settings={"token": "psk_one"}) as rig:

        async def status(**headers: str) -> tuple[int, str]:
            reply = await rig.http.post("/v1/messages", json=BODY, headers=headers)
            return (200, "") if reply.status_code == 200 else envelope_of(reply)

        assert await status(**{"x-api-key": "psk_one"}) == (200, "")
        assert await status(**{"x-api-key": "psk_other"}) == (401, "authentication_error")
        assert await status(**{"x-api-key": "psk_other", "authorization": "Bearer psk_one"}) == (200, "")
        assert await status(**{"x-api-key": "psk_slow"}) == (200, "")
        assert await status(**{"x-api-key": "psk_slow"}) == (429, "rate_limit_error")


async def test_a_failure_after_the_first_event_is_the_last_one() -> None:
    async with (
        front_rig(scripted({"u:hi|a:": "Hello."}, hold=True)) as rig,
        rig.http.stream("POST", "/v1/messages", json=BODY | {"stream": True}) as reply,
    ):
        await until(lambda: len(rig.engine.seen) == 1)
        rig.engine.fail(rig.engine.seen[0].request_id, EngineFailure("broken"))
        events = events_of((await reply.aread()).decode())
    assert reply.status_code == 200
    assert [event["type"] for event in events] == ["message_start", "error"]
    error = events[-1]
    assert error.keys() == {"type", "error", "request_id"}
    assert (error["error"]["type"], error["request_id"]) == ("api_error", reply.headers["request-id"])


async def test_an_aborted_request_is_no_answer() -> None:
    async with front_rig(scripted({"u:hi|a:": "Hello."}, hold=True)) as rig:
        asking = asyncio.create_task(post(rig))
        await until(lambda: len(rig.engine.seen) == 1)
        rig.engine.abort(prefix="msg_", message="enough")
        reply = await asking
    assert envelope_of(reply) == (503, "overloaded_error")
    assert reply.headers["x-should-retry"] == "false"


async def test_models_have_the_form_of_the_api_that_the_caller_speaks() -> None:
    async with front_rig(fake(max_model_len=77)) as rig:
        page = (await rig.http.get("/v1/models?limit=1000", headers=VERSION)).json()
        (model,) = page.pop("data")
        assert page == {"first_id": "fake", "last_id": "fake", "has_more": False}
        assert (model["type"], model["id"], model["display_name"]) == ("model", "fake", "fake")
        assert model["max_input_tokens"] == 77
        assert (await rig.http.get("/v1/models/fake", headers=VERSION)).json() == model
        rest = (await rig.http.get("/v1/models?after_id=fake", headers=VERSION)).json()
        assert rest == {"data": [], "first_id": None, "last_id": None, "has_more": False}
        assert envelope_of(await rig.http.get("/v1/models/x", headers=VERSION)) == (404, "not_found_error")
        assert (await rig.http.get("/v1/models")).json()["object"] == "list"


async def test_the_header_names_what_had_no_effect_and_metrics_the_endpoint() -> None:
    async with front_rig(scripted({})) as rig:
        reply = await post(
            rig, metadata={"user_id": "u"}, tools=[{"type": "web_search_20250305", "name": "w"}]
        )
        page = (await rig.http.get("/metrics")).text
    assert reply.headers["x-penstock-ignored"] == "metadata, tools[].web_search"
    assert 'penstock_openai_requests_total{code="",endpoint="/v1/messages",status="200"} 1.0' in page
