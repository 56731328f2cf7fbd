"""The grammar of calls in Gemma 4's form: members in the order of their names, as its template shows them.

Every part of a schema has a rule of its own. A strict tool is refused where its schema has a keyword that
these rules do not obey.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.runtime.chat.enforce.arguments import check, follows_schema, value
from penstock.runtime.chat.enforce.lark import Lark, quote, spelt
from penstock.runtime.chat.enforce.one_by_one import NOTES, asked, in_order, problems
from penstock.runtime.chat.messages import Chat, Tool
from penstock.runtime.chat.tool_formats.gemma4 import CALL, END, KEY, NAME, QUOTE
from penstock.runtime.chat.tool_formats.xml_values import members_of, referred
from penstock.runtime.errors import InvalidRequest, Violation

_FORM = "call of Gemma 4"
_OBEYED: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
"""The keywords for each type that the rules obey."""
_ALWAYS = NOTES | {"type", "enum", "const", "anyOf", "$ref", "$defs", "definitions"}
_MAX_LENGTH = 2000
"""A string with a higher bound on its length than this makes a terminal too large."""


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes the rules for the arguments of one tool."""

    g: Lark
    chat: Chat
    tool: Tool
    rules: dict[str, str] = field(default_factory=dict)
    """Schema, as JSON, to the name of its rule."""

    def rule(self, schema: Any) -> str:
        """Return the name of the rule for values of a schema, which may refer to itself."""
        written = json.dumps(schema, sort_keys=True)
        if written not in self.rules:
            number = f"{self.chat.tools.index(self.tool)}_{len(self.rules)}"
            self.rules[written] = name = f"value_{number}"
            self.g.rule(name, self._ways(schema if isinstance(schema, dict) else {}, number))
        return self.rules[written]

    def _ways(self, schema: Mapping[str, Any], number: str) -> str:
        kinds = self._kinds(schema)
        members = members_of(schema)
        if self.tool.strict:
            self._refuse_more(schema, kinds)
        if members is not None:
            return " | ".join(self._literal(member) for member in members) or '""'
        if "$ref" in schema:
            return self.rule(referred(schema["$ref"], self.tool.parameters))
        if "anyOf" in schema:
            return " | ".join(self.rule(way) for way in schema["anyOf"])
        return " | ".join(self._kind(kind, schema, number) for kind in kinds)

    def _kinds(self, schema: Mapping[str, Any]) -> list[str]:
        named = schema.get("type", [*_OBEYED.keys() - {"integer"}])
        listed = [kind for kind in (named if isinstance(named, list) else [named]) if kind in _OBEYED]
        return sorted(listed) or sorted(_OBEYED.keys() - {"integer"})

    def _kind(self, kind: str, schema: Mapping[str, Any], number: str) -> str:
        match kind:
            case "boolean":
                return '"true" | "false"'
            case "null":
                return '"null"'
            case "string":
                return self._string(schema)
            case "array":
                return self._array(schema)
            case "object":
                return self.members(schema, number)
        bounds = {key: schema[key] for key in _OBEYED[kind] & schema.keys()}
        return value(self.g, self.chat, self.tool, {"type": kind, **bounds})

    def _string(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        bounded = isinstance(least, int) and least <= _MAX_LENGTH and (least or most != "")
        bounded = bounded and (most == "" or (isinstance(most, int) and least <= most <= _MAX_LENGTH))
        body = f"(?s:.{{{least},{most}}})" if bounded else "(?s:.*)"
        inside = f"(?s:.*){spelt(QUOTE)}"
        mark = self.g.marker(QUOTE)
        if self.g.is_token(QUOTE):
            text = self.g.terminal(f"/{body}/ & ~/{inside}(?s:.*)/")
            return f"{mark} {text}{'' if bounded and least else '?'} {mark}"
        return f"{mark} {self.g.terminal(f'/{body}{spelt(QUOTE)}/ & ~/{inside}{inside}/')}"

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self.rule(schema.get("items", {}))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        some = f'{item} ("," {item}){more}'
        return f'"[" {some} "]"' if least else f'"[" ({some})? "]"'

    def members(self, schema: Mapping[str, Any], number: str) -> str:
        """Write what derives an object: its listed members, or any where none are listed."""
        said = schema.get("properties", {})
        required = schema.get("required", [])
        said = {**said, **{key: {} for key in required if key not in said}}
        if not said:
            other = schema.get("additionalProperties", "properties" not in schema)
            if other is False:
                return '"{" "}"'
            member = f'{self.g.terminal("/[A-Za-z_][A-Za-z0-9_]*/")} ":" {self.rule(other)}'
            return f'"{{" ({member} ("," {member})*)? "}}"'
        ordered = sorted(said, key=str.lower)
        members = [(f'{self._key(key)} ":" {self.rule(said[key])}', key in required) for key in ordered]
        return f'"{{" {in_order(self.g, number, members, ",")} "}}"'

    def _key(self, key: str) -> str:
        return quote(key) if key and KEY.fullmatch(key) else self._literal(key)

    def _literal(self, member: Any) -> str:
        """Write what derives this one value."""
        if isinstance(member, str):
            mark = self.g.marker(QUOTE)
            return f"{mark} {quote(member)} {mark}" if member else f"{mark} {mark}"
        if isinstance(member, list):
            items = ' "," '.join(map(self._literal, member))
            return f'"[" {items} "]"'
        if isinstance(member, dict):
            pairs = ' "," '.join(f'{self._key(key)} ":" {self._literal(one)}' for key, one in member.items())
            return f'"{{" {pairs} "}}"'
        return quote(json.dumps(member))

    def _refuse_more(self, schema: Mapping[str, Any], kinds: list[str]) -> None:
        named = "type" in schema
        obeyed = _ALWAYS | frozenset().union(*(_OBEYED[kind] for kind in kinds)) if named else _ALWAYS
        alone = [key for key in ("$ref", "anyOf", "enum", "const") if key in schema]
        bad = sorted(asked(schema) - obeyed)
        bad += [key for key in ("minLength", "maxLength") if schema.get(key, 0) > _MAX_LENGTH]
        for key in alone:
            beside = {"type"} if key in ("enum", "const") else set()
            bad += sorted(asked(schema) - NOTES - {key, "$defs", "definitions"} - beside)
        if "$ref" in schema and not isinstance(referred(schema["$ref"], self.tool.parameters), dict):
            bad.append("$ref")
        if bad:
            at = f"chat.tools[{self.chat.tools.index(self.tool)}].parameters_json"
            told = f"{bad[0][:40]!r} cannot be enforced in a {_FORM}"
            raise InvalidRequest([Violation(at, told)])


def gemma4_body(g: Lark, chat: Chat, several: bool) -> str:
    """Write what comes after the opening tag of a call."""
    tools = chat.callable_tools
    bad = [v for tool in tools if follows_schema(chat, tool) for v in problems(chat, tool, _FORM, NAME, KEY)]
    if bad:
        raise InvalidRequest(bad)
    calls = []
    for i, tool in enumerate(tools):
        if NAME.fullmatch(tool.name):
            if tool.strict:
                check(chat, tool, {**tool.parameters, "type": "object"})
            schema = tool.parameters if follows_schema(chat, tool) else {}
            arguments = _Writer(g, chat, tool).members(schema, f"arguments_{i}")
            calls.append(f"{quote(f'{CALL}{tool.name}')} {arguments}")
    return f"{g.rule('call', ' | '.join(calls))} {g.marker(END)}"
