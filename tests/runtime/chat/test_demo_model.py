"""The demo model calls the weather tool and answers with what the tool returned, through template, engine and
parser.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from penstock.runtime import Engine, SamplingParams, StoppingParams
from penstock.runtime.chat.messages import Chat, ChatTurn, RawTool, ToolCall, mint_call_id
from penstock.runtime.chat.parser import choose_forms
from penstock.runtime.chat.tool_formats.events import Parsed, joined
from tests.support.models.demo import demo_engine

WEATHER = RawTool(
    "get_weather",
    "Get the weather in a city.",
    '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}',
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with demo_engine() as engine:
        yield engine


def answer(engine: Engine, chat: Chat) -> Parsed:
    codec = engine.text
    assert codec is not None
    forms = choose_forms(codec.chat_template, codec.added_tokens)
    prompt = codec.render_chat(chat)
    result = engine.generate(
        codec.encode(prompt, add_special_tokens=False),
        sampling=SamplingParams(temperature=0.0),
        stopping=StoppingParams(max_tokens=80),
    )
    parser = forms.parser(chat, prompt)
    parts = [*map(parser.push, result.text), parser.flush()]
    return Parsed(
        "".join(p.text for p in parts), "", tuple(joined([call for p in parts for call in p.calls]))
    )


@pytest.mark.ci
@pytest.mark.parametrize("city", ["Paris", "Tokyo"])
def test_the_weather(engine: Engine, city: str) -> None:
    question = ChatTurn("user", f"What's the weather in {city}?")
    asked = answer(engine, Chat.parse([question], [WEATHER]))
    assert asked.text == ""
    (call,) = asked.calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": city})

    made = ChatTurn("assistant", "", (ToolCall(mint_call_id(), call.name, call.arguments),))
    told = ChatTurn("tool", '{"temperature": 21, "condition": "sunny"}', tool_call_id=made.tool_calls[0].id)
    said = answer(engine, Chat.parse([question, made, told], [WEATHER]))
    assert said.calls == ()
    assert city in said.text
    assert "21" in said.text
    assert "sunny" in said.text
