"""Writes the events of a stream of /v1/responses as they go over the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.openai.jsonbytes import json_string

json_text = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
"""Any value as JSON in ASCII, so that nothing in it ends a line of the stream. Raises ValueError for NaN."""


class EventWriter:
    """Numbers events and writes them as server-sent events."""

    def __init__(self) -> None:
        self._next = 0

    def event(self, kind: str, fields: Mapping[str, Any]) -> str:
        """An event of the type "response.<kind>"."""
        return self.written(kind, json_text(fields)[1:-1])

    def written(self, kind: str, fields: str) -> str:
        """An event whose fields are JSON already, without the braces."""
        number = self._next
        self._next += 1
        head = f'event: response.{kind}\ndata: {{"type":"response.{kind}","sequence_number":{number}'
        return f"{head},{fields}}}\n\n"


def delta_prefix(item_id: str, output_index: int, part: str) -> str:
    """The fields of all delta events of one item, up to the text. `part` holds fields that only some kinds
    have.
    """
    return f'"item_id":{json_string(item_id)},"output_index":{output_index},{part}"delta":'
