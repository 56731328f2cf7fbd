"""Makes the answer of /v1/messages: the object "message", whole, or the events of a stream.

A block of thinking needs a signature, with which Anthropic's API finds out whether somebody has changed it.
Nothing is signed here. Where the thinking is shown, the signature is a word; where it is omitted, the
signature holds it, so that the block can be sent back in either case.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

from pydantic_core import from_json

from penstock.client import (
    AsyncGenerationStream,
    Delta,
    Finish,
    Finished,
    FinishReason,
    Generation,
    Started,
    StreamEvent,
    Summary,
    ToolCall,
    Usage,
)
from penstock.openai.generation.frames import finish_reason
from penstock.openai.jsonbytes import json_bytes, json_string
from penstock.openai.reading import BIGGEST_INT_DIGITS
from penstock.openai.schemas.responses import carried

UNSIGNED: Final = "penstock-unsigned"
"""The signature of thinking that is shown."""


def whole_message(answer: Generation, *, shows_thinking: bool) -> dict[str, Any]:
    """Make the object "message". Raises ApiError if the output was aborted."""
    output = answer.outputs[0]
    blocks: list[dict[str, Any]] = []
    if output.reasoning:
        thinking = output.reasoning if shows_thinking else ""
        signature = _signature(output.reasoning, shows_thinking=shows_thinking)
        blocks.append({"type": "thinking", "thinking": thinking, "signature": signature})
    if output.text:
        blocks.append({"type": "text", "text": output.text})
    blocks += (
        {"type": "tool_use", "id": call.id, "name": call.name, "input": tool_input(call)}
        for call in output.tool_calls
    )
    ending = _ending(output.finish, has_calls=bool(output.tool_calls))
    return {
        **_message(answer.request_id, answer.model),
        "content": blocks,
        **ending,
        "usage": _usage(answer.usage),
    }


async def message_events(
    stream: AsyncGenerationStream, *, shows_thinking: bool
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a message, as they go over the wire, to the end of `stream`, which is closed in any
    case. Raises ApiError if the output was aborted, and what `stream` raises.
    """
    writer = MessageWriter(shows_thinking=shows_thinking)
    async with stream:
        async for event in stream:
            if said := writer.feed(event):
                yield said.encode("utf-8", "replace")


class MessageWriter:
    """Writes the events of one message. Its blocks come one after the other: a new one begins when something
    of another kind comes. Usually that is thinking, then text, then calls.
    """

    def __init__(self, *, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._num_blocks = 0
        self._open = ""
        """The type of the block that is being added to; empty if there is none."""
        self._thoughts: list[str] = []
        """What the open block of thinking holds so far, where it is not shown."""
        self._pieces = _Pieces()
        """The arguments of the open call."""
        self._has_calls = False
        self._finish: Finish | None = None

    def feed(self, event: StreamEvent) -> str:
        """Write the events that tell of one of the server's; empty where nothing is to be told. Raises
        ApiError if the output was aborted.
        """
        match event:
            case Started():
                return self.begin(event)
            case Delta():
                return self.add(event)
            case Finished():
                self._finish = event.finish
                return ""
            case Summary():
                return self.end(event.usage)

    def begin(self, started: Started) -> str:
        """Write the first event. What of the prompt was found in the cache is known only at the end."""
        usage = _usage(Usage(started.prompt.token_count, 0, 0))
        ending = {"stop_reason": None, "stop_sequence": None}
        message = {**_message(started.request_id, started.model), "content": [], **ending, "usage": usage}
        return _event("message_start", message=message)

    def add(self, delta: Delta) -> str:
        """Write the events of what was added to the output."""
        said = ""
        for piece in delta.tool_call_deltas:
            if not piece.name:  # it goes on with a call that was made before all else in this delta
                said += self._arguments(piece.arguments_json)
        if delta.reasoning:
            said += self._begin("thinking", thinking="", signature="")
            if self._shows_thinking:
                said += self._delta(f'"thinking_delta","thinking":{json_string(delta.reasoning)}')
            else:
                self._thoughts.append(delta.reasoning)
        if delta.delta:
            said += self._begin("text", text="")
            said += self._delta(f'"text_delta","text":{json_string(delta.delta)}')
        for piece in delta.tool_call_deltas:
            if piece.name:
                said += self._call(piece.id, piece.name) + self._arguments(piece.arguments_json)
        for call in delta.tool_calls:
            arguments = json_bytes(tool_input(call)).decode()
            said += self._call(call.id, call.name) + self._arguments(arguments) + self._end()
        return said

    def end(self, usage: Usage) -> str:
        """Write the last events. Raises ApiError if the output was aborted."""
        assert self._finish is not None, "the client has checked the order of the stream"
        ending = _ending(self._finish, has_calls=self._has_calls)
        said = self._end() + _event("message_delta", delta=ending, usage=_usage(usage))
        return said + _event("message_stop")

    def _call(self, call_id: str, name: str) -> str:
        """Write the beginning of a call."""
        self._has_calls, ended = True, self._end()
        self._pieces = _Pieces()
        return ended + self._begin("tool_use", id=call_id, name=name, input={})

    def _arguments(self, piece: str) -> str:
        """Write a piece of the arguments of the open call."""
        return self._written(self._pieces.add(piece))

    def _written(self, text: str) -> str:
        return self._delta(f'"input_json_delta","partial_json":{json_string(text)}') if text else ""

    def _begin(self, kind: str, **fields: Any) -> str:
        """Make sure that a block of this type is open."""
        if self._open == kind:
            return ""
        said = self._end()
        self._open = kind
        block = {"type": kind, **fields}
        return said + _event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, fields: str) -> str:
        """Write what was added to the open block; `fields` are JSON from the type on."""
        return (
            'event: content_block_delta\ndata: {"type":"content_block_delta",'
            f'"index":{self._num_blocks},"delta":{{"type":{fields}}}}}\n\n'
        )

    def _end(self) -> str:
        """End the open block, if there is one."""
        if not self._open:
            return ""
        said = self._written(self._pieces.rest()) if self._open == "tool_use" else ""
        if self._open == "thinking":
            signature = _signature("".join(self._thoughts), shows_thinking=self._shows_thinking)
            said = self._delta(f'"signature_delta","signature":{json_string(signature)}')
        said += _event("content_block_stop", index=self._num_blocks)
        self._num_blocks += 1
        self._open, self._thoughts = "", []
        return said


class _Pieces:
    """The arguments of one call, which come in pieces, with numbers as `tool_input` makes them: otherwise a
    client would read a number that it cannot send back.
    """

    def __init__(self) -> None:
        self._held = ""
        """What further characters may change: a number that may go on, or a lone backslash."""
        self._is_string = False

    def add(self, piece: str) -> str:
        """Return what is certain with this piece."""
        text, at, told = self._held + piece, 0, []
        while at < len(text):
            found = (_IN_STRING if self._is_string else _BETWEEN).match(text, at)
            assert found is not None, "both match anything"
            told.append(found[0])
            at = found.end()
            word = None if self._is_string else _WORD.match(text, at)
            if word is not None and word.end() < len(text):
                told.append(_sendable(word[0]))
                at = word.end()
            elif text[at : at + 1] == '"':
                told.append('"')
                at += 1
                self._is_string = not self._is_string
            else:
                break
        self._held = text[at:]
        return "".join(told)

    def rest(self) -> str:
        """Return what is held, which is all that came of a call that was cut off."""
        held, self._held = self._held, ""
        return held if self._is_string else _sendable(held)


_IN_STRING: Final = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
_BETWEEN: Final = re.compile(r'[^"\w.+-]*')
_WORD: Final = re.compile(r"[\w.+-]+")


def _sendable(word: str) -> str:
    """Write a number, or another word of JSON, as it can be sent back."""
    try:
        return json.dumps(_read(word))
    except ValueError:
        return word


def _read(text: str) -> Any:
    return json.loads(text, parse_int=_integer, parse_float=_number, parse_constant=lambda _: None)


def tool_input(call: ToolCall) -> dict[str, Any]:
    """Read the arguments of a call, as they can be sent back: what JSON's readers make of them, without
    halves of surrogate pairs, with numbers that are not too large for a request, and with null for what is no
    number. Of a call that was cut off, they are what had come of them.
    """
    text = call.arguments_json.strip() or "{}"
    try:
        value = _read(text)
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        value = _begun_object(text)
        text = json.dumps(value, ensure_ascii=False)
    if not text.isascii():
        value = json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    return value if isinstance(value, dict) else {}


def _begun_object(text: str) -> Any:
    """Read what has come of JSON that ends too early; an empty object where that is nothing, or is nested too
    deeply for a request.
    """
    try:
        return from_json(text, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        return {}


def _integer(text: str) -> int | float:
    return int(text) if len(text) <= BIGGEST_INT_DIGITS else _number(text)


def _number(text: str) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def _signature(thought: str, *, shows_thinking: bool) -> str:
    return UNSIGNED if shows_thinking else carried(thought)


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json_bytes({'type': kind, **fields}).decode()}\n\n"


def _message(message_id: str, model: str) -> Mapping[str, Any]:
    return {"id": message_id, "type": "message", "role": "assistant", "model": model}


def _ending(finish: Finish, *, has_calls: bool) -> Mapping[str, str | None]:
    """Say why the message ended. Raises ApiError if the output was aborted."""
    reason = finish_reason(finish, has_calls=has_calls)
    sequence = None
    if finish.reason is FinishReason.CONTEXT_FULL:
        told = "model_context_window_exceeded"
    elif reason == "stop":
        sequence = finish.stop if finish.reason is FinishReason.STOP else None
        told = "end_turn" if sequence is None else "stop_sequence"
    else:
        told = {"length": "max_tokens", "tool_calls": "tool_use"}[reason]
    return {"stop_reason": told, "stop_sequence": sequence}


def _usage(usage: Usage) -> Mapping[str, Any]:
    """Write the figures that the server counted. Tokens that were found in the cache are not among the
    input's.
    """
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
