"""Reads streams of /v1/responses as openai's client does, and checks each event against its types."""

from __future__ import annotations

import json
from typing import Any, cast

from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def events_of(sent: str) -> list[dict[str, Any]]:
    """Return the events of a stream, as they were sent. Each must be one of openai's types, with its
    number.
    """
    blocks = sent.split("\n\n")
    assert blocks.pop() == "", "a stream ends with a whole event"
    events = []
    for number, block in enumerate(blocks):
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        assert event["sequence_number"] == number
        _EVENTS.validate_python(event)
        events.append(event)
    return events


def kinds_of(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of the events, without "response.", and each run of deltas as one."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    return [kind for i, kind in enumerate(kinds) if not kind.endswith(".delta") or kinds[i - 1 : i] != [kind]]


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what openai's client makes of the events up to the last one: the text, the calls and the
    reasoning.

    It adds up deltas, which have to come to what the last event's response says.
    """
    state = ResponseStreamState[None](input_tools=[], text_format=omit)
    thought: dict[int, str] = {}
    for event in events:
        parsed = _EVENTS.validate_python(event)
        state.handle_event(parsed)
        if parsed.type == "response.reasoning_text.delta":
            thought[parsed.output_index] = thought.get(parsed.output_index, "") + parsed.delta
    added_up = []
    for index, item in state._output_items.items():
        made = cast(BaseModel, item).model_dump(include={"id", "type", "arguments", "content"})
        if item.type == "reasoning":
            made["content"] = [{"text": thought[index]}]
        added_up.append(
            (
                made["id"],
                made["type"],
                made.get("arguments"),
                [part["text"] for part in made.get("content") or ()],
            )
        )
    last = events[-1]["response"]
    Response.model_validate(last)
    said = [
        (item["id"], item["type"], item.get("arguments"), [part["text"] for part in item.get("content", ())])
        for item in last["output"]
    ]
    assert added_up == said
    return dict(last)
