"""Whatever an answer of /v1/chat/completions or /v1/responses is, streamed or whole, its program can put it
into the next request, which then has the turn that the server wrote. For /v1/messages see
tests/service/openai/messages/test_history.py.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.client import (
    ChatMessage,
    Delta,
    Finished,
    Generation,
    Output,
    PromptInfo,
    ToolCall,
    ToolCallDelta,
)
from penstock.openai import reading
from penstock.openai.generation.frames import UsageWanted, Wanted
from penstock.openai.jsonbytes import json_bytes
from penstock.openai.routes import turns as chat_turns
from penstock.openai.routes.chat import ChatChunks, chat_completion
from penstock.openai.routes.responses import turns as response_turns
from penstock.openai.routes.responses.writing import whole_response
from penstock.openai.schemas.base import Body
from penstock.openai.schemas.chat import ChatBody
from penstock.openai.schemas.responses import ResponsesBody
from tests.service.openai.messages.test_history import ARGUMENTS, HI, TEXT
from tests.service.openai.responses.sent_events import accumulated
from tests.service.openai.responses.test_writing import EOS, STARTED, TIMING, USAGE, asked, streamed
from tests.support.chat import pieces_of

CUT = st.builds(lambda text, end: text[:end], ARGUMENTS, st.integers(0, 12))
"""Arguments of calls that were cut off."""
CUTS = st.lists(st.integers(0, 12), max_size=3)


def taken(body: type[Body], **fields: Any) -> Any:
    """Return the request as the front reads it."""
    return reading._parsed(json_bytes({"model": "demo", **fields}), body, set())


def turn_of_chat(message: Any) -> ChatMessage:
    _, turn, _ = chat_turns.turns_of(taken(ChatBody, messages=[HI, message, HI]).messages)
    return turn


def turn_of_response(response: Any) -> ChatMessage:
    items = taken(ResponsesBody, input=[HI, *response["output"], HI]).input
    _, turn, _ = response_turns.turns_of(items, None)
    return turn


def message_of(chunks: list[bytes]) -> dict[str, Any]:
    """Return what a program adds up of the chunks of a stream."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning": ""}
    calls: dict[int, Any] = {}
    for chunk in chunks:
        (choice,) = json.loads(chunk.removeprefix(b"data: "))["choices"]
        for name in ("content", "reasoning"):
            message[name] += choice["delta"].get(name) or ""
        for piece in choice["delta"].get("tool_calls", ()):
            call = calls.setdefault(piece["index"], {**piece, "function": {"name": "", "arguments": ""}})
            for name, more in piece["function"].items():
                call["function"][name] += more
    made = [{name: value for name, value in call.items() if name != "index"} for call in calls.values()]
    return message | ({"tool_calls": made} if made else {})


@given(TEXT, TEXT, st.lists(st.tuples(ARGUMENTS | CUT, CUTS), max_size=3), CUTS)
def test_any_answer_can_be_sent_back(reasoning: str, text: str, calls: Any, cuts: list[int]) -> None:
    made = tuple(ToolCall(f"call{i}", "f", arguments) for i, (arguments, _) in enumerate(calls))
    output = Output(0, text, (), EOS, reasoning=reasoning, tool_calls=made)
    answer = Generation("chatcmpl-x", "demo", PromptInfo(7), (output,), USAGE, TIMING)
    deltas = [Delta(0, "", reasoning=piece) for piece in pieces_of(reasoning, cuts)]
    deltas += [Delta(0, piece) for piece in pieces_of(text, cuts)]
    for i, (call, (_, within)) in enumerate(zip(made, calls, strict=True)):
        names = [(call.id, call.name), *[("", "")] * len(within)]
        for name, piece in zip(names, pieces_of(call.arguments_json, within), strict=True):
            deltas.append(Delta(0, "", tool_call_deltas=(ToolCallDelta(i, *name, piece),)))

    whole = chat_completion(answer, 0, Wanted())["choices"][0]["message"]
    chunks = ChatChunks(STARTED, 0, Wanted(), UsageWanted())
    sent = [*map(chunks.delta, deltas), chunks.finished(Finished(0, EOS, text))]
    found = [turn_of_chat(whole), turn_of_chat(message_of([chunk for chunk in sent if chunk]))]
    found.append(turn_of_response(json.loads(whole_response(answer, asked()))))
    found.append(turn_of_response(accumulated(streamed(deltas))))
    for turn in found:
        assert (turn.role, turn.content, turn.reasoning) == ("assistant", text, reasoning)
        assert turn.tool_calls == made
