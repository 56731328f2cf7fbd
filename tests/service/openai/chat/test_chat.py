"""/v1/chat/completions through OpenAI's own client, in front of an engine whose tokens are known."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageCustomToolCall
from pydantic import BaseModel

from tests.service.codecs import CALL, END_CALL, END_THINK, QWEN_VOCAB, THINK, qwen_codec
from tests.service.openai.chat import shapes
from tests.service.openai.rig import FrontRig, front_rig
from tests.service.openai.test_openapi import against
from tests.service.rig import fake, until
from tests.support.models.byte_text import EOS

HI: Any = [{"role": "user", "content": "hi"}]
PROMPT = "u:hi|"
"""What the template of the fake engine makes of `HI`."""
TOOLS: Any = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
]
TOOL_PROMPT = "T:f|u:hi|a:"


def engine(text: str = "hello", *, prompt: str = PROMPT, **options: Any) -> Any:
    return fake(scripts={prompt: [*text.encode(), EOS]}, **options)


def thinking(*tokens: int, prompt: str = "u:hi|a:") -> Any:
    return fake(
        codec=qwen_codec(), vocab_size=QWEN_VOCAB, scripts={prompt: [*tokens, EOS]}, max_model_len=256
    )


def calls(*texts: str) -> list[int]:
    return [token for text in texts for token in (CALL, *text.encode(), END_CALL)]


async def chunks_of(rig: FrontRig, **fields: Any) -> list[ChatCompletionChunk]:
    made = await rig.openai.chat.completions.create(
        **{"model": "fake", "messages": HI, "stream": True, **fields}
    )
    return [shapes.chat_chunk(chunk.to_dict(mode="json")) async for chunk in made]


async def post(rig: FrontRig, **fields: Any) -> Any:
    return await rig.http.post("/v1/chat/completions", json={"model": "fake", "messages": HI, **fields})


async def test_a_chat() -> None:
    async with front_rig(engine()) as rig:
        raw = await rig.openai.chat.completions.with_raw_response.create(model="fake", messages=HI)
        answer = shapes.chat_completion(json.loads(raw.text))
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "fake")
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", "hello")
    assert answer.usage is not None
    usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)
    assert usage == (5, 6, 11)


async def test_a_stream() -> None:
    async with front_rig(engine()) as rig:
        chunks = await chunks_of(rig, stream_options={"include_usage": True})
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[0].id.startswith("chatcmpl-")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hello"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    last = chunks[-1]
    assert (last.choices, last.usage and last.usage.total_tokens) == ([], 11)


async def test_the_bytes_of_a_stream() -> None:
    async with front_rig(engine("hé\n")) as rig:
        reply = await post(rig, stream=True, request_id="r1")
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    first, *_, last, done, end = reply.content.split(b"\n\n")
    assert first.startswith(b'data: {"id":"chatcmpl-r1","object":"chat.completion.chunk","created":')
    head = first.partition(b',"choices"')[0]
    assert last == head + b',"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}'
    assert (done, end) == (b"data: [DONE]", b"")
    datas = [json.loads(line.removeprefix(b"data: ")) for line in reply.content.split(b"\n\n")[:-2]]
    assert "".join(data["choices"][0]["delta"].get("content", "") for data in datas) == "hé\n"


async def test_choices() -> None:
    scripts: Any = {(PROMPT, 0): [*b"a", EOS], (PROMPT, 1): [*b"b"] * 9, (PROMPT, 2): [*b"c", EOS]}
    async with front_rig(fake(scripts=scripts)) as rig:
        answer = await rig.openai.chat.completions.create(model="fake", messages=HI, n=3, max_tokens=4)
        chunks = await chunks_of(rig, n=3, max_tokens=4)
    expected = [("a", "stop"), ("bbbb", "length"), ("c", "stop")]
    assert [(c.message.content, c.finish_reason) for c in answer.choices] == expected
    streamed = ["", "", ""]
    for chunk in chunks:
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == ["a", "bbbb", "c"]


async def test_the_stream_helper() -> None:
    async with (
        front_rig(engine()) as rig,
        rig.openai.chat.completions.stream(model="fake", messages=HI) as stream,
    ):
        kinds = [event.type async for event in stream]
        whole = await stream.get_final_completion()
    assert whole.choices[0].message.content == "hello"
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)


class Answer(BaseModel):
    a: int


async def test_the_parse_helper() -> None:
    async with front_rig(
        engine('{"a": 7}', codec=qwen_codec(), vocab_size=QWEN_VOCAB, prompt="u:hi|a:")
    ) as rig:
        answer = await rig.openai.chat.completions.parse(model="fake", messages=HI, response_format=Answer)
        assert answer.choices[0].message.parsed == Answer(a=7)
        async with rig.openai.chat.completions.stream(
            model="fake", messages=HI, response_format=Answer
        ) as stream:
            streamed = await stream.get_final_completion()
    assert streamed.choices[0].message.parsed == Answer(a=7)


async def test_reasoning() -> None:
    tokens = (THINK, *b"hm", END_THINK, *b"yes")
    async with front_rig(thinking(*tokens)) as rig:
        message = (await post(rig)).json()["choices"][0]["message"]
        without = (await post(rig, include_reasoning=False)).json()["choices"][0]["message"]
        chunks = await chunks_of(rig)
    assert (message["reasoning"], message["content"]) == ("hm", "yes")
    assert ("reasoning" in without, without["content"]) == (False, "yes")
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == "hm"
    assert "".join(delta.content or "" for delta in deltas) == "yes"


async def test_calls_of_tools() -> None:
    both = calls('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "arguments": {}}')
    async with front_rig(thinking(*both, prompt=TOOL_PROMPT)) as rig:
        raw = await rig.openai.chat.completions.with_raw_response.create(
            model="fake", messages=HI, tools=TOOLS
        )
        choice = shapes.chat_completion(json.loads(raw.text)).choices[0]
        chunks = await chunks_of(rig, tools=TOOLS)
        async with rig.openai.chat.completions.stream(model="fake", messages=HI, tools=TOOLS) as stream:
            whole = (await stream.get_final_completion()).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    expected = [("f", '{"a": 1}'), ("f", "{}")]
    for one in choice, whole:
        made: Any = one.message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in made] == expected
        assert all(call.id and call.type == "function" for call in made)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [piece.index for piece in pieces] == sorted(piece.index for piece in pieces)
    assert [piece.function.name for piece in pieces if piece.id and piece.function] == ["f", "f"]
    told = [
        "".join(piece.function.arguments or "" for piece in pieces if piece.function and piece.index == index)
        for index in (0, 1)
    ]
    assert told == [arguments for _, arguments in expected]


@pytest.mark.parametrize("streams", [False, True])
async def test_a_call_that_is_cut_off_can_come_back(streams: bool) -> None:
    """It is a call with the beginning of its arguments, and the model is shown that they are no JSON."""
    asked: Any = {"model": "fake", "messages": HI, "tools": TOOLS, "max_completion_tokens": 33}
    made = thinking(*calls('{"name": "f", "arguments": {"a": 1}}'), prompt=TOOL_PROMPT)
    async with front_rig(made) as rig:
        if streams:
            stream = await rig.openai.chat.completions.create(**asked, stream=True)
            choices = [chunk.choices[0] async for chunk in stream]
            pieces = [piece for choice in choices for piece in choice.delta.tool_calls or ()]
            arguments = "".join(piece.function.arguments for piece in pieces)
            call = {**pieces[0].model_dump(), "function": {"name": "f", "arguments": arguments}}
            content, reason = "".join(c.delta.content or "" for c in choices), choices[-1].finish_reason
        else:
            choice = (await rig.openai.chat.completions.create(**asked)).choices[0]
            (whole,) = choice.message.tool_calls
            call, content, reason = whole.model_dump(), choice.message.content or "", choice.finish_reason
        assert (content, reason) == ("", "length")
        assert call["function"] == {"name": "f", "arguments": '{"a":'}
        turn = {"role": "assistant", "tool_calls": [call]}
        result: Any = {"role": "tool", "tool_call_id": call["id"], "content": "cut"}
        again = {**asked, "messages": [*HI, turn, result]}
        await rig.openai.chat.completions.create(**again)
        seen = rig.engine.text.decode(rig.engine.seen[-1].prompt_token_ids, skip_special_tokens=False)
    assert 'f{"invalid_json": "{\\"a\\":"}#' in seen


async def test_calls_of_custom_tools() -> None:
    """openai has no type of such a call in a chunk, so it is looked at as it comes."""
    tools: Any = [{"type": "custom", "custom": {"name": "f"}}]
    written = calls('\n{"name": "f", "arguments": {"input": "a\\n\\"b"}}\n')
    async with front_rig(thinking(*written, prompt=TOOL_PROMPT)) as rig:
        whole = (await post(rig, tools=tools)).json()
        document = (await rig.http.get("/openapi.json")).json()
        streamed = (await post(rig, tools=tools, stream=True)).text
    against(document, "ChatCompletion", whole)
    made: Any = shapes.chat_completion(whole).choices[0].message.tool_calls
    (call,) = made
    assert isinstance(call, ChatCompletionMessageCustomToolCall)
    assert (call.custom.name, call.custom.input) == ("f", 'a\n"b')
    choices = [
        json.loads(line[6:])["choices"][0] for line in streamed.splitlines() if line.startswith("data: {")
    ]
    first, *rest = (made for choice in choices for made in choice["delta"].get("tool_calls", ()))
    assert (first["index"], first["type"], first["custom"]["name"]) == (0, "custom", "f")
    assert first["custom"]["input"] + "".join(piece["custom"]["input"] for piece in rest) == 'a\n"b'
    assert choices[-1]["finish_reason"] == "tool_calls"


async def test_the_result_of_a_tool_goes_back() -> None:
    """The answer is sent back as OpenAI's client has it, and the template shows the call and its result."""
    async with front_rig(thinking(*calls('{"name": "f", "arguments": {"a": 1}}'), prompt=TOOL_PROMPT)) as rig:
        first = await rig.openai.chat.completions.create(model="fake", messages=HI, tools=TOOLS)
        turn: Any = first.choices[0].message
        (call,) = turn.tool_calls
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "42"}
        await rig.openai.chat.completions.create(
            model="fake", messages=[*HI, turn, result], tools=TOOLS, max_tokens=1
        )
        seen = rig.engine.text.decode(rig.engine.seen[-1].prompt_token_ids, skip_special_tokens=False)
    turns = f'a:<tool_call>f{{"a": 1}}#{call.id}</tool_call>|t:42=f#{call.id}|a:'
    assert seen == TOOL_PROMPT.removesuffix("a:") + turns


async def test_what_is_sampled_is_what_grpc_answers() -> None:
    """The fields reach the engine: its requests are the same as those of the same call in gRPC."""
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 5,
        "max_tokens": 7,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "logit_bias": {"65": 3},
        "stop": ["x"],
    }
    async with front_rig(engine()) as rig:
        assert (await post(rig, **fields, top_k=3, min_p=0.1)).status_code == 200
        (seen,) = rig.engine.seen
    sampling = seen.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 3, 0.1)
    assert (sampling.seed, sampling.presence_penalty, sampling.frequency_penalty) == (5, 1.0, 0.5)
    assert dict(sampling.logit_bias) == {65: 3.0}
    assert seen.stopping.max_tokens == 7


async def test_stops() -> None:
    async with front_rig(engine("hello")) as rig:
        stopped = (await post(rig, stop="l")).json()["choices"][0]
        kept = (await post(rig, stop=["l"], include_stop_str_in_output=True)).json()["choices"][0]
        by_id = (await post(rig, stop_token_ids=[ord("l")])).json()["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"], stopped["stop_reason"]) == (
        "he",
        "stop",
        "l",
    )
    assert kept["message"]["content"] == "hel"
    assert (by_id["message"]["content"], by_id["stop_reason"]) == ("he", ord("l"))


async def test_token_ids() -> None:
    async with front_rig(engine("ab")) as rig:
        answer = (await post(rig, return_token_ids=True)).json()
    assert answer["prompt_token_ids"] == list(PROMPT.encode())
    assert answer["choices"][0]["token_ids"] == [*b"ab", EOS]


async def test_an_aborted_request_is_no_answer() -> None:
    async with front_rig(engine(hold=True)) as rig:
        waiting = asyncio.create_task(post(rig, request_id="1"))
        stream = await rig.openai.chat.completions.create(model="fake", messages=HI, stream=True)
        await until(lambda: len(rig.engine.seen) == 2)
        rig.engine.abort(prefix="chatcmpl-", message="enough")
        with pytest.raises(openai.APIError, match="enough"):
            [chunk async for chunk in stream]
        reply = await waiting
    assert reply.status_code == 503
    assert reply.headers["x-should-retry"] == "false"
    assert (reply.json()["error"]["code"], reply.json()["error"]["type"]) == ("aborted", "server_error")
