"""The demo model calls its weather tool through OpenAI's client: question, call, result, answer. In both of
its APIs, in one piece and in a stream, with tools as its helpers write them, which are strict.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from penstock.runtime.config import EngineConfig
from penstock.runtime.engine import Engine
from tests.service.openai.rig import front_rig
from tests.service.rig import Kept
from tests.support.models.compilation_cache import TEST_CACHE

pytestmark = pytest.mark.sweep

WEATHER = json.dumps({"city": "Paris", "temperature": 21, "condition": "sunny"})
ASK: Any = {"role": "user", "content": "what's the weather in Paris?"}


class GetWeather(BaseModel):
    """Get the weather in a city."""

    city: str


class Report(BaseModel):
    """What an answer is made to look like."""

    degrees: int
    sunny: bool


TOOL: Any = openai.pydantic_function_tool(
    GetWeather, name="get_weather", description="Get the weather in a city."
)
FLAT: Any = {"type": "function", **TOOL["function"]}
"""The tool in the form of the responses API."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    config = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=512,
        compilation_cache=TEST_CACHE,
        show_progress=False,
    )
    loaded = Engine.from_pretrained("demo", config)
    loaded.start()
    yield Kept(loaded)
    loaded.shutdown()


@pytest_asyncio.fixture
async def client(engine: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with front_rig(engine) as rig:
        yield rig.openai


def check_answer(text: str | None) -> None:
    assert text is not None
    assert "21" in text
    assert "sunny" in text


def test_the_tool_is_strict() -> None:
    assert TOOL["function"]["strict"] is True


async def completed(client: openai.AsyncOpenAI, streamed: bool, **fields: Any) -> Any:
    """Return the completion, which OpenAI's client has parsed, or put together of chunks and parsed."""
    fields = {"model": "demo", "temperature": 0, "max_completion_tokens": 80, **fields}
    if not streamed:
        return await client.chat.completions.parse(**fields)
    async with client.chat.completions.stream(**fields) as stream:
        return await stream.get_final_completion()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_chat(client: openai.AsyncOpenAI, streamed: bool) -> None:
    (choice,) = (await completed(client, streamed, messages=[ASK], tools=[TOOL])).choices
    assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", "")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert call.function.parsed_arguments == GetWeather(city="Paris")
    result = {"role": "tool", "tool_call_id": call.id, "content": WEATHER}
    said = choice.message.model_dump(exclude_none=True, exclude={"parsed"})
    (choice,) = (await completed(client, streamed, messages=[ASK, said, result], tools=[TOOL])).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    check_answer(choice.message.content)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_chat_whose_answer_has_a_schema(client: openai.AsyncOpenAI, streamed: bool) -> None:
    """The tool is called all the same, and the answer is parsed."""
    fields = {"tools": [TOOL], "response_format": Report, "parallel_tool_calls": False}
    (choice,) = (await completed(client, streamed, messages=[ASK], **fields)).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Paris")
    messages = [
        ASK,
        {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": {
            "name": "get_weather", "arguments": call.function.arguments}}]},
        {"role": "tool", "tool_call_id": call.id, "content": WEATHER},
    ]  # fmt: skip
    (choice,) = (await completed(client, streamed, messages=messages, **fields)).choices
    assert choice.finish_reason in ("stop", "tool_calls")
    if choice.finish_reason == "stop":
        assert isinstance(choice.message.parsed, Report)


async def responded(client: openai.AsyncOpenAI, streamed: bool, **fields: Any) -> Any:
    fields = {"model": "demo", "temperature": 0, "max_output_tokens": 80, "store": False, **fields}
    if not streamed:
        return await client.responses.create(**fields)
    async with client.responses.stream(**fields) as stream:
        events = [event async for event in stream]
        assert events[-1].type == "response.completed"
        return await stream.get_final_response()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_response(client: openai.AsyncOpenAI, streamed: bool) -> None:
    response = await responded(client, streamed, input=[ASK], tools=[FLAT])
    (call,) = response.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call", "get_weather", {"city": "Paris"},
    )  # fmt: skip
    items = [
        ASK,
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER},
    ]
    response = await responded(client, streamed, input=items, tools=[FLAT])
    assert [item.type for item in response.output] == ["message"]
    check_answer(response.output_text)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_that_the_schema_bends(client: openai.AsyncOpenAI, streamed: bool) -> None:
    """The model would say Paris. It may not, where the tool is strict."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    function = {**TOOL["function"], "parameters": schema}
    choices = (await completed(
        client, streamed, messages=[ASK], tools=[{"type": "function", "function": function}]
    )).choices  # fmt: skip
    assert json.loads(choices[0].message.tool_calls[0].function.arguments) == {"city": "Oslo"}
    response = await responded(client, streamed, input=[ASK], tools=[{"type": "function", **function}])
    assert json.loads(response.output[0].arguments) == {"city": "Oslo"}
