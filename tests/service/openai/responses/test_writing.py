"""What is written of a response, read with the types and the accumulator of the openai package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from penstock.client import (
    Delta,
    Finish,
    Finished,
    FinishReason,
    Generation,
    Logprobs,
    Output,
    PromptInfo,
    SamplingDefaults,
    Started,
    StreamEvent,
    Summary,
    Timing,
    ToolCall,
    ToolCallDelta,
    Usage,
    Vocabulary,
    WeightsVersion,
)
from penstock.openai.failures import ApiError
from penstock.openai.routes.responses.writing import Asked, ResponseWriter, whole_response
from penstock.openai.schemas.responses import ResponsesBody, text_of
from tests.service.openai.responses.sent_events import accumulated, events_of, kinds_of

USAGE = Usage(prompt_tokens=7, cached_prompt_tokens=2, completion_tokens=5, reasoning_tokens=3)
TIMING = Timing(0.0, 0.1, 0.2, 0)
STARTED = Started("resp_x", "demo", PromptInfo(7), WeightsVersion("initial", 1))
CALLS = (ToolCall("aaaaaaaaa", "f", '{"x": 1}'), ToolCall("bbbbbbbbb", "g", "{}"))
EOS = Finish(FinishReason.EOS)


def asked(**fields: Any) -> Asked:
    body = ResponsesBody.model_validate({"model": "demo", "input": "hi", **fields})
    return Asked(body, "0" * 32, 1_700_000_000, SamplingDefaults(temperature=0.5))


def streamed(
    deltas: Sequence[Delta], finish: Finish = EOS, made: Asked | None = None
) -> list[dict[str, Any]]:
    """Return the events of a stream with these deltas."""
    writer = ResponseWriter(made or asked())
    sent: list[StreamEvent] = [STARTED, *deltas, Finished(0, finish, ""), Summary(USAGE, TIMING)]
    return events_of("".join([*(writer.feed(event) for event in sent), writer.last()]))


def whole(
    text: str = "", reasoning: str = "", calls: Sequence[ToolCall] = (), made: Asked | None = None
) -> Any:
    output = Output(0, text, (), EOS, reasoning=reasoning, tool_calls=tuple(calls))
    answer = Generation("resp_x", "demo", PromptInfo(7), (output,), USAGE, TIMING)
    return json.loads(whole_response(answer, made or asked()))


def test_events_come_in_openais_order() -> None:
    events = streamed(
        [
            Delta(0, "", reasoning="Let me "),
            Delta(0, "", reasoning="think."),
            Delta(0, "Hel"),
            Delta(0, "lo"),
            Delta(0, "", tool_calls=CALLS[:1]),
        ]
    )
    text_item = ["output_item.added", "content_part.added"]
    assert kinds_of(events) == [
        "created",
        "in_progress",
        *text_item,
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        *text_item,
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    response = accumulated(events)
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    assert [item["status"] for item in response["output"]] == ["completed"] * 3
    assert response["output"][2]["call_id"] == "aaaaaaaaa"
    assert len({item["id"] for item in response["output"]}) == 3


def pieces(text: str) -> st.SearchStrategy[list[str]]:
    """Draw the text cut anywhere."""
    return st.lists(st.integers(0, len(text)), max_size=4).map(
        lambda cuts: [text[a:b] for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True)]
    )


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_a_stream_comes_to_the_whole_answer_however_it_is_cut(data: st.DataObject) -> None:
    characters = st.text('ab é\u2028\n"\\𝄞', max_size=8)
    reasoning, text = data.draw(characters), data.draw(characters)
    calls = data.draw(st.sampled_from([(), CALLS[:1], CALLS]))
    deltas = [Delta(0, "", reasoning=piece) for piece in data.draw(pieces(reasoning))]
    deltas += [Delta(0, piece) for piece in data.draw(pieces(text))]
    if data.draw(st.booleans()):
        for number, call in enumerate(calls):
            cut = data.draw(pieces(call.arguments_json))
            deltas.append(Delta(0, "", tool_call_deltas=(ToolCallDelta(number, call.id, call.name, cut[0]),)))
            deltas += [Delta(0, "", tool_call_deltas=(ToolCallDelta(number, "", "", p),)) for p in cut[1:]]
    else:
        deltas += [Delta(0, "", tool_calls=(call,)) for call in calls]
    response = accumulated(streamed(deltas))
    other = whole(text, reasoning, calls)
    response.pop("completed_at"), other.pop("completed_at")
    assert response == other


def test_a_whole_answer_is_openais_response() -> None:
    response = Response.model_validate(whole("Hello", "Hm.", CALLS))
    assert response.output_text == "Hello"
    assert response.status == "completed"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (
        7,
        5,
        12,
    )
    assert response.usage.input_tokens_details.cached_tokens == 2
    assert response.usage.output_tokens_details.reasoning_tokens == 3


def test_an_answer_says_what_was_used() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    made = asked(
        instructions="Be brief.",
        max_output_tokens=9,
        tools=[tool],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        top_p=0.25,
        metadata={"run": "7"},
        safety_identifier="abc",
        prompt_cache_key="k",
    )
    response = whole("Hello", made=made)
    assert response["instructions"] == "Be brief."
    assert response["temperature"] == 0.5, "the server's default"
    assert response["top_p"] == 0.25
    assert response["presence_penalty"] == 0.0
    assert response["tools"] == [{**tool, "description": None, "strict": False}]
    assert response["tool_choice"] == {"type": "function", "name": "f"}
    assert response["parallel_tool_calls"] is False
    assert response["metadata"] == {"run": "7"}
    assert response["safety_identifier"] == "abc"
    assert response["prompt_cache_key"] == "k"
    assert response["store"] is False


def test_an_empty_answer_has_an_empty_message() -> None:
    response = accumulated(streamed([]))
    (item,) = response["output"]
    assert item["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


@pytest.mark.parametrize(
    "reason", [FinishReason.MAX_TOKENS, FinishReason.CONTEXT_FULL, FinishReason.TIME_LIMIT]
)
def test_what_a_limit_ended_is_incomplete(reason: FinishReason) -> None:
    events = streamed([Delta(0, "Hel")], Finish(reason))
    assert events[-1]["type"] == "response.incomplete"
    response = accumulated(events)
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["completed_at"] is None


def test_a_call_that_is_cut_off_is_incomplete() -> None:
    """It is the same in a stream and as a whole. A call before it is complete."""
    calls = (CALLS[1], ToolCall("aaaaaaaaa", "f", '{"x": '))
    begun = (ToolCallDelta(0, "bbbbbbbbb", "g", "{}"), ToolCallDelta(1, "aaaaaaaaa", "f", '{"x'))
    rest = (ToolCallDelta(1, "", "", '": '),)
    cut = Finish(FinishReason.MAX_TOKENS)
    for deltas in (
        [Delta(0, "", tool_calls=calls)],
        [Delta(0, "", tool_call_deltas=begun), Delta(0, "", tool_call_deltas=rest)],
    ):
        response = accumulated(streamed(deltas, cut))
        assert [(i["status"], i["arguments"]) for i in response["output"]] == [
            ("completed", "{}"), ("incomplete", '{"x": ')
        ]  # fmt: skip
        assert response["status"] == "incomplete"


def test_a_call_goes_on_before_what_else_came_with_it() -> None:
    """A delta may hold the end of a call, text after it, and another call."""
    deltas = [
        Delta(0, "", tool_call_deltas=(ToolCallDelta(0, "aaaaaaaaa", "f", "{"),)),
        Delta(
            0, "b", tool_call_deltas=(ToolCallDelta(0, "", "", "}"), ToolCallDelta(1, "bbbbbbbbb", "g", "{}"))
        ),
    ]
    response = accumulated(streamed(deltas))
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["function_call", "message", "function_call"]
    assert response["output"][0]["arguments"] == "{}"


def test_text_after_a_call_is_a_message_of_its_own() -> None:
    deltas = [Delta(0, "a"), Delta(0, "", tool_calls=CALLS[:1]), Delta(0, "b")]
    response = accumulated(streamed(deltas))
    assert [item["type"] for item in response["output"]] == ["message", "function_call", "message"]
    assert Response.model_validate(response).output_text == "ab"


def test_a_failure_is_told_with_what_there_was() -> None:
    writer = ResponseWriter(asked())
    sent = writer.feed(STARTED) + writer.feed(Delta(0, "Hel"))
    sent += writer.fail(ApiError(503, "the engine is dead", "server_error", None, "engine_dead"))
    events = events_of(sent)
    assert events[-1]["type"] == "response.failed"
    response = accumulated(events)
    assert response["status"] == "failed"
    assert response["error"] == {
        "code": "server_error",
        "message": "the engine is dead",
        "param": None,
        "type": "server_error",
    }
    assert response["output"][0]["status"] == "incomplete"


def test_an_aborted_output_is_no_answer() -> None:
    with pytest.raises(ApiError, match="aborted: the operator"):
        streamed([Delta(0, "Hel")], Finish(FinishReason.ABORTED, message="the operator"))


def test_reasoning_is_carried_where_it_is_asked_for() -> None:
    made = Asked(asked().body, "0" * 32, 0, SamplingDefaults(), carries_reasoning=True)
    item = whole("Hello", "Hm, ok.", made=made)["output"][0]
    assert text_of(item["encrypted_content"]) == "Hm, ok."
    assert "encrypted_content" not in whole("Hello", "Hm, ok.")["output"][0]


def test_logprobs_are_those_of_the_text() -> None:
    texts = (b"<think>", b"Hm", b"</think>", b"\n", b"Hel", b"lo", b"<eos>")
    vocabulary = Vocabulary(texts, frozenset({6}), is_exact=True, dropped_leading_spaces=0)
    made = Asked(asked().body, "0" * 32, 0, SamplingDefaults(), vocabulary=vocabulary)
    values = [-float(i) for i in range(7)]

    def delta(first: int, last: int, text: str = "", reasoning: str = "") -> Delta:
        return Delta(
            0, text, tuple(range(first, last)), Logprobs(tuple(values[first:last])), reasoning=reasoning
        )

    cuts = [
        [delta(0, 1), delta(1, 2, reasoning="Hm"), delta(2, 4), delta(4, 5, "He"), delta(5, 7, "llo")],
        [delta(0, 7, "Hello", "Hm")],
    ]
    found = [
        [
            entry["token"]
            for entry in accumulated(streamed(deltas, made=made))["output"][1]["content"][0]["logprobs"]
        ]
        for deltas in cuts
    ]
    assert found == [["Hel", "lo"]] * 2
