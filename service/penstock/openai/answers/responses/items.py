"""Makes the items of a response out of what an output adds, and the events that tell of it.

Items come one after the other: a new one begins when something of another kind comes. Usually that is
reasoning, then a message, then calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.client import ToolCall
from penstock.openai.answers.jsontext import json_string
from penstock.openai.answers.responses.events import EventWriter, delta_prefix, json_text
from penstock.openai.answers.responses.text_logprobs import Entry
from penstock.openai.schemas.carried_reasoning import carried

_PART = '"content_index":0,'


class _Text:
    """The item that text is being added to: reasoning or a message."""

    def __init__(self, kind: str, item: dict[str, Any], index: int) -> None:
        self.kind = kind
        """The first word of the item's events: "reasoning_text" or "output_text"."""
        self.item = item
        self.index = index
        self.pieces: list[str] = []
        self.entries: list[Entry] = []
        self.prefix = delta_prefix(item["id"], index, _PART)

    def place(self) -> dict[str, Any]:
        """The fields that name the item and its part in an event."""
        return {"item_id": self.item["id"], "output_index": self.index, "content_index": 0}

    def part(self) -> dict[str, Any]:
        """The part of the item that holds the text so far."""
        text = "".join(self.pieces)
        if self.kind == "reasoning_text":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self.entries)}


class OutputItems:
    """The items of one response, from its first event to its last. Each method returns the events, in SSE."""

    def __init__(self, number: str, events: EventWriter, *, carries_reasoning: bool = False) -> None:
        """`number` makes the ids of items unique. With `carries_reasoning` items of reasoning have
        `encrypted_content`.
        """
        self._number = number
        self._events = events
        self._carries_reasoning = carries_reasoning
        self._open: _Text | None = None
        self.items: list[dict[str, Any]] = []
        """All items that have begun; the last may be in progress."""

    def reasoning(self, text: str) -> str:
        """Add to what the model thought."""
        said = ""
        if self._open is None or self._open.kind != "reasoning_text":
            said = self.end("completed")
            item = {
                "id": self._id("rs"),
                "type": "reasoning",
                "status": "in_progress",
                "summary": [],
                "content": [],
            }
            said += self._begin("reasoning_text", item)
        assert self._open is not None
        self._open.pieces.append(text)
        return said + self._events.written("reasoning_text.delta", self._open.prefix + json_string(text))

    def text(self, text: str, entries: Sequence[Entry] = ()) -> str:
        """Add to the text of a message."""
        said = ""
        if self._open is None or self._open.kind != "output_text":
            said = self.end("completed")
            item = {"id": self._id("msg"), "type": "message", "status": "in_progress", "role": "assistant"}
            said += self._begin("output_text", {**item, "content": []})
        assert self._open is not None
        if not text:
            return said
        self._open.pieces.append(text)
        self._open.entries.extend(entries)
        logprobs = json_text(entries) if entries else "[]"
        fields = f'{self._open.prefix}{json_string(text)},"logprobs":{logprobs}'
        return said + self._events.written("output_text.delta", fields)

    def call(self, call: ToolCall) -> str:
        """Add a call, which comes whole."""
        said = self.end("completed")
        index = len(self.items)
        item = {
            "id": self._id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
        }
        place = {"item_id": item["id"], "output_index": index}
        done = {**item, "status": "completed", "arguments": call.arguments_json}
        self.items.append(done)
        return "".join(
            (
                said,
                self._events.event("output_item.added", {"output_index": index, "item": item}),
                self._events.event("function_call_arguments.delta", {**place, "delta": call.arguments_json}),
                self._events.event(
                    "function_call_arguments.done", {**place, "arguments": call.arguments_json}
                ),
                self._events.event("output_item.done", {"output_index": index, "item": done}),
            )
        )

    def end(self, status: str) -> str:
        """End the item that text was added to, if there is one. `status` is "completed" or "incomplete"."""
        ended, self._open = self._open, None
        if ended is None:
            return ""
        part = ended.part()
        done = {**ended.item, "status": status, "content": [part]}
        if ended.kind == "reasoning_text" and self._carries_reasoning:
            done["encrypted_content"] = carried(part["text"])
        self.items[ended.index] = done
        told = {**ended.place(), "text": part["text"]}
        if ended.kind == "output_text":
            told["logprobs"] = part["logprobs"]
        return "".join(
            (
                self._events.event(f"{ended.kind}.done", told),
                self._events.event("content_part.done", {**ended.place(), "part": part}),
                self._events.event("output_item.done", {"output_index": ended.index, "item": done}),
            )
        )

    def _begin(self, kind: str, item: dict[str, Any]) -> str:
        self._open = _Text(kind, item, len(self.items))
        self.items.append(item)
        return "".join(
            (
                self._events.event("output_item.added", {"output_index": self._open.index, "item": item}),
                self._events.event("content_part.added", {**self._open.place(), "part": self._open.part()}),
            )
        )

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._number}{len(self.items):04x}"
