"""Writes JSON as it goes over the wire."""

from __future__ import annotations

import json
from json.encoder import encode_basestring
from typing import Any, Final

_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_LINE_ENDS: Final = (("\x85", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))
"""Characters at which some clients divide a stream, because Python's str.splitlines does. JSON does not ask
for them to be escaped.
"""


def json_bytes(value: Any) -> bytes:
    """Write the JSON of a value in UTF-8, on one line and without spaces. Raises ValueError for NaN and
    infinity. A lone surrogate, which UTF-8 does not have, becomes a question mark.
    """
    return on_one_line(_ENCODE(value)).encode("utf-8", "replace")


def on_one_line(made: str) -> str:
    """Return the JSON with escapes for the characters that may end a line, which only its strings can
    have.
    """
    if not made.isascii():
        for character, escaped in _LINE_ENDS:
            if character in made:
                made = made.replace(character, escaped)
    return made


def json_string(text: str) -> str:
    """Write a text as JSON, with its characters as they are but for those that may end a line: as fast as
    Python writes it, because a stream has one for each token.
    """
    return on_one_line(encode_basestring(text))
