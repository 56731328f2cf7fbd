"""The grammar of Python calls: keywords in the order of the schema's properties, with values as JSON.

JSON's strings, numbers, arrays and objects are valid Python. A property that is simply a boolean is spelt
True or False; within other values it is `true`, which the parser accepts too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.runtime.chat.enforce.arguments import follows_schema, value
from penstock.runtime.chat.enforce.lark import Lark, quote
from penstock.runtime.chat.enforce.one_by_one import in_order, lists_arguments, problems, properties_of
from penstock.runtime.chat.messages import Chat, Tool
from penstock.runtime.chat.tool_formats import olmo3
from penstock.runtime.chat.tool_formats.pythonic import ENDS, KEYWORD, NAME
from penstock.runtime.errors import InvalidRequest


class CallList(NamedTuple):
    """A list of calls."""

    whole: str
    after_first: str
    """What comes after the keywords of the first call."""


def pythonic(g: Lark, chat: Chat, several: bool) -> str:
    """Add rules for a list of calls; return the list's name. InvalidRequest if Python cannot spell the
    calls.
    """
    calls = call_list(g, calls_of(g, chat), several).whole
    tagged = [
        f"{g.marker(start)} {calls} {g.marker(end)}" for start, end in ENDS.items() if g.is_token(start)
    ]
    return g.rule("call_list", " | ".join([calls, *tagged]))


def calls_of(g: Lark, chat: Chat) -> dict[str, str]:
    """Add rules for the keywords of the tools that may be called. Returns the rules' names, by those of the
    tools. InvalidRequest if Python cannot spell the calls of a tool that follow its schema; other tools that
    it cannot spell are left out.
    """
    tools = chat.callable_tools
    bad = [
        v
        for tool in tools
        if follows_schema(chat, tool)
        for v in problems(chat, tool, "Python call", NAME, KEYWORD)
    ]
    if bad:
        raise InvalidRequest(bad)
    return {
        tool.name: g.rule(f"keywords_{i}", _keywords(g, chat, tool, i))
        for i, tool in enumerate(tools)
        if NAME.fullmatch(tool.name)
    }


def call_list(g: Lark, keywords: Mapping[str, str], several: bool) -> CallList:
    """Add rules for a list of one or more calls of `calls_of`."""
    call = _any_call(g, keywords)
    others = f' (", " {call})*' if several else ""
    return CallList(g.rule("calls", f'"[" {call}{others} "]"'), f'")"{others} "]"')


def olmo3_body(g: Lark, chat: Chat, several: bool) -> str:
    """Write what comes after the opening tag of OLMo 3's calls."""
    call = _any_call(g, calls_of(g, chat))
    others = f' ("\\n" {call})*' if several else ""
    return f'"\\n"? {call}{others} "\\n"? {g.marker(olmo3.END)}'


def _any_call(g: Lark, keywords: Mapping[str, str]) -> str:
    bodies = [f'{quote(f"{name}(")} {rule} ")"' for name, rule in keywords.items()]
    return g.rule("call", " | ".join(bodies))


def _keywords(g: Lark, chat: Chat, tool: Tool, number: int) -> str:
    """Write the body of a rule for the required keywords and some of the others, in order; of a tool whose
    calls do not follow its schema, or whose schema does not list them, for any keywords.
    """
    if not (follows_schema(chat, tool) and lists_arguments(tool)):
        keyword = g.rule(f"any_{number}", f"/[A-Za-z_][A-Za-z0-9_]*=/ {g.json({})}")
        return f'({keyword} (", " {keyword})*)?'
    properties, required = properties_of(tool, KEYWORD)
    members = [
        (f"{quote(f'{key}=')} {_value(g, chat, tool, schema)}", key in required)
        for key, schema in properties.items()
    ]
    return in_order(g, str(number), members, ", ")


def _value(g: Lark, chat: Chat, tool: Tool, schema: Mapping[str, Any]) -> str:
    """Return the name of a rule for a value, or a group of terminals."""
    if schema.get("type") == "boolean" and not schema.keys() & {"const", "enum"}:
        return '("True" | "False")'
    return value(g, chat, tool, schema)
