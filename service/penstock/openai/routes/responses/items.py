"""Makes the items of a response out of what an output adds, and the events that tell of it.

Items come one after the other: a new one begins when something of another kind comes. Usually that is
reasoning, then a message, then calls. They are kept as JSON, because several events hold the same items, and
log-probabilities make them large. Those are of the text of messages only.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from penstock.client import ToolCall
from penstock.openai.jsonbytes import json_string
from penstock.openai.routes.custom_tools import input_of
from penstock.openai.schemas.responses import carried

_FUNCTION_CALL = ("fc", "function_call", "arguments")
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


Entry = dict[str, Any]
"""What is told of one token."""


class _Text:
    """The item that text is being added to: reasoning or a message."""

    def __init__(self, kind: str, item: dict[str, Any], index: int) -> None:
        self.kind = kind
        """The first word of the item's events: "reasoning_text" or "output_text"."""
        self.item = item
        self.index = index
        self.pieces: list[str] = []
        self.logprobs: list[str] = []
        """The JSON of log-probabilities, without the brackets of the list."""
        self.prefix = delta_prefix(item["id"], index, '"content_index":0,')

    def text(self) -> str:
        """All text so far."""
        return "".join(self.pieces)

    def place(self) -> str:
        """The fields that name the item and its part in an event, as JSON without braces."""
        return f'"item_id":{json_string(self.item["id"])},"output_index":{self.index},"content_index":0'

    def part(self) -> str:
        """The JSON of the part of the item that holds the text so far."""
        text = json_string(self.text())
        if self.kind == "reasoning_text":
            return f'{{"type":"reasoning_text","text":{text}}}'
        logprobs = ",".join(self.logprobs)
        return f'{{"type":"output_text","text":{text},"annotations":[],"logprobs":[{logprobs}]}}'


class OutputItems:
    """The items of one response, from its first event to its last. Each method returns the events, in SSE."""

    def __init__(
        self,
        number: str,
        events: EventWriter,
        *,
        carries_reasoning: bool = False,
        names: Mapping[str, Mapping[str, str]] | None = None,
        custom_tools: Collection[str] = (),
    ) -> None:
        """`number` makes the ids of items unique. With `carries_reasoning` items of reasoning have
        `encrypted_content`. `names` has the fields that name a function whose name is not the model's, and
        `custom_tools` the names by which the model knows tools of that type.
        """
        self._names = names or {}
        self._custom_tools = custom_tools
        self._number = number
        self._events = events
        self._carries_reasoning = carries_reasoning
        self._open: _Text | None = None
        self.items: list[str] = []
        """The JSON of all items that have ended."""

    @property
    def is_empty(self) -> bool:
        """Whether no item has begun."""
        return self._open is None and not self.items

    def reasoning(self, text: str) -> str:
        """Add to what the model thought."""
        said = ""
        if self._open is None or self._open.kind != "reasoning_text":
            said = self.end("completed")
            item = {"id": self._id("rs"), "type": "reasoning", "status": "in_progress", "summary": []}
            said += self._begin("reasoning_text", item)
        assert self._open is not None
        self._open.pieces.append(text)
        return said + self._events.written("reasoning_text.delta", self._open.prefix + json_string(text))

    def text(self, text: str, entries: Sequence[Entry] = ()) -> str:
        """Add to the text of a message. An empty text begins the message."""
        said = ""
        if self._open is None or self._open.kind != "output_text":
            said = self.end("completed")
            item = {"id": self._id("msg"), "type": "message", "status": "in_progress", "role": "assistant"}
            said += self._begin("output_text", item)
        assert self._open is not None
        if not text:
            return said
        self._open.pieces.append(text)
        logprobs = ""
        if entries:
            logprobs = json_text(entries)[1:-1]
            self._open.logprobs.append(logprobs)
        fields = f'{self._open.prefix}{json_string(text)},"logprobs":[{logprobs}]'
        return said + self._events.written("output_text.delta", fields)

    def call(self, call: ToolCall) -> str:
        """Add a call, which comes whole."""
        said = self.end("completed")
        index = len(self.items)
        is_custom = call.name in self._custom_tools
        prefix, kind, field = ("ctc", "custom_tool_call", "input") if is_custom else _FUNCTION_CALL
        value = input_of(call) if is_custom else call.arguments_json
        item = {
            "id": self._id(prefix),
            "type": kind,
            "status": "in_progress",
            "call_id": call.id,
            "name": call.name,
            **self._names.get(call.name, {}),
            field: "",
        }
        place = {"item_id": item["id"], "output_index": index}
        done = json_text({**item, "status": "completed", field: value})
        self.items.append(done)
        return "".join(
            (
                said,
                self._item_event("added", index, json_text(item)),
                self._events.event(f"{kind}_{field}.delta", {**place, "delta": value}),
                self._events.event(f"{kind}_{field}.done", {**place, field: value}),
                self._item_event("done", index, done),
            )
        )

    def end(self, status: str) -> str:
        """End the item that text was added to, if there is one. `status` is "completed" or "incomplete"."""
        ended, self._open = self._open, None
        if ended is None:
            return ""
        place, text, part = ended.place(), ended.text(), ended.part()
        told = f'{place},"text":{json_string(text)}'
        more: dict[str, Any] = {"status": status}
        if ended.kind == "output_text":
            told += f',"logprobs":[{",".join(ended.logprobs)}]'
        elif self._carries_reasoning:
            more["encrypted_content"] = carried(text)
        done = _item({**ended.item, **more}, part)
        self.items.append(done)
        return "".join(
            (
                self._events.written(f"{ended.kind}.done", told),
                self._events.written("content_part.done", f'{place},"part":{part}'),
                self._item_event("done", ended.index, done),
            )
        )

    def _begin(self, kind: str, item: dict[str, Any]) -> str:
        begun = self._open = _Text(kind, item, len(self.items))
        return self._item_event("added", begun.index, _item(item, "")) + self._events.written(
            "content_part.added", f'{begun.place()},"part":{begun.part()}'
        )

    def _item_event(self, what: str, index: int, item: str) -> str:
        return self._events.written(f"output_item.{what}", f'"output_index":{index},"item":{item}')

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._number}{len(self.items):04x}"


def _item(fields: Mapping[str, Any], part: str) -> str:
    """The JSON of an item with this part; with none if it is empty."""
    return f'{json_text(fields)[:-1]},"content":[{part}]}}'
