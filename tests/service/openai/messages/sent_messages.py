"""Reads streams of /v1/messages as the published API describes them: blocks one after the other, each with a
start, its deltas and a stop.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json

DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
"""From a type of deltas to the field of the block that grows."""


def events_of(sent: str) -> list[dict[str, Any]]:
    """Return the events of a stream, as they were sent."""
    blocks = sent.split("\n\n")
    assert blocks.pop() == "", "a stream ends with a whole event"
    events = []
    for block in blocks:
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        events.append(event)
    return events


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the events come to. Each must stand where the published API allows it. Of a
    call that was cut off, Anthropic's clients read the arguments as far as they go.
    """
    first, *middle, delta, last = events
    assert (first["type"], delta["type"], last) == (
        "message_start",
        "message_delta",
        {"type": "message_stop"},
    )
    message: dict[str, Any] = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    is_open, arguments = False, ""
    for event in middle:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            is_open, arguments = True, ""
            continue
        assert is_open
        assert event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            is_open = False
            if arguments:
                block["input"] = from_json(arguments, allow_partial="trailing-strings")
        elif event["delta"]["type"] == "input_json_delta":
            arguments += event["delta"]["partial_json"]
        else:
            field = DELTAS[event["delta"]["type"]]
            block[field] += event["delta"][field]
    assert not is_open
    return {**message, **delta["delta"], "usage": delta["usage"]}
