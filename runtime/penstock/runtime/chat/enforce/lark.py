"""Writing grammars in llguidance's dialect of Lark (its docs/syntax.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
"""As `json.dumps` lays it out; without freedom in white space, a model cannot write it for ever."""


def quote(text: str) -> str:
    """A literal."""
    return json.dumps(text, ensure_ascii=False)


def whole_within(text: str) -> str:
    """A terminal's body: any text that does not hold `text`."""
    escaped = "".join(f"\\x{{{ord(c):x}}}" for c in text)
    return f"/(?s:.*)/ & ~/(?s:.*){escaped}(?s:.*)/"


class Lark:
    """A grammar in the making: rules in order, `start` among them."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        """`token_ids`: ids of the tokens that the tokenizer has besides its vocabulary, by their text."""
        self._token_ids = token_ids
        self._rules: list[str] = []

    def __str__(self) -> str:
        # Where text is certain, llguidance would propose the tokens that the tokenizer makes of it, and then
        # refuse those of markers spelt in it: they are no text to it.
        return "\n".join(['%llguidance {"no_forcing": true}', *self._rules, ""])

    def is_token(self, marker: str) -> bool:
        """Whether the tokenizer has the marker as one token."""
        return marker in self._token_ids

    def marker(self, text: str) -> str:
        """A marker: its token, or its text where the tokenizer has no such token."""
        return f"<[{self._token_ids[text]}]>" if self.is_token(text) else quote(text)

    def rule(self, name: str, body: str) -> str:
        """Add a rule; returns its name, to refer to it."""
        self._rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def json(self, schema: Mapping[str, Any]) -> str:
        """Add a rule for JSON of a schema, on one line; returns its name."""
        laid_out = {**schema, "x-guidance": _LAYOUT}
        return self.rule(f"json_{len(self._rules)}", f"%json {json.dumps(laid_out)}")
