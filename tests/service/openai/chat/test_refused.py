"""What /v1/chat/completions refuses, with OpenAI's envelope and the name of the field, and how a stream ends
that fails midway.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from penstock.runtime.errors import EngineFailure
from tests.service.codecs import QWEN_VOCAB, qwen_codec
from tests.service.openai.rig import front_rig
from tests.service.rig import fake, until
from tests.support.models.byte_text import EOS

HI: Any = [{"role": "user", "content": "hi"}]


def user(*parts: Any) -> Any:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def tool(**function: Any) -> Any:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


def custom(form: Any) -> Any:
    return {"tools": [{"type": "custom", "custom": {"name": "f", "format": form}}]}


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PNG_URL = "data:image/png;base64,iVBORw0KGgo="
CASES: Any = [
    ({"foo": 1}, "foo", "unknown_parameter"),
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "unsupported_value"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "unknown_parameter"),
    (
        user({"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}),
        "messages[0].content[1].image_url.url",
        "invalid_value",
    ),
    (
        user({"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}),
        "messages[0].content[0].image_url.url",
        "invalid_value",
    ),
    (
        user({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}),
        "messages[0].content[0].image_url.detail",
        "unsupported_value",
    ),
    (user({"type": "image_url"}), "messages[0].content[0].image_url", "missing_required_parameter"),
    (
        user({"type": "text", "text": "a", "image_url": {"url": "data:image/png;base64,AAAA"}}),
        "messages[0].content[0].image_url",
        "invalid_value",
    ),
    (
        user({"type": "input_audio", "input_audio": {}}),
        "messages[0].content[0].input_audio",
        "unsupported_parameter",
    ),
    (user({"type": "file", "file": {}}), "messages[0].content[0].file", "unsupported_parameter"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"function_call": {"name": "f"}}, "function_call", "unsupported_parameter"),
    ({"audio": {}}, "audio", "unsupported_parameter"),
    ({"modalities": ["audio"]}, "modalities[0]", "unsupported_value"),
    ({"echo": True}, "echo", "unsupported_parameter"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"length_penalty": True}, "length_penalty", "unsupported_parameter"),
    ({"use_beam_search": 0}, "use_beam_search", "unsupported_parameter"),
    ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
    ({"tools": [{"type": "telepathy"}]}, "tools[0].type", "unsupported_value"),
    (custom({"type": "grammar"}), "tools[0].custom.format.grammar", "missing_required_parameter"),
    (
        custom({"type": "text", "grammar": {"syntax": "regex", "definition": "a"}}),
        "tools[0].custom.format.grammar",
        "invalid_value",
    ),
    (
        custom({"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: A"}}),
        "tools[0].custom.format.grammar.syntax",
        "unsupported_value",
    ),
    (tool(parameters="x"), "tools[0].function.parameters", "invalid_type"),
    ({"tool_choice": "maybe", **tool()}, "tool_choice", "unsupported_value"),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}, **tool()},
        "tool_choice.allowed_tools.mode",
        "missing_required_parameter",
    ),
    (
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]},
            },
            **tool(),
        },
        "tool_choice.allowed_tools.tools[0].function.name",
        "invalid_value",
    ),
    ({"messages": HI * 10_001}, "messages", "invalid_value"),
    (
        {"messages": HI + 11 * [{"role": "assistant", "tool_calls": [CALL] * 1000}]},
        "messages",
        "invalid_value",
    ),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 1001}, "tools", "invalid_value"),
    ({"reasoning_effort": "wild"}, "reasoning_effort", "unsupported_value"),
    ({"n": True}, "n", "invalid_type"),
    ({"n": 1.5}, "n", "invalid_type"),
    ({"temperature": "1"}, "temperature", "invalid_type"),
    ({"stop": [1]}, "stop[0]", "invalid_type"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        None,
    ),
    ({"response_format": {"type": "grammar"}}, "response_format.type", "unsupported_value"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        "response_format.json_schema.schema",
        "missing_required_parameter",
    ),
    (
        {"structured_outputs": {"structural_tag": "x"}},
        "structured_outputs.structural_tag",
        "unknown_parameter",
    ),
    # Found by the server, and told by the name in the body.
    (
        user({"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": PNG_URL}}),
        "messages[0].content",
        "unsupported_parameter",
    ),
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "invalid_value"),
    ({"stop": ["x"] * 17}, "stop", "invalid_value"),
    ({"logit_bias": {"9999": 1}}, "logit_bias", "invalid_value"),
    ({"stop_token_ids": [9999]}, "stop_token_ids", "invalid_value"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", "invalid_value"),
    ({"priority": 2**31 + 1}, "priority", "invalid_value"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "invalid_value"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "invalid_value"),
    ({"guided_choice": []}, "guided_choice", "invalid_value"),
    ({"guided_json": {"type": "x"}}, "guided_json", "invalid_value"),
    ({"ebnf": "root ::= ("}, "ebnf", "invalid_value"),
    ({"guided_decoding_backend": 7}, "guided_decoding_backend", "invalid_type"),
    (
        {"guided_decoding_backend": "xgrammar:no-fallback,disable-any-whitespace"},
        "guided_decoding_backend",
        "unsupported_value",
    ),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "unsupported_parameter"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "x"}}}},
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    (tool(name=""), "tools[0].function.name", "invalid_value"),
    (tool(parameters={"type": "array"}), "tools[0].function.parameters", "invalid_value"),
    (
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]},
        "messages[0].tool_call_id",
        "invalid_value",
    ),
    ({"messages": [{"role": "user", "content": "x" * 1000}]}, "messages", "context_length_exceeded"),
]


async def test_each_has_the_name_of_its_field() -> None:
    async with front_rig(fake(codec=qwen_codec(), vocab_size=QWEN_VOCAB)) as rig:
        for fields, param, code in CASES:
            body = {"model": "fake", "messages": HI, "max_tokens": 1, **fields}
            if "max_completion_tokens" in fields:
                del body["max_tokens"]
            reply = await rig.http.post("/v1/chat/completions", json=body)
            error = reply.json()["error"]
            assert (reply.status_code, error["type"]) == (400, "invalid_request_error"), fields
            assert (error["param"] or "").startswith(param), (fields, error)
            assert error["code"] == code or code is None, (fields, error)
            assert param in error["message"] or code == "context_length_exceeded", (fields, error)


async def test_another_model() -> None:
    async with front_rig() as rig:
        with pytest.raises(openai.NotFoundError) as caught:
            await rig.openai.chat.completions.create(model="other", messages=HI)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_a_failure_midway_is_the_last_event() -> None:
    async with front_rig(fake(hold=True, scripts={"u:hi|": [*b"ab", EOS]})) as rig:
        stream: Any = await rig.openai.chat.completions.create(model="fake", messages=HI, stream=True)
        rig.engine.step(2)
        texts = ""
        while texts != "ab":
            texts += (await anext(stream)).choices[0].delta.content
        rig.engine.die("the device is gone")
        with pytest.raises(openai.APIError, match="the device is gone"):
            await anext(stream)


async def test_a_raw_failure_midway() -> None:
    async with front_rig(fake(hold=True, scripts={"u:hi|": [*b"ab", EOS]})) as rig:
        body = {"model": "fake", "messages": HI, "stream": True, "request_id": "1"}
        async with rig.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            await until(lambda: len(rig.engine.seen) == 1)
            rig.engine.fail("chatcmpl-1", EngineFailure("broken"))
            events = (await reply.aread()).decode().split("\n\n")
    assert reply.status_code == 200
    assert events[-1] == ""
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "server_error"
