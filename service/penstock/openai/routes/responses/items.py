"""Makes the items of a response out of what an output adds, and the events that tell of it.

Items come one after the other: a new one begins when something of another kind comes. Usually that is
reasoning, then a message, then calls. They are kept as JSON, because several events hold the same items, and
log-probabilities make them large. Those are of the text of messages only.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from penstock.client import ToolCall, ToolCallDelta
from penstock.openai.jsonbytes import json_string
from penstock.openai.routes.custom_tools import InputPieces
from penstock.openai.schemas.responses import carried

_FUNCTION_CALL = ("fc", "function_call", "arguments")
_CUSTOM_CALL = ("ctc", "custom_tool_call", "input")
"""The prefix of ids, the type and the field of an item that is a call."""
json_text = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
"""Any value as JSON in ASCII, so that nothing in it ends a line of the stream. Raises ValueError for NaN."""


class EventWriter:
    """Numbers events and writes them as server-sent events."""

    def __init__(self) -> None:
        self._next = 0

    def event(self, kind: str, fields: Mapping[str, Any]) -> str:
        """Write an event of the type "response.<kind>"."""
        return self.written(kind, json_text(fields)[1:-1])

    def written(self, kind: str, fields: str) -> str:
        """Write an event whose fields are JSON already, without the braces."""
        number = self._next
        self._next += 1
        head = f'event: response.{kind}\ndata: {{"type":"response.{kind}","sequence_number":{number}'
        return f"{head},{fields}}}\n\n"


def delta_prefix(item_id: str, output_index: int, part: str) -> str:
    """Write the fields of all delta events of one item, up to the text. `part` holds fields that only some
    kinds have.
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
        """Return all text so far."""
        return "".join(self.pieces)

    def place(self) -> str:
        """Write the fields that name the item and its part in an event, as JSON without braces."""
        return f'"item_id":{json_string(self.item["id"])},"output_index":{self.index},"content_index":0'

    def part(self) -> str:
        """Write the JSON of the part of the item that holds the text so far."""
        text = json_string(self.text())
        if self.kind == "reasoning_text":
            return f'{{"type":"reasoning_text","text":{text}}}'
        logprobs = ",".join(self.logprobs)
        return f'{{"type":"output_text","text":{text},"annotations":[],"logprobs":[{logprobs}]}}'


class _Call:
    """The item of the call that is being added to: of a function, or of a custom tool, which gets a text."""

    def __init__(self, item: dict[str, Any], index: int, field: str, inputs: InputPieces | None) -> None:
        self.item = item
        self.index = index
        self.field = field
        """The item's field that is added to: "arguments" or "input"."""
        self.event = f"{item['type']}_{field}"
        """The first word of the events of what is added."""
        self.arguments: list[str] = []
        """All arguments so far."""
        self.pieces: list[str] = []
        """All of the field so far."""
        self.prefix = delta_prefix(item["id"], index, "")
        self._inputs = inputs

    def add(self, arguments_json: str) -> str:
        """Return what the field gets by a piece of the arguments."""
        self.arguments.append(arguments_json)
        return arguments_json if self._inputs is None else self._inputs.add(arguments_json)

    def rest(self) -> str:
        """Return what the field still gets when the call has ended."""
        return "" if self._inputs is None else self._inputs.rest()


def _is_whole(arguments: str) -> bool:
    """Say whether they are JSON, and so did not end too early."""
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True


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
        """Take a `number` that makes the ids of items unique. With `carries_reasoning` items of reasoning
        have `encrypted_content`. `names` has the fields that name a function whose name is not the model's,
        and `custom_tools` the names by which the model knows tools of that type.
        """
        self._names = names or {}
        self._custom_tools = custom_tools
        self._number = number
        self._events = events
        self._carries_reasoning = carries_reasoning
        self._open: _Text | _Call | None = None
        self.items: list[str] = []
        """The JSON of all items that have ended."""

    @property
    def is_empty(self) -> bool:
        """Whether no item has begun."""
        return self._open is None and not self.items

    def reasoning(self, text: str) -> str:
        """Add to what the model thought."""
        said = ""
        thought = self._open
        if not isinstance(thought, _Text) or thought.kind != "reasoning_text":
            said = self.end("completed")
            item = {"id": self._id("rs"), "type": "reasoning", "status": "in_progress", "summary": []}
            thought = _Text("reasoning_text", item, len(self.items))
            said += self._begin(thought)
        thought.pieces.append(text)
        return said + self._events.written("reasoning_text.delta", thought.prefix + json_string(text))

    def text(self, text: str, entries: Sequence[Entry] = ()) -> str:
        """Add to the text of a message. An empty text begins the message."""
        said = ""
        words = self._open
        if not isinstance(words, _Text) or words.kind != "output_text":
            said = self.end("completed")
            item = {"id": self._id("msg"), "type": "message", "status": "in_progress", "role": "assistant"}
            words = _Text("output_text", item, len(self.items))
            said += self._begin(words)
        if not text:
            return said
        words.pieces.append(text)
        logprobs = ""
        if entries:
            logprobs = json_text(entries)[1:-1]
            words.logprobs.append(logprobs)
        fields = f'{words.prefix}{json_string(text)},"logprobs":[{logprobs}]'
        return said + self._events.written("output_text.delta", fields)

    def call(self, call: ToolCall) -> str:
        """Add a call, which comes whole."""
        return self.call_piece(ToolCallDelta(0, call.id, call.name, call.arguments_json))

    def call_piece(self, piece: ToolCallDelta) -> str:
        """Add to a call. A piece with a name begins one."""
        said = ""
        if piece.name:
            said = self.end("completed")
            is_custom = piece.name in self._custom_tools
            prefix, kind, field = _CUSTOM_CALL if is_custom else _FUNCTION_CALL
            item = {
                "id": self._id(prefix),
                "type": kind,
                "status": "in_progress",
                "call_id": piece.id,
                "name": piece.name,
                **self._names.get(piece.name, {}),
                field: "",
            }
            self._open = _Call(item, len(self.items), field, InputPieces() if is_custom else None)
            said += self._item_event("added", self._open.index, json_text(item))
        assert isinstance(self._open, _Call), "the client has checked the order of pieces"
        return said + self._told(self._open, self._open.add(piece.arguments_json))

    def _told(self, call: _Call, added: str) -> str:
        if not added:
            return ""
        call.pieces.append(added)
        return self._events.written(f"{call.event}.delta", call.prefix + json_string(added))

    def _end_call(self, ended: _Call, status: str) -> str:
        said = self._told(ended, ended.rest())
        if status != "completed" and _is_whole("".join(ended.arguments)):
            status = "completed"
        text = "".join(ended.pieces)
        done = json_text({**ended.item, "status": status, ended.field: text})
        place = {"item_id": ended.item["id"], "output_index": ended.index, ended.field: text}
        self.items.append(done)
        return (
            said
            + self._events.event(f"{ended.event}.done", place)
            + self._item_event("done", ended.index, done)
        )

    def end(self, status: str) -> str:
        """End the item that was added to, if there is one. `status` is "completed" or "incomplete", which a
        call is only if its arguments are.
        """
        ended, self._open = self._open, None
        if ended is None:
            return ""
        if isinstance(ended, _Call):
            return self._end_call(ended, status)
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

    def _begin(self, begun: _Text) -> str:
        self._open = begun
        return self._item_event("added", begun.index, _item(begun.item, "")) + self._events.written(
            "content_part.added", f'{begun.place()},"part":{begun.part()}'
        )

    def _item_event(self, what: str, index: int, item: str) -> str:
        return self._events.written(f"output_item.{what}", f'"output_index":{index},"item":{item}')

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._number}{len(self.items):04x}"


def _item(fields: Mapping[str, Any], part: str) -> str:
    """Write the JSON of an item with this part; with none if it is empty."""
    return f'{json_text(fields)[:-1]},"content":[{part}]}}'
