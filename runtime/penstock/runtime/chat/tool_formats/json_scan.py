"""Recognises JSON while it arrives (RFC 8259, strictly), and the object that most models write as a call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence

from penstock.runtime.chat.tool_formats.events import Draft, is_text
from penstock.runtime.chat.tool_formats.reader import (
    SPACES,
    Reader,
    Wait,
    literal,
    more,
    peek,
    spaces,
    text_until,
)

MAX_DEPTH = 100
"""JSON that is nested more deeply is not recognised, because code that reads the arguments may recurse."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = "0123456789abcdefABCDEF"
_DIGITS = "0123456789"
_NUMBER: dict[str, list[tuple[str, str]]] = {
    "": [("-", "minus"), ("0", "zero"), ("123456789", "whole")],
    "minus": [("0", "zero"), ("123456789", "whole")],
    "zero": [(".", "point"), ("eE", "exponent")],
    "whole": [(_DIGITS, "whole"), (".", "point"), ("eE", "exponent")],
    "point": [(_DIGITS, "fraction")],
    "fraction": [(_DIGITS, "fraction"), ("eE", "exponent")],
    "exponent": [("+-", "sign"), (_DIGITS, "power")],
    "sign": [(_DIGITS, "power")],
    "power": [(_DIGITS, "power")],
}
"""State within a number to the characters that may follow, each with the state after it."""
_NUMBER_ENDS = ("zero", "whole", "fraction", "power")


def call_object(
    r: Reader,
    call: Draft,
    known: Collection[str] | None = None,
    *,
    ends: Sequence[str] = (),
    closing: str = "}",
) -> Wait[bool]:
    """Consume `{"name": ..., "arguments": {...}}` (or "parameters"). Returns False as soon as it cannot be
    one, or is broken. `ends` and `closing` are as for `arguments_object`.

    With `known`, only the object itself shows that it is a call, so it must have just these two keys, perhaps
    "type" and "id", and a known name. Without, other keys are skipped, missing arguments are `{}`, and it is
    certain that it is a call when its arguments begin.
    """
    name = early = None
    has_arguments = False
    if not (yield from literal(r, "{")):
        return False
    while True:
        yield from spaces(r)
        key = yield from _json_text(r)
        if key is None or (
            known is not None and key not in ("name", "arguments", "parameters", "type", "id")
        ):
            return False
        yield from spaces(r)
        if not (yield from literal(r, ":")):
            return False
        yield from spaces(r)
        if key == "name":
            if name is not None:
                return False
            name = yield from _json_text(r)
            if not name or not is_text(name) or (known is not None and name not in known):
                return False
            if known is None or early is not None:
                call.begin(name)
                call.add(early or "")
        elif key in ("arguments", "parameters"):
            start = r.pos
            if has_arguments or (yield from peek(r)) != "{":
                return False
            has_arguments = True
            if name is None:
                if not (yield from json_value(r)):
                    return False
                early = r.text[start : r.pos]
            else:
                if known is None:
                    call.settle()
                else:
                    call.begin(name)
                if not (yield from arguments_object(r, call, ends, closing)):
                    return False
        elif not (yield from json_value(r)):
            return False
        yield from spaces(r)
        if (yield from literal(r, "}")):
            break
        if not (yield from literal(r, ",")):
            return False
    if name is None or not (has_arguments or known is None):
        return False
    if not has_arguments:
        call.add("{}")
    return True


def arguments_object(r: Reader, call: Draft, ends: Sequence[str], closing: str = "") -> Wait[bool]:
    """Consume an object, and write it to the call as it comes, if it is certain that this is one. Returns
    False if it is broken.

    Broken arguments of a certain call go on up to the first of `ends`, which are the form's markers. White
    space before that, and the `closing` of what is around the arguments, do not belong to them.
    """
    if not call.is_certain:
        start = r.pos
        is_whole = yield from json_value(r)
        call.add(r.text[start : r.pos])
        return is_whole
    r.follow(call.add)
    is_whole = yield from json_value(r)
    r.unfollow()
    if not is_whole:
        yield from _broken(r, call.add, ends, closing)
    return is_whole


def _broken(r: Reader, out: Callable[[str], None], ends: Sequence[str], closing: str) -> Wait[None]:
    held = ""

    def add(text: str) -> None:
        nonlocal held
        text = held + text
        sure = text.rstrip(f"{SPACES}{closing}")
        held = text[len(sure) :]
        if sure:
            out(sure)

    if (yield from text_until(r, add, ends)):
        held = held.rstrip(SPACES).removesuffix(closing)
    out(held.rstrip(SPACES))


def json_value(r: Reader) -> Wait[bool]:
    """Consume one value. Returns False, somewhere within it, as soon as it cannot be one."""
    closers: list[str] = []
    while True:
        yield from spaces(r)
        char = yield from peek(r)
        if char and char in "{[":
            r.pos += 1
            closers.append("}" if char == "{" else "]")
            if len(closers) > MAX_DEPTH:
                return False
            yield from spaces(r)
            if not (yield from literal(r, closers[-1])):
                if char == "{" and not (yield from _key(r)):
                    return False
                continue
            closers.pop()
        elif not (yield from _scalar(r, char)):
            return False
        while closers:  # a value has ended
            yield from spaces(r)
            if (yield from literal(r, closers[-1])):
                closers.pop()
            elif not (yield from literal(r, ",")) or (closers[-1] == "}" and not (yield from _key(r))):
                return False
            else:
                break
        if not closers:
            return True


def _key(r: Reader) -> Wait[bool]:
    """Consume a member's name and colon."""
    yield from spaces(r)
    if not (yield from _string(r)):
        return False
    yield from spaces(r)
    return (yield from literal(r, ":"))


def _scalar(r: Reader, char: str) -> Wait[bool]:
    if char == '"':
        return (yield from _string(r))
    for word in ("true", "false", "null"):
        if char == word[0]:
            return (yield from literal(r, word))
    return (yield from _number(r))


def _json_text(r: Reader) -> Wait[str | None]:
    """Consume a string and return its text."""
    start = r.pos
    if not (yield from _string(r)):
        return None
    text: str = json.loads(r.text[start : r.pos])
    return text


def _string(r: Reader) -> Wait[bool]:
    if not (yield from literal(r, '"')):
        return False
    while (yield from more(r)):
        plain = _PLAIN.match(r.text, r.pos)
        assert plain is not None
        r.pos = plain.end()
        if r.pos == len(r.text):
            continue
        if (yield from literal(r, '"')):
            return True
        if not (yield from literal(r, "\\")):
            return False  # a control character
        escape = yield from peek(r)
        r.pos += 1
        if escape == "u":
            for _ in range(4):
                digit = yield from peek(r)
                if not digit or digit not in _HEX:
                    return False
                r.pos += 1
        elif not escape or escape not in '"\\/bfnrt':
            return False
    return False


def _number(r: Reader) -> Wait[bool]:
    state = ""
    while (yield from more(r)):
        char = r.text[r.pos]
        following = next((after for chars, after in _NUMBER[state] if char in chars), None)
        if following is None:
            break
        state = following
        r.pos += 1
    return state in _NUMBER_ENDS
