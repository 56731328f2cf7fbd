"""The grammar of Python calls: keywords in the order of the schema's properties, with values as JSON.

JSON's strings, numbers, arrays and objects are valid Python. A property that is simply a boolean is spelt
True or False; within other values it is `true`, which the parser accepts too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.runtime.chat.enforce.lark import Lark, quote
from penstock.runtime.chat.forms.pythonic import ENDS, KEYWORD, NAME
from penstock.runtime.chat.messages import Chat, Tool
from penstock.runtime.errors import InvalidRequest, Violation

_DEFINITIONS = ("$defs", "definitions")
_UNKNOWN = frozenset({
    "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "patternProperties",
    "minProperties",
})  # fmt: skip
"""Keywords about the arguments as a whole, which a grammar of one keyword after the other cannot enforce."""


def pythonic(g: Lark, chat: Chat, several: bool) -> str:
    """Adds rules for a list of calls; returns the list's name. InvalidRequest if Python cannot spell the
    calls.
    """
    bad = [v for tool in chat.required_tools for v in _check(chat, tool)]
    if bad:
        raise InvalidRequest(bad)
    call = g.rule("call", " | ".join(_call(g, tool, i) for i, tool in enumerate(chat.required_tools)))
    others = f' (", " {call})*' if several else ""
    calls = g.rule("calls", f'"[" {call}{others} "]"')
    tagged = [
        f"{g.marker(start)} {calls} {g.marker(end)}" for start, end in ENDS.items() if g.is_token(start)
    ]
    return g.rule("call_list", " | ".join([calls, *tagged]))


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
    bad += [
        Violation(f"{at}.parameters_json", f"{key!r} cannot be enforced in a Python call")
        for key in sorted(_UNKNOWN & tool.parameters.keys())
    ]
    return bad


def _call(g: Lark, tool: Tool, number: int) -> str:
    """The body of a rule for a call: the required keywords and some of the others, in order."""
    required = tool.parameters.get("required", [])
    properties = tool.parameters.get("properties", {})
    properties = {**properties, **{key: {} for key in required if key not in properties}}
    definitions = {key: tool.parameters[key] for key in _DEFINITIONS if key in tool.parameters}
    first = then = ""  # what may come from a keyword on, with none and with some before it
    for i, (key, schema) in reversed(list(enumerate(properties.items()))):
        keyword = g.rule(f"keyword_{number}_{i}", f"{quote(f'{key}=')} {_value(g, schema, definitions)}")
        begin = f"{keyword} {then}"
        if key in required:
            first = g.rule(f"first_{number}_{i}", begin)
            then = g.rule(f"then_{number}_{i}", f'", " {keyword} {then}')
        else:
            first = g.rule(f"first_{number}_{i}", f"{begin} | {first}" if first else f"({begin})?")
            then = g.rule(f"then_{number}_{i}", f'(", " {keyword})? {then}')
    return f'{quote(f"{tool.name}(")} {first} ")"'


def _value(g: Lark, schema: Any, definitions: Mapping[str, Any]) -> str:
    """The name of a rule for a value, or a group of terminals."""
    if not isinstance(schema, dict):
        schema = {} if schema is True else {"not": {}}
    if schema.get("type") == "boolean" and not schema.keys() & {"const", "enum"}:
        return '("True" | "False")'
    return g.json({**schema, **definitions})
