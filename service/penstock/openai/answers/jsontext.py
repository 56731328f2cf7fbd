"""Writes the texts of a stream as JSON, as fast as Python does it: there is one for each token."""

from __future__ import annotations

from json.encoder import encode_basestring

from penstock.openai.jsonbytes import on_one_line


def json_string(text: str) -> str:
    """A text as JSON, with its characters as they are but for those that may end a line."""
    return on_one_line(encode_basestring(text))
