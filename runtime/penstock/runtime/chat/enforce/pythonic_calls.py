"""The grammar of Python calls: keywords in the order of the schema's properties, with values as JSON.

JSON's strings, numbers, arrays and objects are valid Python. A property that is simply a boolean is spelt
True or False; within other values it is `true`, which the parser accepts too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.runtime.chat.enforce.arguments import follows_schema, value
from penstock.runtime.chat.enforce.lark import Lark, quote
from penstock.runtime.chat.forms.python.pythonic import ENDS, KEYWORD, NAME
from penstock.runtime.chat.messages import Chat, Tool
from penstock.runtime.errors import InvalidRequest, Violation

_DEFINITIONS = ("$defs", "definitions")
_UNKNOWN = frozenset({
    "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "patternProperties",
    "minProperties",
})  # fmt: skip
"""Keywords about the arguments as a whole, which a grammar of one keyword after the other cannot enforce."""
_OBEYED = frozenset({
    "type", "properties", "required", "additionalProperties", "$defs", "definitions", "title", "description",
    "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment",
})  # fmt: skip
"""The only keywords about the arguments as a whole that a strict tool may have: such a grammar obeys them, or
they restrict nothing."""


class CallList(NamedTuple):
    """A list of calls."""

    whole: str
    after_first: str
    """What comes after the keywords of the first call."""


def pythonic(g: Lark, chat: Chat, several: bool) -> str:
    """Adds rules for a list of calls; returns the list's name. InvalidRequest if Python cannot spell the
    calls.
    """
    calls = call_list(g, calls_of(g, chat), several).whole
    tagged = [
        f"{g.marker(start)} {calls} {g.marker(end)}" for start, end in ENDS.items() if g.is_token(start)
    ]
    return g.rule("call_list", " | ".join([calls, *tagged]))


def calls_of(g: Lark, chat: Chat) -> dict[str, str]:
    """Adds rules for the keywords of the tools that may be called. Returns the rules' names, by those of the
    tools. InvalidRequest if Python cannot spell the calls of a tool that follow its schema; other tools that
    it cannot spell are left out.
    """
    tools = chat.callable_tools
    bad = [v for tool in tools if follows_schema(chat, tool) for v in _check(chat, tool)]
    if bad:
        raise InvalidRequest(bad)
    return {
        tool.name: g.rule(f"keywords_{i}", _keywords(g, chat, tool, i))
        for i, tool in enumerate(tools)
        if NAME.fullmatch(tool.name)
    }


def call_list(g: Lark, keywords: Mapping[str, str], several: bool) -> CallList:
    """Adds rules for a list of one or more calls of `calls_of`."""
    bodies = [f'{quote(f"{name}(")} {rule} ")"' for name, rule in keywords.items()]
    call = g.rule("call", " | ".join(bodies))
    others = f' (", " {call})*' if several else ""
    return CallList(g.rule("calls", f'"[" {call}{others} "]"'), f'")"{others} "]"')


def _check(chat: Chat, tool: Tool) -> list[Violation]:
    at = f"chat.tools[{chat.tools.index(tool)}]"
    bad = []
    if not NAME.fullmatch(tool.name):
        bad.append(Violation(f"{at}.name", f"{tool.name[:40]!r} cannot be written as a Python call"))
    properties, required = tool.parameters.get("properties", {}), tool.parameters.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return [*bad, Violation(f"{at}.parameters_json", "is not a JSON Schema")]
    bad += [
        Violation(f"{at}.parameters_json", f"{str(key)[:40]!r} cannot be a keyword of a Python call")
        for key in [*properties, *required]
        if not (isinstance(key, str) and key and KEYWORD.fullmatch(key))
    ]
    unknown = tool.parameters.keys() - _OBEYED if tool.strict else _UNKNOWN & tool.parameters.keys()
    bad += [
        Violation(f"{at}.parameters_json", f"{key[:40]!r} cannot be enforced in a Python call")
        for key in sorted(unknown)
    ]
    return bad


def _keywords(g: Lark, chat: Chat, tool: Tool, number: int) -> str:
    """The body of a rule for the required keywords and some of the others, in order; of a tool whose calls do
    not follow its schema, for any keywords.
    """
    if not follows_schema(chat, tool):
        keyword = g.rule(f"any_{number}", f"/[A-Za-z_][A-Za-z0-9_]*=/ {g.json({})}")
        return f'({keyword} (", " {keyword})*)?'
    required = tool.parameters.get("required", [])
    properties = tool.parameters.get("properties", {})
    properties = {**properties, **{key: {} for key in required if key not in properties}}
    definitions = {key: tool.parameters[key] for key in _DEFINITIONS if key in tool.parameters}
    first = then = ""  # what may come from a keyword on, with none and with some before it
    for i, (key, schema) in reversed(list(enumerate(properties.items()))):
        keyword = g.rule(
            f"keyword_{number}_{i}", f"{quote(f'{key}=')} {_value(g, chat, tool, schema, definitions)}"
        )
        begin = f"{keyword} {then}"
        if key in required:
            first = g.rule(f"first_{number}_{i}", begin)
            then = g.rule(f"then_{number}_{i}", f'", " {keyword} {then}')
        else:
            first = g.rule(f"first_{number}_{i}", f"{begin} | {first}" if first else f"({begin})?")
            then = g.rule(f"then_{number}_{i}", f'(", " {keyword})? {then}')
    return first or '""'


def _value(g: Lark, chat: Chat, tool: Tool, schema: Any, definitions: Mapping[str, Any]) -> str:
    """The name of a rule for a value, or a group of terminals."""
    if not isinstance(schema, dict):
        schema = {} if schema is True else {"not": {}}
    if schema.get("type") == "boolean" and not schema.keys() & {"const", "enum"}:
        return '("True" | "False")'
    return value(g, chat, tool, {**schema, **definitions})
