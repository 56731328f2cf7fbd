"""The form of Gemma 4: `<|tool_call>call:f{a:1,b:<|"|>text<|"|>}<tool_call|>`, any number of times.

Arguments are like JSON, but with a token for quotes, so that a string has no escapes, and without quotes
around names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from penstock.runtime.chat.tool_formats.events import Call, Events, call_or_none
from penstock.runtime.chat.tool_formats.hermes import calls
from penstock.runtime.chat.tool_formats.json_scan import MAX_DEPTH
from penstock.runtime.chat.tool_formats.python_scan import number
from penstock.runtime.chat.tool_formats.reader import Reader, Wait, literal, peek, run_of, spaces, text_until

START = "<|tool_call>"
END = "<tool_call|>"
QUOTE = '<|"|>'
CALL = "call:"
MARKERS = (START, END, QUOTE)
NAME = re.compile(r"[\w.\-]*")
KEY = re.compile(r"[^:{}\[\],<>\"\s]*")
"""A name of an argument, or of a member, that needs no quotes."""
_NO_KEY = '""'
_WORD = re.compile(r"[\w.+\-]*")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}


def parse(r: Reader, out: Events, known: Collection[str]) -> Wait[None]:
    """Parse an output. The form is explicit, so a name that is not `known` is a call too."""
    yield from calls(r, out, START, _block)


def _block(r: Reader) -> Wait[Call | None]:
    """Consumes one call. The end of the output may stand for the closing tag."""
    yield from literal(r, START)
    yield from spaces(r)
    name = (yield from run_of(r, NAME)) if (yield from literal(r, CALL)) else ""
    arguments = (yield from _object(r, 0)) if name and (yield from peek(r)) == "{" else None
    if arguments is None:
        return None
    yield from spaces(r)
    return call_or_none(name, arguments) if (yield from literal(r, END, or_end=True)) else None


def _value(r: Reader, depth: int) -> Wait[str | None]:
    """Consumes a value and returns it as JSON text. Returns None, somewhere within it, as soon as it cannot
    be one.
    """
    if depth > MAX_DEPTH:
        return None
    char = yield from peek(r)
    if char == "{":
        return (yield from _object(r, depth))
    if char == "[":
        return (yield from _array(r, depth))
    if char == "<":
        return (yield from _string(r))
    word = yield from run_of(r, _WORD)
    return _WORDS.get(word) or number(word)


def _string(r: Reader) -> Wait[str | None]:
    parts: list[str] = []
    if not (yield from literal(r, QUOTE)):
        return None
    if not (yield from text_until(r, parts.append, (QUOTE,))):
        return None
    yield from literal(r, QUOTE)
    return json.dumps("".join(parts), ensure_ascii=False)


def _object(r: Reader, depth: int) -> Wait[str | None]:
    members: dict[str, str] = {}
    r.pos += 1
    yield from spaces(r)
    comma = not (yield from literal(r, "}"))
    while comma:
        yield from spaces(r)
        if (yield from peek(r)) == "<":
            key = (yield from _string(r)) or _NO_KEY
        else:
            key = json.dumps((yield from run_of(r, KEY)), ensure_ascii=False)
        yield from spaces(r)
        if key == _NO_KEY or key in members or not (yield from literal(r, ":")):
            return None
        yield from spaces(r)
        value = yield from _value(r, depth + 1)
        if value is None:
            return None
        members[key] = value
        yield from spaces(r)
        comma = yield from literal(r, ",")
        if not comma and not (yield from literal(r, "}")):
            return None
    return "{" + ", ".join(f"{key}: {value}" for key, value in members.items()) + "}"


def _array(r: Reader, depth: int) -> Wait[str | None]:
    items: list[str] = []
    r.pos += 1
    yield from spaces(r)
    comma = not (yield from literal(r, "]"))
    while comma:
        yield from spaces(r)
        value = yield from _value(r, depth + 1)
        if value is None:
            return None
        items.append(value)
        yield from spaces(r)
        comma = yield from literal(r, ",")
        if not comma and not (yield from literal(r, "]")):
            return None
    return f"[{', '.join(items)}]"
