"""What of the schemas of tools can be enforced, where calls follow them.

Schemas of tools come from many programs, and some hold what no grammar can express (a look-ahead in a
pattern) or what means nothing (a limit of null). Of a tool that is not strict, that part is left out, and
nothing else. A strict tool is refused, with the place of that part.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.runtime.chat.enforce.arguments import arguments_schema, follows_schema
from penstock.runtime.chat.enforce.lark import Lark
from penstock.runtime.chat.messages import Chat, Tool
from penstock.runtime.chat.tool_formats.xml_values import referred
from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.requests.grammar import Grammar
from penstock.runtime.schemas.json_schema import read_schema
from penstock.runtime.schemas.narrowing import COUNTS, GrammarError
from penstock.runtime.schemas.neutral import KINDS

Refusal = Callable[[Tool, Mapping[str, Any]], str | None]
"""Says why a schema of a tool, which has no reference to nowhere, cannot be enforced; None if it can be."""

_BOUNDS = frozenset({"minimum", "maximum"})
_EXCLUSIVE = frozenset({"exclusiveMinimum", "exclusiveMaximum"})
_ONE = frozenset({
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames",
    "then", "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_MAPS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords that hold a schema, a list of schemas, and schemas by names."""
_FIRST = ("$defs", "definitions", "type", "properties", "required")
"""The keywords that are kept rather than others which contradict them."""


@dataclass(frozen=True, slots=True)
class _Fault:
    path: tuple[str, ...]
    """The names that lead to the keyword, or to what should be a schema."""
    told: str


def with_sound_schemas(chat: Chat) -> Chat:
    """Return the chat, with what means nothing left out of the schemas that calls follow. InvalidRequest if
    that is in the schema of a strict tool, or one of its keywords cannot be enforced by any grammar.
    """

    def sound(tool: Tool) -> Tool:
        faults: list[_Fault] = []
        schema = _sound(tool.parameters, tool.parameters, (), faults)
        if tool.strict:
            _refuse(chat, tool, faults)
            _refuse(chat, tool, _Parts(tool, _reading).faults_of(schema))
        return dataclasses.replace(tool, parameters=schema)

    return _with_tools(chat, sound)


def with_enforceable_schemas(chat: Chat, refusal: Refusal) -> Chat:
    """Return the chat, whose schemas are sound, with what `refusal` refuses left out of them. InvalidRequest
    if it refuses a part of the schema of a strict tool.
    """

    def enforceable(tool: Tool) -> Tool:
        parts = _Parts(tool, refusal)
        if tool.strict:
            _refuse(chat, tool, parts.faults_of(tool.parameters))
            return tool
        return dataclasses.replace(tool, parameters=parts.apart(parts.whole(tool.parameters)))

    return _with_tools(chat, enforceable)


def without_schemas(chat: Chat) -> Chat:
    """Return the chat, with nothing asked of the arguments of tools that are not strict."""
    return _with_tools(
        chat, lambda tool: tool if tool.strict else dataclasses.replace(tool, parameters={"type": "object"})
    )


def schema_grammar(tool: Tool, schema: Mapping[str, Any]) -> Grammar:
    """Make a grammar of nothing but JSON of the schema of a tool, or of a part of it, as it stands in the
    grammars of calls.
    """
    if tool.strict:
        return Grammar.json_schema(json.dumps(schema))
    g = Lark({})
    g.rule("start", g.json(schema))
    return Grammar.ebnf(str(g))


def _with_tools(chat: Chat, change: Callable[[Tool], Tool]) -> Chat:
    """Change the tools of the chat whose calls follow their schemas."""
    tools = [
        change(tool) if tool in chat.callable_tools and follows_schema(chat, tool) else tool
        for tool in chat.tools
    ]
    return dataclasses.replace(chat, tools=tuple(tools))


def _refuse(chat: Chat, tool: Tool, faults: list[_Fault]) -> None:
    """Raise InvalidRequest if there are faults; it tells the first."""
    for fault in faults:
        pointer = "/".join(["#", *(step.replace("~", "~0").replace("/", "~1") for step in fault.path)])
        told = f"the strict tool {tool.name[:40]!r} cannot be obeyed at {pointer}: {fault.told}"
        raise InvalidRequest([Violation(f"chat.tools[{chat.tools.index(tool)}].parameters_json", told)])


def _sound(schema: Any, whole: Mapping[str, Any], path: tuple[str, ...], faults: list[_Fault]) -> Any:
    """Return a schema, without keywords whose values are none that JSON Schema gives them."""
    if not isinstance(schema, dict):
        if not isinstance(schema, bool):
            faults.append(_Fault(path, "a schema is an object, true or false"))
        return schema if isinstance(schema, bool) else {}
    kept = {}
    for key, value in schema.items():
        wrong = _wrong(key, value, whole)
        if wrong:
            faults.append(_Fault((*path, key), f"{key!r} {wrong}"))
        else:
            kept[key] = int(value) if key in COUNTS else value
    return _changed(kept, path, lambda inner, at: _sound(inner, whole, at, faults))


def _wrong(key: str, value: Any, whole: Mapping[str, Any]) -> str:
    """Say what is wrong with the value of a keyword; "" if nothing is."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fine, told = True, ""
    if key in COUNTS:
        whole_number = isinstance(value, int) or (number and value.is_integer())
        fine, told = number and whole_number and value >= 0, "must be a whole number, 0 or more"
    elif key in _BOUNDS:
        fine, told = number, "must be a number"
    elif key in _EXCLUSIVE:
        fine, told = number or isinstance(value, bool), "must be a number"
    elif key == "multipleOf":
        fine, told = number and value > 0, "must be a number above 0"
    elif key in ("pattern", "format"):
        fine, told = isinstance(value, str), "must be a string"
    elif key == "required":
        fine, told = _is_list_of(value, str), "must be a list of names"
    elif key == "enum":
        fine, told = isinstance(value, list) and bool(value), "must be a list of values"
    elif key == "type":
        named = value if isinstance(value, list) else [value]
        fine = bool(named) and all(isinstance(name, str) and name in KINDS for name in named)
        told = "must be a type of JSON, or a list of them"
    elif key == "$ref":
        fine, told = isinstance(value, str), "must be a string"
        if fine and not _is_somewhere(value, whole):
            fine, told = False, "refers to nothing in the schema"
    elif key in _LISTS:
        fine, told = (
            isinstance(value, list) and (bool(value) or key not in ("anyOf", "oneOf")),
            "must be a list of schemas",
        )
    elif key in _MAPS:
        fine, told = isinstance(value, dict), "must be an object of schemas"
    elif key in _ONE:
        lists = key == "items" and isinstance(value, list)
        fine, told = isinstance(value, dict | bool) or lists, "must be a schema"
    return "" if fine else told


def _is_somewhere(reference: str, whole: Any) -> bool:
    """Say whether a reference names a schema in this one by its place or an anchor, or may by an "$id"."""
    if reference == "#" or reference.startswith("#/"):
        return isinstance(referred(reference, whole), dict | bool)
    within = whole.values() if isinstance(whole, dict) else whole if isinstance(whole, list) else ()
    if isinstance(whole, dict) and "$id" in whole and not reference.startswith("#"):
        return True
    if isinstance(whole, dict) and reference == f"#{whole.get('$anchor')}":
        return True
    return any(_is_somewhere(reference, one) for one in within)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


def _changed(
    schema: Mapping[str, Any], path: tuple[str, ...], change: Callable[[Any, tuple[str, ...]], Any]
) -> dict[str, Any]:
    """Return the schema, whose keywords have values of their kinds, with each schema directly within it
    changed.
    """
    new: dict[str, Any] = {}
    for key, value in schema.items():
        at = (*path, key)
        if key in _MAPS:
            new[key] = {name: change(inner, (*at, name)) for name, inner in value.items()}
        elif key in _LISTS or (key == "items" and isinstance(value, list)):
            new[key] = [change(inner, (*at, str(i))) for i, inner in enumerate(value)]
        else:
            new[key] = change(value, at) if key in _ONE else value
    return new


@dataclass
class _Parts:
    """Finds the parts of a schema that are refused, each tried by itself, without what it refers to."""

    tool: Tool
    refusal: Refusal
    faults: list[_Fault] = field(default_factory=list)

    def faults_of(self, schema: Mapping[str, Any]) -> list[_Fault]:
        self.whole(schema)
        return self.faults

    def whole(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the schema of all arguments without the parts that are refused."""
        arguments = arguments_schema(dataclasses.replace(self.tool, parameters=schema))
        if self.refusal(self.tool, arguments) is None:
            return dict(schema)
        smaller: dict[str, Any] = self.part({**schema, "type": "object"}, ())
        arguments = arguments_schema(dataclasses.replace(self.tool, parameters=smaller))
        if self.refusal(self.tool, arguments) is None:
            return smaller
        return self._keywords(smaller, (), lambda one: one)

    def apart(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the schema with properties that also by themselves are not refused: one that no value
        satisfies is merely never written in an object, but some forms have a grammar for each.
        """
        said = schema.get("properties")
        if not said:
            return dict(schema)
        return {**schema, "properties": {name: self.part(one, ()) for name, one in said.items()}}

    def part(self, schema: Any, path: tuple[str, ...]) -> Any:
        if not isinstance(schema, dict) or self._refused(schema) is None:
            return schema
        smaller = _changed(schema, path, self.part)
        if smaller != schema and self._refused(smaller) is None:
            return smaller
        return self._keywords(smaller, path, _without_references)

    def _keywords(
        self, schema: Mapping[str, Any], path: tuple[str, ...], ready: Callable[[Any], Any]
    ) -> dict[str, Any]:
        """Keep as many keywords as are not refused together."""
        kept: dict[str, Any] = {}
        for key in sorted(schema, key=lambda key: _FIRST.index(key) if key in _FIRST else len(_FIRST)):
            told = self.refusal(self.tool, ready({**kept, key: schema[key]}))
            if told is None:
                kept[key] = schema[key]
            else:
                self.faults.append(_Fault((*path, key), f"{key!r} cannot be enforced: {told}"))
        return {key: kept[key] for key in schema if key in kept}

    def _refused(self, schema: Mapping[str, Any]) -> str | None:
        return self.refusal(self.tool, _without_references(schema))


def _without_references(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _without_references(value) for key, value in schema.items() if key != "$ref"}
    return [_without_references(one) for one in schema] if isinstance(schema, list) else schema


def _reading(tool: Tool, schema: Mapping[str, Any]) -> str | None:
    """Say why `read_schema` refuses a schema."""
    try:
        read_schema(json.dumps(schema))
    except GrammarError as error:
        return str(error)
    return None
