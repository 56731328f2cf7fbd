"""Writes the texts of a stream as JSON, as fast as Python does it: there is one for each token."""

from __future__ import annotations

from json.encoder import encode_basestring

_LINE_ENDS = (("\x85", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))
"""Characters at which some clients divide a stream, because Python's str.splitlines does. JSON does not ask
for them to be escaped.
"""


def json_string(text: str) -> str:
    """A text as JSON, with its characters as they are but for those that may end a line."""
    made: str = encode_basestring(text)
    if not text.isascii():
        for character, escaped in _LINE_ENDS:
            if character in made:
                made = made.replace(character, escaped)
    return made
