"""The form of Gemma 4: `<|tool_call>call:f{a:1,b:<|"|>text<|"|>}<tool_call|>`, any number of times.

Arguments are like JSON, but with a token for quotes, so that a string has no escapes, and without quotes
around names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from penstock.runtime.chat.tool_formats.events import Draft, Events, attempt, text_before
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
    while (yield from text_before(r, out, (START,))):
        yield from attempt(r, out, START, lambda call: _block(r, call))


def _block(r: Reader, call: Draft) -> Wait[bool]:
    """Consume one call. The end of the output may stand for the closing tag."""
    yield from literal(r, START)
    yield from spaces(r)
    name = (yield from run_of(r, NAME)) if (yield from literal(r, CALL)) else ""
    if not name or (yield from peek(r)) != "{":
        return False
    call.begin(name)
    if not (yield from _object(r, 0, call.add)):
        return False
    yield from spaces(r)
    return (yield from literal(r, END, or_end=True))


def _value(r: Reader, depth: int) -> Wait[str | None]:
    """Consume a value and return it as JSON text. Returns None, somewhere within it, as soon as it cannot be
    one.
    """
    if depth > MAX_DEPTH:
        return None
    char = yield from peek(r)
    if char == "{":
        parts: list[str] = []
        return "".join(parts) if (yield from _object(r, depth, parts.append)) else None
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


def _object(r: Reader, depth: int, out: Callable[[str], None]) -> Wait[bool]:
    """Consume an object and hand it on as JSON text, each member when it is whole. Returns False, somewhere
    within it, as soon as it cannot be one.
    """
    names: set[str] = set()
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
        if key == _NO_KEY or key in names or not (yield from literal(r, ":")):
            return False
        yield from spaces(r)
        value = yield from _value(r, depth + 1)
        if value is None or r.has_met_end:  # then it may be the beginning of a number
            return False
        out(f"{', ' if names else '{'}{key}: {value}")
        names.add(key)
        yield from spaces(r)
        comma = yield from literal(r, ",")
        if not comma and not (yield from literal(r, "}")):
            return False
    out("}" if names else "{}")
    return True


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
