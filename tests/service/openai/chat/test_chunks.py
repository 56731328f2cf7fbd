"""Chunks and answers made of the client's values, read with OpenAI's types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client import (
    Delta,
    Finish,
    Finished,
    FinishReason,
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
from penstock.openai.failures import ApiError
from penstock.openai.generation.frames import UsageWanted, Wanted, finish_reason
from penstock.openai.jsonbytes import json_string
from penstock.openai.routes.chat import chat_chunks
from penstock.openai.routes.completion_answers import completion_chunks, merged
from tests.service.openai.chat import shapes

EOS = Finish(FinishReason.EOS)
USAGE = Usage(prompt_tokens=5, cached_prompt_tokens=4, completion_tokens=3)
END = Summary(USAGE, Timing(0.0, None, 0.0, 0))


class Stream:
    """The client's stream, with events that are known beforehand."""

    def __init__(self, *events: StreamEvent | Exception, prompt_tokens: int = 5) -> None:
        started = Started("id-1", "m", PromptInfo(prompt_tokens, token_ids=(7, 8)), WeightsVersion("", 1))
        self._events = iter([started, *events])
        self.is_closed = False

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_closed = True

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self

    async def __anext__(self) -> StreamEvent:
        await asyncio.sleep(0)
        for event in self._events:
            if isinstance(event, Exception):
                raise event
            return event
        raise StopAsyncIteration


def chat(
    *events: StreamEvent | Exception,
    choices: int = 1,
    wanted: Wanted = Wanted(),  # noqa: B008 -- frozen
    usage: UsageWanted = UsageWanted(),  # noqa: B008 -- frozen
) -> list[dict[str, Any]]:
    stream: Any = Stream(*events)
    chunks = data_of(chat_chunks(stream, 17, choices, wanted, usage))
    assert stream.is_closed
    return chunks


def completions(
    *streams: Sequence[StreamEvent | Exception],
    choices: int = 1,
    wanted: Wanted = Wanted(),  # noqa: B008 -- frozen
    usage: UsageWanted = UsageWanted(),  # noqa: B008 -- frozen
) -> list[dict[str, Any]]:
    made: list[Any] = [Stream(*events) for events in streams]
    chunks = data_of(completion_chunks(made, "cmpl-1", 17, choices, wanted, usage))
    assert all(stream.is_closed for stream in made)
    return chunks


def data_of(chunks: AsyncGenerator[bytes, None]) -> list[dict[str, Any]]:
    """Return the JSON of all chunks of a stream, which must end as OpenAI's streams do."""

    async def read() -> bytes:
        return b"".join([chunk async for chunk in chunks])

    text = asyncio.run(read()).decode()
    assert text.splitlines() == text.split("\n")[:-1], "some clients divide streams so"
    *datas, done, nothing = text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    assert all(data.startswith("data: ") for data in datas)
    return [json.loads(data.removeprefix("data: ")) for data in datas]


def test_a_chat() -> None:
    chunks = chat(Delta(0, "He"), Delta(0, ""), Delta(0, "llo\n"), Finished(0, EOS, "Hello\n"), END)
    for chunk in chunks:
        shapes.chat_chunk(chunk)
        assert {key: chunk[key] for key in ("id", "object", "created", "model")} == {
            "id": "id-1",
            "object": "chat.completion.chunk",
            "created": 17,
            "model": "m",
        }
    assert [chunk["choices"] for chunk in chunks] == [
        [choice({"role": "assistant", "content": "", "refusal": None})],
        [choice({"content": "He"})],
        [choice({"content": "llo\n"})],
        [choice({}, "stop")],
    ]
    assert all("usage" not in chunk for chunk in chunks)


def choice(delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, **more}


def test_choices_come_mixed() -> None:
    events: Any = [Delta(1, "b"), Delta(0, "a"), Finished(1, EOS, "b"), Delta(0, "a"), Finished(0, EOS, "aa")]
    chunks = chat(*events, END, choices=2)
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1, 1, 0, 1, 0, 0]


def test_calls_in_pieces() -> None:
    """As OpenAI streams them: the id, the type and the name are in the first piece only."""
    events: Any = [
        Delta(0, "a", tool_call_deltas=(ToolCallDelta(0, "c1", "f", ""),)),
        Delta(0, "", tool_call_deltas=(ToolCallDelta(0, "", "", '{"\u2028'),)),
        Delta(0, "", tool_call_deltas=(ToolCallDelta(0, "", "", '"'), ToolCallDelta(1, "c2", "g", "{}"))),
        Finished(0, EOS, "a"),
        END,
    ]
    chunks = chat(*events)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta["tool_calls"] for delta in deltas if "tool_calls" in delta] == [
        [{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"\u2028'}}],
        [
            {"index": 0, "function": {"arguments": '"'}},
            {"index": 1, "id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_calls_of_custom_tools_in_pieces() -> None:
    """Their text is told as it comes; what does not follow the function is told when the call has ended."""
    events: Any = [
        Delta(0, "", tool_call_deltas=(ToolCallDelta(0, "c1", "f", '{"in'),)),
        Delta(0, "", tool_call_deltas=(ToolCallDelta(0, "", "", 'put": "a\\'),)),
        Delta(0, "", tool_call_deltas=(ToolCallDelta(0, "", "", 'nb"}'), ToolCallDelta(1, "c2", "f", "{"))),
        Finished(0, Finish(FinishReason.MAX_TOKENS), ""),
        END,
    ]
    chunks = chat(*events, wanted=Wanted(custom_tools=frozenset({"f"})))
    assert [
        c["choices"][0]["delta"]["tool_calls"] for c in chunks if c["choices"][0]["delta"].get("tool_calls")
    ] == [
        [{"index": 0, "id": "c1", "type": "custom", "custom": {"name": "f", "input": ""}}],
        [{"index": 0, "custom": {"input": "a"}}],
        [
            {"index": 0, "custom": {"input": "\nb"}},
            {"index": 1, "id": "c2", "type": "custom", "custom": {"name": "f", "input": ""}},
        ],
        [{"index": 1, "custom": {"input": "{"}}],
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_reasoning_and_calls() -> None:
    calls = [ToolCall("c1", "f", '{"a": "\\u0001"}'), ToolCall("c2", "g", '{"a": "\u2028é\x85"}')]
    events: Any = [
        Delta(0, "", reasoning="hm"),
        Delta(0, "Look:", reasoning=" ok"),
        Delta(0, "", tool_calls=(calls[0],)),
        Delta(0, "", tool_calls=(calls[1],)),
        Finished(0, EOS, "Look:"),
        END,
    ]
    chunks = chat(*events)
    made = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments_json}}
        for c in calls
    ]
    assert [chunk["choices"][0]["delta"] for chunk in chunks[1:]] == [
        {"reasoning": "hm"},
        {"reasoning": " ok", "content": "Look:"},
        {"tool_calls": [{"index": 0, **made[0]}]},
        {"tool_calls": [{"index": 1, **made[1]}]},
        {},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    without = chat(*events, wanted=Wanted(reasoning=False))
    assert [chunk["choices"][0]["delta"] for chunk in without[1:3]] == [
        {"content": "Look:"},
        chunks[3]["choices"][0]["delta"],
    ]


def test_usage_at_the_end() -> None:
    chunks = chat(Delta(0, "a"), Finished(0, EOS, "a"), END, usage=UsageWanted(at_end=True))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None, None, None]
    last = shapes.chat_chunk(chunks[-1])
    assert last.choices == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def test_usage_in_every_chunk() -> None:
    events: Any = [
        Delta(0, "a", (1,)),
        Delta(1, "", (2, 3)),
        Delta(0, "b", (4,)),
        Finished(0, EOS, "ab"),
        END,
    ]
    chunks = chat(*events, choices=2, usage=UsageWanted(at_end=True, always=True))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 0, 1, 4, 4, 3]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {5}


def test_token_ids() -> None:
    events: Any = [Delta(0, "", (1,)), Delta(0, "ab", (2, 3)), Finished(0, EOS, "ab"), END]
    chunks = chat(*events, wanted=Wanted(token_ids=True))
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[7, 8], None, None, None]
    assert [chunk["choices"][0].get("token_ids") for chunk in chunks] == [None, [1], [2, 3], None]
    of_two = completions(events, events, wanted=Wanted(token_ids=True))
    firsts = [c["choices"][0] for c in of_two if "prompt_token_ids" in c["choices"][0]]
    assert [(first["index"], first["prompt_token_ids"], first["token_ids"]) for first in firsts] == [
        (0, [7, 8], [1]),
        (1, [7, 8], [1]),
    ]


def test_completions_of_several_prompts_are_numbered_on() -> None:
    first: Any = [Delta(0, "a"), Delta(1, "b"), Finished(1, EOS, "b"), Finished(0, EOS, "a"), END]
    second: Any = [Delta(1, "d"), Delta(0, "c"), Finished(0, EOS, "c"), Finished(1, EOS, "d"), END]
    chunks = completions(first, second, choices=2, usage=UsageWanted(at_end=True))
    texts = ["", "", "", ""]
    for chunk in chunks:
        shapes.completion({**chunk, "choices": [c | {"finish_reason": "stop"} for c in chunk["choices"]]})
        assert (chunk["id"], chunk["object"], chunk["created"]) == ("cmpl-1", "text_completion", 17)
        for one in chunk["choices"]:
            texts[one["index"]] += one["text"]
    assert texts == ["a", "b", "c", "d"]
    ended = [one["index"] for c in chunks for one in c["choices"] if one["finish_reason"] is not None]
    assert sorted(ended) == [0, 1, 2, 3]
    assert chunks[-1]["usage"]["prompt_tokens"] == 10


def test_an_error_of_one_prompt_ends_all() -> None:
    endless = [Delta(0, "x")] * 10_000
    with pytest.raises(ValueError, match="broken"):
        completions([*endless, END], [Delta(0, "a"), ValueError("broken")])


def test_a_stream_of_many_waits_for_its_reader() -> None:
    async def read() -> int:
        num_read = 0

        async def counting() -> AsyncIterator[int]:
            nonlocal num_read
            for i in range(10_000):
                num_read += 1
                yield i

        events = merged([counting(), counting()])
        await anext(events)
        for _ in range(1000):
            await asyncio.sleep(0)
        await events.aclose()
        return num_read

    assert asyncio.run(read()) < 100


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        (FinishReason.EOS, "stop"),
        (FinishReason.STOP, "stop"),
        (FinishReason.MAX_TOKENS, "length"),
        (FinishReason.CONTEXT_FULL, "length"),
        (FinishReason.TIME_LIMIT, "length"),
    ],
)
def test_reasons(reason: FinishReason, word: str) -> None:
    assert finish_reason(Finish(reason)) == word
    assert finish_reason(Finish(reason), has_calls=True) == ("tool_calls" if word == "stop" else word)


def test_an_aborted_output_is_no_answer() -> None:
    aborted = Finished(0, Finish(FinishReason.ABORTED, message="enough"), "a")
    with pytest.raises(ApiError, match="enough") as caught:
        chat(Delta(0, "a"), aborted, END)
    assert (caught.value.status, caught.value.code, caught.value.may_retry) == (503, "aborted", False)


@pytest.mark.parametrize(
    ("stop", "sent"), [({"stop": "x"}, "x"), ({"stop": "\x85"}, "\x85"), ({"token_id": 9}, 9)]
)
def test_the_stop_that_matched(stop: dict[str, Any], sent: object) -> None:
    finish = Finish(FinishReason.STOP, **stop)
    for chunks in chat(Finished(0, finish, ""), END), completions([Finished(0, finish, ""), END]):
        assert chunks[-1]["choices"][0]["stop_reason"] == sent


@given(st.text())
def test_texts_are_json_and_one_line(text: str) -> None:
    made = json_string(text.encode("utf-8", "replace").decode())
    assert json.loads(made) == text.encode("utf-8", "replace").decode()
    assert len(made.splitlines()) == 1
