"""Recognises Python literals while they arrive, and converts them to JSON: strings, numbers, True, False,
None, lists, tuples and dicts.

JSON's `true`, `false` and `null` are accepted too, because models mix them up. Names, operators, sets, bytes,
f-strings and adjacent strings are not accepted.
"""

from __future__ import annotations

import json
import re
import unicodedata

from penstock.runtime.chat.tool_formats.events import is_text
from penstock.runtime.chat.tool_formats.json_scan import MAX_DEPTH
from penstock.runtime.chat.tool_formats.reader import Reader, Wait, literal, more, peek, run_of, spaces

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_WORD = re.compile(r"\w*")
_NUMBER = re.compile(r"[0-9A-Za-z_.+\-]*")
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PLAIN = {quote: re.compile(rf"[^\\{quote}\n]*") for quote in "'\""}
_ESCAPE = re.compile(
    r"\\(?:(?P<octal>[0-7]{1,3})|x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})"
    r"|N\{(?P<name>[^}]*)\}|(?P<other>.))",
    re.DOTALL,
)
_ESCAPED = {
    "\n": "", "\\": "\\", "'": "'", '"': '"',
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
}  # fmt: skip


def python_value(r: Reader, depth: int = 0) -> Wait[str | None]:
    """Consume one literal and return it as JSON text. Returns None, somewhere within it, as soon as it cannot
    be one.
    """
    char = yield from peek(r)
    if not char or depth > MAX_DEPTH:
        return None
    if char in "'\"":
        return (yield from _string(r, char))
    if char in "[(":
        return (yield from _items(r, "]" if char == "[" else ")", depth))
    if char == "{":
        return (yield from _dict(r, depth))
    if char in "0123456789+-.":
        return number((yield from run_of(r, _NUMBER)))
    return _WORDS.get((yield from run_of(r, _WORD)))


def number(token: str) -> str | None:
    """Read a number as JSON text. A number that is valid JSON already stays as it is written."""
    if _JSON_NUMBER.fullmatch(token):
        return token
    for kind in (int, float):
        try:
            return json.dumps(kind(token), allow_nan=False)
        except ValueError:
            continue
    return None


def unescape(body: str) -> str | None:
    """Return the text of a string literal, from what stands between its quotes; None if an escape is
    wrong.
    """
    try:
        text = _ESCAPE.sub(_replace, body)
    except (KeyError, ValueError):
        return None
    # As in JSON, two halves of a surrogate pair become one character.
    return text if is_text(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _replace(found: re.Match[str]) -> str:
    if found["octal"] is not None:
        return chr(int(found["octal"], 8))
    for kind in ("x", "u", "U"):
        if found[kind] is not None:
            return chr(int(found[kind], 16))
    if found["name"] is not None:
        return unicodedata.lookup(found["name"])
    other = found["other"]
    if other in "xuUN":
        raise ValueError(f"a broken \\{other}")
    return _ESCAPED.get(other, f"\\{other}")


def _string(r: Reader, quote: str) -> Wait[str | None]:
    triple = yield from literal(r, quote * 3)
    if not triple:
        r.pos += 1
    start = r.pos
    while (yield from more(r)):
        plain = _PLAIN[quote].match(r.text, r.pos)
        assert plain is not None
        r.pos = plain.end()
        if r.pos == len(r.text):
            continue
        if (yield from literal(r, quote * 3 if triple else quote)):
            end = r.pos - (3 if triple else 1)
            return _dump(unescape(r.text[start:end]))
        if r.text[r.pos] == "\n" and not triple:
            return None
        if (yield from literal(r, "\\")) and not (yield from more(r)):
            return None
        r.pos += 1
    return None


def _dump(text: str | None) -> str | None:
    return None if text is None else json.dumps(text, ensure_ascii=not is_text(text))


def _items(r: Reader, closer: str, depth: int) -> Wait[str | None]:
    """Consume a list or tuple. Parentheses around one value without a comma are that value."""
    r.pos += 1
    items: list[str] = []
    comma = True
    while True:
        yield from spaces(r)
        if (yield from literal(r, closer)):
            return items[0] if closer == ")" and len(items) == 1 and not comma else f"[{', '.join(items)}]"
        if not comma:
            return None
        item = yield from python_value(r, depth + 1)
        if item is None:
            return None
        items.append(item)
        yield from spaces(r)
        comma = yield from literal(r, ",")


def _dict(r: Reader, depth: int) -> Wait[str | None]:
    """Consume a dict whose keys are strings."""
    r.pos += 1
    members: list[str] = []
    comma = True
    while True:
        yield from spaces(r)
        if (yield from literal(r, "}")):
            return "{" + ", ".join(members) + "}"
        quote = yield from peek(r)
        key = (yield from _string(r, quote)) if comma and quote and quote in "'\"" else None
        if key is None:
            return None
        yield from spaces(r)
        if not (yield from literal(r, ":")):
            return None
        yield from spaces(r)
        value = yield from python_value(r, depth + 1)
        if value is None:
            return None
        members.append(f"{key}: {value}")
        yield from spaces(r)
        comma = yield from literal(r, ",")
