"""Tools whose arguments a form writes one after the other, rather than as one JSON object.

A grammar of one argument after the other cannot enforce what a schema says of the arguments together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.runtime.chat.enforce.lark import Lark, quote
from penstock.runtime.chat.messages import Chat, Tool
from penstock.runtime.errors import Violation
from penstock.runtime.schemas.narrowing import refers
from penstock.runtime.schemas.neutral import asks_nothing, without_neutral

_DEFINITIONS = ("$defs", "definitions")
_ELSEWHERE = frozenset({"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "patternProperties"})
"""Keywords under which there may be arguments that "properties" does not list."""
NOTES = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id",
    "$comment",
})  # fmt: skip
"""Keywords that restrict nothing."""
_OBEYED = NOTES | {"type", "properties", "required", "additionalProperties", *_DEFINITIONS}
"""The only keywords about the arguments as a whole that a strict tool may have: such a grammar obeys them, or
they restrict nothing."""


def problems(
    chat: Chat, tool: Tool, call: str, names: re.Pattern[str], keys: re.Pattern[str]
) -> list[Violation]:
    """Say why calls of the tool that follow its schema cannot be written. `call` is what they are named in
    messages; `names` and `keys` match the names of functions and of arguments that can be written.
    """
    at = f"chat.tools[{chat.tools.index(tool)}]"
    bad = []
    if not names.fullmatch(tool.name):
        bad.append(Violation(f"{at}.name", f"{tool.name[:40]!r} cannot be written as a {call}"))
    if not tool.strict:
        return bad
    properties, required = tool.parameters.get("properties", {}), tool.parameters.get("required", [])
    bad += [
        Violation(f"{at}.parameters_json", f"{key[:40]!r} cannot be a keyword of a {call}")
        for key in [*properties, *required]
        if not keys.fullmatch(key)
    ]
    bad += [
        Violation(f"{at}.parameters_json", f"{key[:40]!r} cannot be enforced in a {call}")
        for key in sorted(asked(tool.parameters) - _OBEYED)
    ]
    return bad


def asked(schema: Mapping[str, Any]) -> set[str]:
    """List the keywords by which the schema asks for something."""
    return {key for key, value in without_neutral(schema).items() if not asks_nothing({key: value})}


def lists_arguments(tool: Tool) -> bool:
    """Say whether the arguments that may come are those which the schema's "properties" and "required"
    name.
    """
    said = tool.parameters.keys()
    return bool({"properties", "required"} & said) or not _ELSEWHERE & said


def properties_of(tool: Tool, keys: re.Pattern[str]) -> tuple[dict[str, Mapping[str, Any]], frozenset[str]]:
    """Return the schemas of the arguments whose names `keys` matches, so that they can be written, by name
    and in order, and the names of the required ones. A schema that refers to definitions has them with it.
    """
    required = tool.parameters.get("required", [])
    said = tool.parameters.get("properties", {})
    said = {**said, **{key: {} for key in required if key not in said}}
    said = {key: schema for key, schema in said.items() if keys.fullmatch(key)}
    definitions = {key: tool.parameters[key] for key in _DEFINITIONS if key in tool.parameters}
    schemas: dict[str, Mapping[str, Any]] = {}
    for key, schema in said.items():
        if not isinstance(schema, dict):
            schema = {} if schema is True else {"not": {}}
        schemas[key] = {**schema, **definitions} if refers(schema) else schema
    return schemas, frozenset(required)


def in_order(g: Lark, number: str, members: Sequence[tuple[str, bool]], comma: str) -> str:
    """Return what derives all required members and some of the others, in order, with `comma` between them.
    Each member is what derives it, and whether it is required. `number` is part of the rules' names.
    """
    first = then = ""  # what may come from a member on, with none and with some before it
    for i, (body, is_required) in reversed(list(enumerate(members))):
        member = g.rule(f"member_{number}_{i}", body)
        begin = f"{member} {then}"
        if is_required:
            first = g.rule(f"first_{number}_{i}", begin)
            then = g.rule(f"then_{number}_{i}", f"{quote(comma)} {member} {then}")
        else:
            first = g.rule(f"first_{number}_{i}", f"{begin} | {first}" if first else f"({begin})?")
            then = g.rule(f"then_{number}_{i}", f"({quote(comma)} {member})? {then}")
    return first or '""'
