"""The grammars of calls in XML: arguments in the order of the schema's properties.

An argument that cannot be a string is JSON under its own schema. One that can only be a string is any text
that does not hold tags of the form, because the text has no quotes and no escapes; of its schema, a list of
values and the bounds of the length are obeyed. One that may be a string or something else is such a text too,
of which the parser decides what it means. A strict tool is refused where its schema asks for more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from penstock.runtime.chat.enforce.arguments import check, follows_schema, value
from penstock.runtime.chat.enforce.lark import Lark, quote, spelt
from penstock.runtime.chat.enforce.one_by_one import NOTES, asked, lists_arguments, problems, properties_of
from penstock.runtime.chat.messages import Chat, Tool
from penstock.runtime.chat.tool_formats import glm
from penstock.runtime.chat.tool_formats.xml_elements import NAME
from penstock.runtime.chat.tool_formats.xml_functions import Tags
from penstock.runtime.chat.tool_formats.xml_values import kind_of, kinds_of, members_of, referred
from penstock.runtime.errors import InvalidRequest, Violation

_CALL = "call in XML"
_ANY_NAME = r"[A-Za-z_][A-Za-z0-9_\-]*"
_DEFINITIONS = {"$defs", "definitions"}
_LENGTHS = {"minLength", "maxLength"}
_MAX_REFERENCES = 16
_MAX_LENGTH = 2000
"""A text with a higher bound on its length than this makes a terminal too large."""


class _Value(NamedTuple):
    """What ends a value."""

    line: str
    """A line break that belongs to the tags, or nothing."""
    end: str
    never: tuple[str, ...]
    """What a text does not hold: the parser may take it for the end of a text without its closing tag."""


def function_bodies(tags: Tags) -> Callable[[Lark, Chat, bool], str]:
    """Return a function that writes what comes after the marker of calls with these tags."""
    ending = _Value("\n" if tags.on_lines else "", tags.argument_end, (tags.argument, tags.function_end))
    share_marker = tags.function.startswith("<invoke")

    def argument(g: Lark, name: str, body: str) -> str:
        return f"{quote(tags.before_value(name) + ending.line)} {body} {quote(chr(10))}"

    def any_argument(g: Lark, body: str) -> str:
        opening = f"{spelt(tags.argument)}{_ANY_NAME}{spelt(tags.named + ending.line)}"
        return f"{g.terminal(f'/{opening}/')} {body} {quote(chr(10))}"

    def body(g: Lark, chat: Chat, several: bool) -> str:
        calls = []
        for i, tool in enumerate(_writable(chat)):
            arguments = _arguments(g, chat, tool, i, ending, argument, any_argument)
            head = quote(f"{tags.before_function(tool.name)}\n")
            calls.append(f"{head} {arguments} {quote(f'{tags.function_end}{chr(10)}')}")
        call = g.rule("function", " | ".join(calls))
        return f'"\\n" {call}{"+" if several and share_marker else ""} {g.marker(tags.end)}'

    return body


def glm_body(g: Lark, chat: Chat, several: bool) -> str:
    """Write what comes after the opening tag of a call of GLM."""
    ending = _Value("", glm.VALUE_END, (glm.KEY, glm.VALUE, glm.END))

    def pair(g: Lark, key: str, body: str) -> str:
        tags = f'{g.marker(glm.KEY)} {key} {g.marker(glm.KEY_END)} "\\n"? {g.marker(glm.VALUE)}'
        return f'{tags} {body} "\\n"?'

    calls = []
    for i, tool in enumerate(_writable(chat)):
        arguments = _arguments(
            g,
            chat,
            tool,
            i,
            ending,
            lambda g, name, body: pair(g, quote(name), body),
            lambda g, body: pair(g, g.terminal(f"/{_ANY_NAME}/"), body),
        )
        calls.append(f'{quote(tool.name)} "\\n"? {arguments}')
    return f"{g.rule('function', ' | '.join(calls))} {g.marker(glm.END)}"


def _writable(chat: Chat) -> list[Tool]:
    """Return the tools that may be called. InvalidRequest if a call that follows a schema cannot be written;
    other tools whose names cannot be written are left out.
    """
    tools = chat.callable_tools
    bad = [v for tool in tools if follows_schema(chat, tool) for v in problems(chat, tool, _CALL, NAME, NAME)]
    if bad:
        raise InvalidRequest(bad)
    return [tool for tool in tools if NAME.fullmatch(tool.name)]


def _arguments(
    g: Lark,
    chat: Chat,
    tool: Tool,
    number: int,
    ending: _Value,
    write: Callable[[Lark, str, str], str],
    write_any: Callable[[Lark, str], str],
) -> str:
    """Return what derives the arguments. `write` makes an argument of its name and what derives its value and
    the closing tag, and `write_any` one of any name.
    """
    if not (follows_schema(chat, tool) and lists_arguments(tool)):
        return f"({write_any(g, _text(g, ending))})*"
    schemas, required = properties_of(tool, NAME)
    parts = []
    for i, (name, schema) in enumerate(schemas.items()):
        body = _value(g, chat, tool, name, schema, ending)
        rule = g.rule(f"argument_{number}_{i}", write(g, name, body))
        parts.append(rule if name in required else f"{rule}?")
    return " ".join(parts)


def _value(g: Lark, chat: Chat, tool: Tool, name: str, schema: Mapping[str, Any], ending: _Value) -> str:
    """Return what derives a value and its closing tag."""
    kinds = kinds_of(schema, tool.parameters)
    if kinds is not None and "string" not in kinds:
        return f"{value(g, chat, tool, schema)} {_tag(g, ending)}"
    if tool.strict:
        check(chat, tool, schema)
    schema, may_be_null = _plain(schema, tool.parameters)
    if tool.strict:
        _refuse_more(chat, tool, name, schema)
    texts = _member_texts(schema, tool.parameters, ending)
    if texts is not None and may_be_null:
        texts.append("null")
    if texts:
        return f"({' | '.join(quote(text) for text in texts)}) {_tag(g, ending)}"
    text = _text(g, ending, schema.get("minLength"), schema.get("maxLength"))
    return f'("null" {_tag(g, ending)} | {text})' if may_be_null else text


def _plain(schema: Mapping[str, Any], parameters: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """Return the schema that this one only refers to, and whether null is admitted beside it."""
    may_be_null = False
    for _ in range(_MAX_REFERENCES):
        said = schema.keys() - NOTES - _DEFINITIONS
        target = referred(schema["$ref"], parameters) if said == {"$ref"} else None
        ways = schema["anyOf"] if said == {"anyOf"} else []
        others = [way for way in ways if isinstance(way, dict) and way != {"type": "null"}]
        if isinstance(target, dict):
            schema = target
        elif len(ways) == 2 and len(others) == 1:
            schema, may_be_null = others[0], True
        else:
            break
    return schema, may_be_null


def _member_texts(
    schema: Mapping[str, Any], parameters: Mapping[str, Any], ending: _Value
) -> list[str] | None:
    """Return the texts of the only values that the schema admits; None if it does not list them."""
    members = members_of(schema)
    if members is None:
        return None
    kinds = kinds_of(schema, parameters) or frozenset()
    texts = []
    for member in members:
        told = json.dumps(member, ensure_ascii=False)
        if kind_of(told) in kinds:
            texts.append(member if isinstance(member, str) else told)
    tags = (ending.end, *ending.never)
    return [text for text in texts if not any(tag in text for tag in tags) and (text or ending.line)]


def _refuse_more(chat: Chat, tool: Tool, name: str, schema: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for what the grammar of a text cannot obey."""
    listed = members_of(schema) is not None
    obeyed = NOTES | _DEFINITIONS | ({"type", "enum", "const"} if listed else _LENGTHS | {"type"})
    bad = sorted(asked(schema) - obeyed)
    bad += ["type"] if "type" in schema and kinds_of(schema, tool.parameters) is None else []
    bad += [key for key in _LENGTHS & schema.keys() if not listed and schema[key] > _MAX_LENGTH]
    told = ""
    if bad:
        told = f"{bad[0][:40]!r} of {name[:40]!r} cannot be enforced in a {_CALL}"
    elif not listed and not (kinds_of(schema, tool.parameters) or frozenset()) <= {"string", "null"}:
        told = f"{name[:40]!r} may be a string or of another type, which a {_CALL} does not tell apart"
    if told:
        at = f"chat.tools[{chat.tools.index(tool)}].parameters_json"
        raise InvalidRequest([Violation(at, told)])


def _text(g: Lark, ending: _Value, least: Any = None, most: Any = None) -> str:
    """Match any text without the closing tag and what else it never holds, and that tag."""
    first = least if isinstance(least, int) and 0 < least <= _MAX_LENGTH else 0
    last = most if isinstance(most, int) and first <= most <= _MAX_LENGTH else ""
    body = f"(?s:.{{{first},{last}}})" if first or last != "" else "(?s:.*)"
    inside = f"(?s:.*){spelt(ending.end)}"
    others = f" & ~/(?s:.*)({'|'.join(map(spelt, ending.never))})(?s:.*)/"
    if g.is_token(ending.end):
        text = g.terminal(f"/{body}{spelt(ending.line)}/ & ~/{inside}(?s:.*)/{others}")
        return f"{text}{'' if first or ending.line else '?'} {g.marker(ending.end)}"
    return g.terminal(f"/{body}{spelt(ending.line + ending.end)}/ & ~/{inside}{inside}/{others}")


def _tag(g: Lark, ending: _Value) -> str:
    """Write the closing tag, after a value that is known to end."""
    return f"{quote(ending.line)} {g.marker(ending.end)}" if ending.line else g.marker(ending.end)
