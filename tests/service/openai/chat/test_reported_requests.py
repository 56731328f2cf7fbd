"""Requests that other servers got wrong, as their users reported them, are answered as they should be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.service.openai.responses.test_serving import scripted
from tests.service.openai.rig import front_rig

USER = {"role": "user", "content": "x"}
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
AMOUNT = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]}
PAY = {"type": "object", "required": ["amount"], "properties": {"amount": AMOUNT}}
PAID = '<tool_call>\n{"name": "pay", "arguments": {"amount": 3}}\n</tool_call>'
HALF = {"name": "f", "arguments": r'{"city": "\ud83d"}'}
RECORD = {
    "type": "object",
    "properties": {
        "m": {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "number"},
        }
    },
    "required": ["m"],
    "additionalProperties": False,
}
REQUESTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "pydantic-ai#5508: a forced tool has a look-ahead in a pattern": (
        {
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": "pay", "parameters": PAY}}],
            "tool_choice": "required",
        },
        "T:pay|u:x|a:",
        PAID,
    ),
    "claude-code#68325: half a pair in the arguments of an earlier call": (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "a", "type": "function", "function": HALF}],
                },
                {"role": "tool", "tool_call_id": "a", "content": "18"},
            ]
        },
        'u:x|a:<tool_call>f{"city": "�"}</tool_call>|t:18=f|a:',
        "Cloudy.",
    ),
    "vercel/ai#9601: the schema that zod makes of a record": (
        {
            "messages": [USER],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "strict": False, "schema": RECORD},
            },
        },
        "u:x|a:",
        '{"m": {"a": 1}}',
    ),
    "autogen#2457: a user has a name": (
        {"messages": [USER | {"name": "user_proxy"}]},
        "u:x|a:",
        "Hello.",
    ),
}
"""For each: the request, the prompt that its template makes of it, and what the model answers."""


@pytest.mark.parametrize("name", REQUESTS)
async def test_it_is_answered(name: str) -> None:
    request, prompt, written = REQUESTS[name]
    async with front_rig(scripted({prompt: written})) as rig:
        reply = await rig.http.post("/v1/chat/completions", json={"model": "fake", **request})
        assert reply.status_code == 200, reply.text
        message = reply.json()["choices"][0]["message"]
        if written == PAID:
            (call,) = message["tool_calls"]
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
                "pay",
                {"amount": 3},
            )
        else:
            assert message["content"] == written
