"""Reads the elements of which calls in XML are made."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.runtime.chat.tool_formats.events import Call, Tools
from penstock.runtime.chat.tool_formats.json_scan import json_value
from penstock.runtime.chat.tool_formats.reader import Reader, Wait, literal, run_of, spaces, text_until
from penstock.runtime.chat.tool_formats.xml_values import kinds_of, property_schema, value_json

NAME = re.compile(r'[^\n<>"{}\[\]]*')
"""What the names of functions and arguments may be made of: anything that cannot end them."""


def name_before(r: Reader, end: str) -> Wait[str]:
    """Consumes a name and the `end` after it. Returns "" if there is none."""
    name = (yield from run_of(r, NAME)).strip()
    return name if (yield from literal(r, end)) else ""


def value_before(
    r: Reader, end: str, then: Sequence[str], tools: Tools, function: str, name: str, *, on_lines: bool
) -> Wait[str | None]:
    """Consumes the text of an argument and the tag `end` after it. Returns the value as JSON text, or None if
    the tag does not come.

    `end` ends the argument only where one of `then` follows, white space aside, or where what stands before
    it is JSON and the argument cannot be a string; elsewhere it is part of the text. `on_lines`: a line break
    at the beginning and one at the end belong to the tags.
    """
    parameters: Mapping[str, Any] = tools.get(function, {})
    schema = property_schema(parameters, name)
    kinds = kinds_of(schema, parameters)
    if kinds is not None and "string" not in kinds:
        start = r.pos
        found = yield from _json_before(r, end)
        if found is not None:
            return found
        r.pos = start
    text = yield from _text_before(r, end, then)
    if text is None:
        return None
    if on_lines:
        text = text.removeprefix("\n").removesuffix("\n")
    return value_json(text, schema, parameters)


def call_of(function: str, arguments: Mapping[str, str]) -> Call:
    """The call of a function with these arguments, of which each is JSON text."""
    members = ", ".join(
        f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in arguments.items()
    )
    return Call(function, f"{{{members}}}")


def _json_before(r: Reader, end: str) -> Wait[str | None]:
    yield from spaces(r)
    start = r.pos
    if not (yield from json_value(r)):
        return None
    found = r.text[start : r.pos]
    yield from spaces(r)
    return found if (yield from literal(r, end)) else None


def _text_before(r: Reader, end: str, then: Sequence[str]) -> Wait[str | None]:
    parts: list[str] = []
    while (yield from text_until(r, parts.append, (end,))):
        yield from literal(r, end)
        after = r.pos
        yield from spaces(r)
        for tag in then:
            if (yield from literal(r, tag)):
                r.pos = after
                return "".join(parts)
        r.pos = after
        parts.append(end)
    return None
