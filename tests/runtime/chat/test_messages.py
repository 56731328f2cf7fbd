"""`Chat.parse` checks a whole conversation and names every violation by the contract's field path."""

from __future__ import annotations

import inspect

import pytest
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.runtime.chat.json_object import parse_object
from penstock.runtime.chat.messages import (
    MAX_TEMPLATE_CHARS,
    RESERVED_OPTIONS,
    Chat,
    ChatTurn,
    RawTool,
    Tool,
    ToolCall,
    mint_call_id,
)
from penstock.runtime.errors import InvalidRequest

USER = ChatTurn("user", "hi")
CALL = ToolCall("id1", "f", '{"a": 1}')
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}}'


def violations(*args, **kwargs) -> list[tuple[str, str]]:
    """Return what `Chat.parse` refuses, as (field, description)."""
    with pytest.raises(InvalidRequest) as caught:
        Chat.parse(*args, **kwargs)
    return [(v.field, v.description) for v in caught.value.violations]


def fields(*args, **kwargs) -> list[str]:
    return [field for field, _ in violations(*args, **kwargs)]


def test_a_whole_conversation() -> None:
    chat = Chat.parse(
        [
            ChatTurn("system", "Be brief."),
            USER,
            ChatTurn("assistant", "", (CALL, ToolCall("id2", "g", "{}"))),
            ChatTurn("tool", "2", tool_call_id="id2"),
            ChatTurn("tool", "1", tool_call_id="id1"),
            ChatTurn("assistant", "Done."),
            USER,
        ],
        [RawTool("f", "does", SCHEMA), RawTool("g")],
        tool_choice="f",
        chat_template="{{ x }}",
        template_options_json='{"x": [1]}',
    )
    assert chat.tools == (
        Tool("f", "does", {"type": "object", "properties": {"a": {"type": "integer"}}}),
        Tool("g", "", {"type": "object", "properties": {}}),
    )
    assert (chat.tool_choice, chat.template, chat.options) == ("f", "{{ x }}", {"x": [1]})
    assert chat.required_tools == chat.tools[:1]
    assert chat.offered_tools == chat.tools


def test_defaults() -> None:
    chat = Chat.parse([USER])
    assert (chat.tool_choice, chat.template, chat.options, chat.tools) == ("auto", None, {}, ())
    assert chat.required_tools == chat.offered_tools == ()


def test_tool_choice() -> None:
    tools = [RawTool("f"), RawTool("g"), RawTool("none")]
    chosen = {choice: Chat.parse([USER], tools, choice) for choice in ("auto", "none", "required", "g")}
    assert {choice: len(chat.required_tools) for choice, chat in chosen.items()} == {
        "auto": 0, "none": 0, "required": 3, "g": 1,
    }  # fmt: skip
    assert {choice: len(chat.offered_tools) for choice, chat in chosen.items()} == {
        "auto": 3, "none": 0, "required": 3, "g": 3,
    }  # fmt: skip
    assert fields([USER], tools, "h") == ["chat.tool_choice"]
    assert violations([USER], [], "required") == [("chat.tool_choice", "required needs at least one tool")]
    assert Chat.parse([USER], [], "none").tool_choice == "none"


def test_turns() -> None:
    assert fields([]) == ["chat.messages"]
    assert fields([ChatTurn("robot", "x"), USER, ChatTurn("", "x")]) == [
        "chat.messages[0].role",
        "chat.messages[2].role",
    ]


def test_only_the_assistant_thinks() -> None:
    said = [ChatTurn(role, "x", reasoning="hm") for role in ("assistant", "user", "system")]
    assert fields(said) == ["chat.messages[1].reasoning", "chat.messages[2].reasoning"]
    assert Chat.parse(said[:1]).messages[0].reasoning == "hm"


def test_calls_and_answers() -> None:
    assert fields([ChatTurn("user", "", (CALL,))]) == ["chat.messages[0].tool_calls"]
    assert fields([ChatTurn("tool", "x")]) == ["chat.messages[0].tool_call_id"]
    assert fields([ChatTurn("tool", "x", tool_call_id="id1"), ChatTurn("assistant", "", (CALL,))]) == [
        "chat.messages[0].tool_call_id"  # answered before it was made
    ]
    assert fields([ChatTurn("user", "", (CALL,)), ChatTurn("tool", "x", tool_call_id="id1")]) == [
        "chat.messages[0].tool_calls",
        "chat.messages[1].tool_call_id",
    ]
    assert fields([ChatTurn("user", "x", tool_call_id="id1")]) == ["chat.messages[0].tool_call_id"]
    assert fields([ChatTurn("assistant", "", (ToolCall("", "", "[]"),))]) == [
        "chat.messages[0].tool_calls[0].id",
        "chat.messages[0].tool_calls[0].name",
    ]


def test_tools() -> None:
    found = violations(
        [USER],
        [
            RawTool("f", "", "{"),
            RawTool("", "", "[]"),
            RawTool("f", "", '{"type": "string"}'),
            RawTool("g", "", '{"anyOf": [{"type": "object"}]}'),
        ],
    )
    assert [field for field, _ in found] == [
        "chat.tools[0].parameters_json",
        "chat.tools[1].parameters_json",
        "chat.tools[1].name",
        "chat.tools[2].name",
        "chat.tools[2].parameters_json",
    ]
    assert found[1][1] == "must be a JSON object, not an array"
    assert found[4][1] == "must be the schema of an object: \"type\" is 'string'"


def test_all_violations_are_named_at_once() -> None:
    assert fields(
        [ChatTurn("robot", "")],
        [RawTool("f", "", "nope")],
        "h",
        "x" * (MAX_TEMPLATE_CHARS + 1),
        '{"messages": [], "tools": [], "add_generation_prompt": false, "tokenize": true}',
    ) == [
        "chat.tools[0].parameters_json",
        "chat.messages[0].role",
        "chat.tool_choice",
        "chat.chat_template",
        *["chat.template_options_json"] * 4,
    ]
    assert fields([ChatTurn("robot", "")], template_options_json="[]") == [
        "chat.template_options_json",
        "chat.messages[0].role",
    ]


@pytest.mark.parametrize("function", [PreTrainedTokenizerBase.apply_chat_template, render_jinja_template])
def test_options_cannot_reach_parameters_of_transformers(function) -> None:
    """The exception is `documents`, which is both a parameter and a variable of templates, and harmless."""
    parameters = inspect.signature(function).parameters
    named = {name for name, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    assert named - {"documents"} <= RESERVED_OPTIONS


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must be a JSON object: Expecting value"),
        ("3", "must be a JSON object, not a number"),
        ("null", "must be a JSON object, not null"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": 1}}', "Extra data"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "must be a JSON object: Exceeds the limit"),
    ],
)
def test_what_is_no_object(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_object(text)


def test_minted_ids_please_mistrals_templates() -> None:
    ids = {mint_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(i) == 9 and i.isalnum() and i.isascii() for i in ids)
