"""Reads JSON objects that callers write, strictly and with bounds on their size.

Python's reader holds the interpreter from the first byte to the last, so nothing else in the server runs
meanwhile, on whichever thread it reads: 20 MB of nested lists take 4 s. The time grows with the number of
values rather than of bytes, and nesting costs whatever walks over the result. So all three are bounded. Depth
and number of values are found by a look at the text beforehand, which other threads can interrupt.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_JSON_CHARS = 2**20
MAX_JSON_VALUES = 50_000
"""Most elements of arrays and members of objects, on all levels together. One that is itself an array or
object counts twice."""
MAX_JSON_DEPTH = 100
_MARK = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{},]', re.DOTALL)
"""A string, or a character that opens, closes or separates values."""
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)
"""An escape in a string; two for a surrogate pair."""


def parse_object(text: str) -> dict[str, Any]:
    """Parse the JSON object that `text` holds. Raises ValueError, with a message for the caller, if it holds
    none, or one that exceeds a bound.
    """
    _check_bounds(text)
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("must be a JSON object; this one is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, not {_kind(value)}")
    return value


def with_whole_pairs(json_text: str) -> str:
    """Return the JSON text with U+FFFD for each escape of half a surrogate pair, which is no character."""
    if "\\" not in json_text:
        return json_text
    return _ESCAPE.sub(lambda found: r"\ufffd" if found["half"] else found[0], json_text)


_PAIR_CHARS = len(r"\ud83d\ude00")


def settled_chars(json_text: str) -> int:
    """Tell how many of the first characters `with_whole_pairs` replaces alike, whatever follows them: all
    before an escape that may not be whole.
    """
    if "\\" not in json_text[-_PAIR_CHARS:]:
        return len(json_text)
    for found in _ESCAPE.finditer(json_text):
        rest = len(json_text) - found.start()
        if rest < _PAIR_CHARS and found[0][1:2] == "u":
            return found.start()
    return len(json_text) - (_num_backslashes(json_text) % 2)


def _num_backslashes(text: str) -> int:
    """Tell how many there are at the end."""
    return len(text) - len(text.rstrip("\\"))


def _check_bounds(text: str) -> None:
    if len(text) > MAX_JSON_CHARS:
        raise ValueError(f"must have at most {MAX_JSON_CHARS} characters, not {len(text)}")
    # Counting characters is a thousand times as fast as finding out which of them are in strings.
    opened = text.count("[") + text.count("{")
    if opened <= MAX_JSON_DEPTH and opened + text.count(",") <= MAX_JSON_VALUES:
        return
    depth = num_values = 0
    for mark in _MARK.finditer(text):
        char = text[mark.start()]
        if char in "[{":
            depth += 1
            num_values += 1
        elif char in "]}":
            depth -= 1
        elif char == ",":
            num_values += 1
        if depth > MAX_JSON_DEPTH:
            raise ValueError(
                f"must be a JSON object; this one is nested too deeply, over {MAX_JSON_DEPTH} levels"
            )
        if num_values > MAX_JSON_VALUES:
            raise ValueError(f"must be a JSON object; this one has more than {MAX_JSON_VALUES} values")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
