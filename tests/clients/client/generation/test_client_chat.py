"""Turns, tools and calls: converted to the contract's messages, made from mappings, and used in a
tool loop.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from penstock.client import ChatMessage, ChatOptions, InvalidRequest, RequestOptions, Tool, ToolCall
from penstock.client.generation.requests import chat_prompt, fill_request
from penstock.v1 import inference_pb2, types_pb2

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OPENAI_TOOL = {"type": "function", "function": {"name": "f", "description": "adds", "parameters": WEATHER}}


def prompt_of(**options):
    return chat_prompt(cast(ChatOptions, options))


def parsed(text):
    return text_format.Parse(text, types_pb2.ChatPrompt())


def test_all_of_a_conversation():
    options = {
        "messages": [
            {"role": "system", "content": "be brief"},
            ChatMessage("assistant", tool_calls=(ToolCall("c1", "f", '{"a": 1}'),)),
            {"role": "assistant", "content": "so", "reasoning": "hm", "name": "Al"},
            ChatMessage("tool", "4", tool_call_id="c1"),
        ],
        "tools": [
            Tool("f", "adds", {"type": "object"}),
            Tool("g", parameters='{"type":"object"}'),
            Tool("h"),
            {"name": "i", "strict": True},
        ],
        "tool_choice": "auto",
        "chat_template": "T",
        "template_options": {"enable_thinking": False},
        "parallel_tool_calls": False,
    }
    expected = parsed(
        """
        messages { role: "system" content: "be brief" }
        messages { role: "assistant" tool_calls { id: "c1" name: "f" arguments_json: "{\\"a\\": 1}" } }
        messages { role: "assistant" content: "so" reasoning: "hm" name: "Al" }
        messages { role: "tool" content: "4" tool_call_id: "c1" }
        tools { name: "f" description: "adds" parameters_json: "{\\"type\\": \\"object\\"}" }
        tools { name: "g" parameters_json: "{\\"type\\":\\"object\\"}" }
        tools { name: "h" }
        tools { name: "i" strict: true }
        tool_choice: "auto" chat_template: "T" template_options_json: "{\\"enable_thinking\\": false}"
        parallel_tool_calls: false
        """
    )
    assert chat_prompt(cast(ChatOptions, options)) == expected
    request = fill_request(inference_pb2.StreamRequest(), None, cast(RequestOptions, options))
    assert request == inference_pb2.StreamRequest(chat=expected)


def test_a_conversation_without_turns_is_sent_for_the_server_to_refuse():
    request = fill_request(inference_pb2.GenerateRequest(), None, {"messages": []})
    assert request.WhichOneof("input") == "chat"


@pytest.mark.parametrize(
    "value",
    [
        OPENAI_TOOL,
        OPENAI_TOOL["function"],
        {"function": OPENAI_TOOL["function"]},
        {"name": "f", "description": "adds", "parameters": WEATHER, "strict": None},
        Tool("f", "adds", WEATHER),
    ],
)
def test_forms_of_a_tool(value):
    assert prompt_of(messages=[], tools=[value]) == prompt_of(messages=[], tools=[Tool("f", "adds", WEATHER)])


@pytest.mark.parametrize(
    "call",
    [
        ToolCall("c1", "f", '{"city": "Oslo"}'),
        {"id": "c1", "name": "f", "arguments_json": '{"city": "Oslo"}'},
        {"id": "c1", "name": "f", "arguments": {"city": "Oslo"}},
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}},
    ],
)
def test_forms_of_a_turn_that_calls(call):
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert ChatMessage.from_dict(turn) == ChatMessage(
        "assistant", "", (ToolCall("c1", "f", '{"city": "Oslo"}'),)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"messages": [{"role": "user"}, {"content": "hi"}]},
            r"messages\[1\]: has no role; a turn has role, content",
        ),
        (
            {"messages": [{"role": "user", "nick": "x"}]},
            r"messages\[0\]: unknown key 'nick'; a turn has role",
        ),
        ({"messages": ["hi"]}, r"messages\[0\]: must be a mapping, not str"),
        (
            {"messages": [{"role": "assistant", "tool_calls": ["f"]}]},
            r"messages\[0\]: must be a mapping, not str",
        ),
        ({"messages": [], "tools": [{"description": "x"}]}, r"tools\[0\]: has no name; a tool has name"),
        ({"messages": [], "tools": [{"name": "f", "strictly": True}]}, r"tools\[0\]: unknown key 'strictly'"),
        ({"messages": [], "tools": ["f"]}, r"tools\[0\]: must be a mapping, not str"),
        (
            {"messages": [], "tools": [{"type": "web_search", "function": {"name": "f"}}]},
            r"tools\[0\]: its type is 'web_search'; only 'function'",
        ),
    ],
)
def test_what_is_no_turn_or_tool(options, message):
    with pytest.raises(TypeError, match=message):
        prompt_of(**options)


def test_what_the_wire_cannot_carry_is_all_listed_by_its_field():
    with pytest.raises(InvalidRequest) as caught:
        fill_request(
            inference_pb2.GenerateRequest(),
            None,
            {
                "messages": [ChatMessage("user", "ok"), ChatMessage("user", "\ud800")],
                "tools": [Tool("f"), Tool("g", parameters={"minimum": float("inf")})],
                "tool_choice": "\ud800",
                "chat_template": "\ud800",
                "template_options": {"x": float("nan")},
                "max_tokens": -1,
            },
        )
    assert [v.field for v in caught.value.violations] == [
        "chat.messages[1]",
        "chat.tools[1]",
        "chat.tool_choice",
        "chat.chat_template",
        "chat.template_options_json",
        "stopping.max_tokens",
    ]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"city": "Oslo", "days": [1, 2]}', {"city": "Oslo", "days": [1, 2]}),
        ("{}", {}),
        ("", {}),
        (" \n", {}),
    ],
)
def test_arguments_are_parsed(text, arguments):
    assert ToolCall("c1", "f", text).arguments == arguments


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"city": ', "the arguments of 'f' are not a JSON object: Expecting value"),
        ("[1]", "is a JSON array, not an object"),
        ("3", "is a JSON number, not an object"),
        ("null", "is a JSON null, not an object"),
        ("[" * 100_000, "is nested too deeply"),
    ],
)
def test_arguments_that_are_no_object(text, complaint):
    """A model may write anything."""
    call = ToolCall("c1", "f", text)
    with pytest.raises(ValueError, match=complaint):
        _ = call.arguments


@pytest.mark.parametrize(
    ("content", "text"),
    [("sunny", "sunny"), ({"sky": "grün"}, '{"sky": "grün"}'), (21.5, "21.5"), (None, "null")],
)
def test_the_turn_that_answers_a_call(content, text):
    assert ToolCall("c1", "f", "{}").result(content) == ChatMessage("tool", text, tool_call_id="c1")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(arguments=st.dictionaries(st.text(), JSON, max_size=3))
def test_arguments_survive_the_way_through_a_mapping(arguments: dict[str, Any]):
    assert ToolCall.from_dict({"id": "c", "name": "f", "arguments": arguments}).arguments == arguments
