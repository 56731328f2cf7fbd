"""Whatever an answer of /v1/messages is, it can be sent back, and then means what the server said."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.client import (
    Delta,
    Finish,
    Finished,
    FinishReason,
    Generation,
    Output,
    PromptInfo,
    Started,
    StreamEvent,
    Summary,
    Timing,
    ToolCall,
    ToolCallDelta,
    Usage,
    WeightsVersion,
)
from penstock.openai import reading
from penstock.openai.jsonbytes import json_bytes
from penstock.openai.routes.messages.turns import turns_of
from penstock.openai.routes.messages.writing import MessageWriter, whole_message
from penstock.openai.schemas.messages import MessagesBody
from tests.service.openai.messages.sent_messages import accumulated, events_of
from tests.support.chat import pieces_of

HI = {"role": "user", "content": "hi"}
USAGE, TIMING, EOS = Usage(7, 2, 5), Timing(0.0, 0.1, 0.2, 0), Finish(FinishReason.EOS)
STARTED = Started("msg_x", "demo", PromptInfo(7), WeightsVersion("initial", 1))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
KEY = st.text(max_size=6)
VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.one_of(
    st.dictionaries(KEY, VALUE, max_size=3).map(json.dumps),
    st.sampled_from(
        ["", '{"n": 1e999}', '{"n": -1e999}', '{"n": 123456789012345678901234}', '{"a": 1, "a": 2}']
    ),
)


def in_pieces(text: str, cuts: list[int]) -> list[Delta]:
    """Make a call whose arguments are cut at these positions."""
    names = [("c", "f"), *[("", "")] * len(cuts)]
    pieces = zip(names, pieces_of(text, cuts), strict=True)
    return [Delta(0, "", tool_call_deltas=(ToolCallDelta(0, *name, piece),)) for name, piece in pieces]


DELTAS = st.lists(
    st.one_of(
        st.builds(lambda text: [Delta(0, "", reasoning=text)], TEXT),
        st.builds(lambda text: [Delta(0, text)], TEXT),
        st.builds(lambda text: [Delta(0, "", tool_calls=(ToolCall("c", "f", text),))], ARGUMENTS),
        st.builds(in_pieces, ARGUMENTS, st.lists(st.integers(0, 40), max_size=4)),
    ),
    max_size=8,
).map(lambda parts: [delta for part in parts for delta in part])


def said(deltas: list[Delta]) -> Output:
    """Return the output that these deltas come to."""
    calls: list[ToolCall] = []
    for delta in deltas:
        calls += delta.tool_calls
        for piece in delta.tool_call_deltas:
            before = "" if piece.name else calls.pop().arguments_json
            calls.append(ToolCall("c", "f", before + piece.arguments_json))
    return Output(
        0,
        "".join(delta.delta for delta in deltas),
        (),
        EOS,
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=tuple(calls),
    )


def known(text: str) -> Any:
    """Return a call's arguments, as far as a request can tell them: floats stand for what has no other
    form.
    """

    def rounded(digits: str) -> float:
        value = float(digits)
        return math.copysign(1.7976931348623157e308, value) if math.isinf(value) else value

    def integer(digits: str) -> int | float:
        return int(digits) if len(digits) <= 20 else rounded(digits)

    whole = json.loads(text or "{}", parse_float=rounded, parse_int=integer)
    return json.loads(
        json.dumps(whole, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    )


@given(DELTAS, st.booleans())
def test_any_answer_can_be_sent_back(deltas: list[Delta], shows_thinking: bool) -> None:
    output = said(deltas)
    answer = Generation("msg_x", "demo", PromptInfo(7), (output,), USAGE, TIMING)
    writer = MessageWriter(shows_thinking=shows_thinking)
    events: list[StreamEvent] = [STARTED, *deltas, Finished(0, EOS, output.text), Summary(USAGE, TIMING)]
    sent = "".join(writer.feed(event) for event in events)
    whole = json.loads(json_bytes(whole_message(answer, shows_thinking=shows_thinking)))
    for message in (whole, accumulated(events_of(sent))):
        turns = [HI, {"role": "assistant", "content": message["content"]}, HI]
        data = json_bytes({"model": "demo", "max_tokens": 9, "messages": turns})
        ignored: set[str] = set()
        found = turns_of(reading._parsed(data, MessagesBody, ignored))[1].message()
        assert not ignored
        assert (found.role, found.content, found.reasoning) == ("assistant", output.text, output.reasoning)
        assert [(call.id, call.name) for call in found.tool_calls] == [("c", "f")] * len(output.tool_calls)
        for call, made in zip(found.tool_calls, output.tool_calls, strict=True):
            assert json.loads(call.arguments_json) == known(made.arguments_json)
