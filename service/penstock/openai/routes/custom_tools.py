"""Tools of the type "custom", which are given a text rather than arguments. For the model such a tool is a
strict function with one argument, because that is what chat templates and the forms of calls know.
"""

from __future__ import annotations

import json
from typing import Any, Final

from penstock.client import Tool, ToolCall
from penstock.openai.failures import unsupported_value

_INPUT: Final = "input"


def custom_tool(name: str, description: str | None, pattern: str | None) -> Tool:
    """The function that stands for a tool whose text matches `pattern` as a whole; None means any text."""
    text: dict[str, Any] = {"type": "string"}
    if pattern is not None:
        text["pattern"] = f"^(?:{pattern})$"
    schema = {
        "type": "object",
        "properties": {_INPUT: text},
        "required": [_INPUT],
        "additionalProperties": False,
    }
    return Tool(name=name, description=description or "", parameters=schema, strict=True)


def pattern_of(syntax: str, definition: str, param: str) -> str:
    """The regular expression of a grammar, whose syntax the field `param` says. Raises ApiError for a
    syntax that cannot be enforced within a call.
    """
    if syntax != "regex":
        raise unsupported_value(param, "within a call only a regex can be enforced; use a regex or a text.")
    return definition


def input_of(call: ToolCall) -> str:
    """The text that a call gives to its tool. Of a call that does not follow the function it is all that the
    model wrote, so that nothing is lost.
    """
    try:
        text = json.loads(call.arguments_json)[_INPUT]
    except (ValueError, KeyError, TypeError):
        return call.arguments_json
    return text if isinstance(text, str) else call.arguments_json


def custom_call(call_id: str, name: str, text: str) -> ToolCall:
    """The call of the function that stands for a tool which was given this text."""
    return ToolCall(call_id, name, json.dumps({_INPUT: text}, ensure_ascii=False))
