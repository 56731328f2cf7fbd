"""Writes grammars in llguidance's dialect of Lark (see its docs/syntax.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
"""The layout of `json.dumps`. If white space were free, a model could write it forever."""


def quote(text: str) -> str:
    """Write the text as a literal."""
    return json.dumps(text, ensure_ascii=False)


def spelt(text: str) -> str:
    """Write the text as a regular expression."""
    return "".join(f"\\x{{{ord(c):x}}}" for c in text)


def whole_within(text: str) -> str:
    """Return the body of a terminal for any text that does not contain `text`."""
    return f"/(?s:.*)/ & ~/(?s:.*){spelt(text)}(?s:.*)/"


class Lark:
    """A grammar that is being written: rules in order, `start` among them."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        """`token_ids`: text to id of the tokens that the tokenizer has besides its vocabulary."""
        self._token_ids = token_ids
        self._rules: list[str] = []
        self._terminals: dict[str, str] = {}

    def __str__(self) -> str:
        # Where only one text can follow, llguidance would propose the tokens that the tokenizer makes of
        # it, and then refuse the tokens of markers that are spelt in it, because it does not count these as
        # text.
        return "\n".join(['%llguidance {"no_forcing": true}', *self._rules, ""])

    def is_token(self, marker: str) -> bool:
        """Say whether the tokenizer has the marker as one token."""
        return marker in self._token_ids

    def marker(self, text: str) -> str:
        """Write a marker: its token, or its text if the tokenizer has no such token."""
        return f"<[{self._token_ids[text]}]>" if self.is_token(text) else quote(text)

    def rule(self, name: str, body: str) -> str:
        """Add a rule; return its name, by which others refer to it."""
        self._rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def terminal(self, body: str) -> str:
        """Return the name of a terminal with this body, which is added if there is none yet."""
        if body not in self._terminals:
            self._terminals[body] = self.rule(f"TERMINAL_{len(self._terminals)}", body)
        return self._terminals[body]

    def json(self, schema: Mapping[str, Any], *, exact: bool = False) -> str:
        """Add a rule for JSON of a schema, on one line; return its name. `exact`: the schema is one of
        `read_schema`, and a keyword in it that llguidance does not know is an error.
        """
        options: dict[str, Any] = dict(_LAYOUT)
        if exact:
            options |= {"lenient": False, "coerce_one_of": schema["x-guidance"]["coerce_one_of"]}
        laid_out = {**schema, "x-guidance": options}
        return self.rule(f"json_{len(self._rules)}", f"%json {json.dumps(laid_out)}")
