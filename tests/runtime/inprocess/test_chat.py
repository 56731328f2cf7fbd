"""The embedding API with text, on the demo model: conversations, tools, constraints and bad words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.runtime import (
    AsyncEngine,
    ChatTurn,
    Choice,
    Ebnf,
    Engine,
    EngineConfig,
    FinishReason,
    JsonObject,
    JsonSchema,
    Regex,
    SamplingParams,
    StoppingParams,
    Tool,
)
from penstock.runtime.chat.messages import Chat
from penstock.runtime.chat.parser import choose_forms
from penstock.runtime.errors import ConfigError, InvalidRequest
from tests.support.models.demo import demo_engine

pytestmark = pytest.mark.ci

GREEDY = SamplingParams(temperature=0.0)
LENGTH = StoppingParams(max_tokens=80)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool("get_weather", "Get the weather in a city.", PARAMETERS)
QUESTION = {"role": "user", "content": "What's the weather in Paris?"}
THINKING = "{{ messages[0].content }}{% if think %}<think>{% endif %}"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with demo_engine() as engine:
        yield engine


# -- conversations --


def test_the_prompt_is_what_the_template_renders(engine: Engine) -> None:
    made = engine.chat([QUESTION], sampling=GREEDY, stopping=LENGTH)
    assert engine.text is not None
    rendered = engine.text.render_chat(Chat((ChatTurn("user", QUESTION["content"]),)))
    assert made.prompt.token_ids == tuple(engine.text.encode(rendered, add_special_tokens=False))
    by_ids = engine.generate(made.prompt.token_ids, sampling=GREEDY, stopping=LENGTH)
    assert made.token_ids == by_ids.token_ids
    assert made.finish.reason is FinishReason.EOS


@pytest.mark.parametrize(
    "tool",
    [
        WEATHER,
        {"name": WEATHER.name, "description": WEATHER.description, "parameters": PARAMETERS},
        {
            "type": "function",
            "function": {
                "name": WEATHER.name,
                "description": WEATHER.description,
                "parameters": PARAMETERS,
            },
        },
    ],
)
def test_a_conversation_with_a_tool(engine: Engine, tool: Any) -> None:
    """The model calls the tool and then answers with what it returned, both whole and as a stream."""
    messages: list[Any] = [QUESTION]
    asked = engine.chat(messages, tools=[tool], sampling=GREEDY, stopping=LENGTH)
    (call,) = asked.tool_calls
    assert (call.name, call.arguments, asked.text) == ("get_weather", {"city": "Paris"}, "")
    with engine.chat(messages, tools=[tool], sampling=GREEDY, stopping=LENGTH, stream=True) as stream:
        streamed = [call for delta in stream for call in delta.tool_calls]
        assert stream.tool_calls() == tuple(streamed)
    assert [(c.name, c.arguments) for c in streamed] == [(call.name, call.arguments)]

    messages += [asked.message, call.result({"temperature": 21, "condition": "sunny"})]
    said = engine.chat(messages, tools=[tool], sampling=GREEDY, stopping=LENGTH)
    assert said.tool_calls == ()
    assert all(word in said.text for word in ("Paris", "21", "sunny"))
    with engine.chat(messages, tools=[tool], sampling=GREEDY, stopping=LENGTH, stream=True) as stream:
        assert "".join(delta.delta for delta in stream) == said.text == stream.text()


def test_a_conversation_written_in_mappings_goes_on_as_one_of_values(engine: Engine) -> None:
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": WEATHER.name, "arguments": '{"city": "Paris"}'},
    }
    written: list[Any] = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": '{"temperature": 3}', "tool_call_id": "abcdefghi"},
    ]
    made = engine.chat(written, tools=[WEATHER], sampling=GREEDY, stopping=LENGTH)
    assert "3" in made.text


def test_an_output_may_be_kept_to_one_call(engine: Engine) -> None:
    """The demo model calls once anyway, and so it calls the same."""
    asked: dict[str, Any] = {"tools": [WEATHER], "sampling": GREEDY, "stopping": LENGTH}
    free, kept = (
        engine.chat([QUESTION], **asked, parallel_tool_calls=parallel) for parallel in (None, False)
    )
    assert [call.arguments for call in kept.tool_calls] == [{"city": "Paris"}]
    assert kept.token_ids == free.token_ids[: len(kept.token_ids)]
    assert kept.finish.reason is FinishReason.EOS
    assert kept.finish.token_id is None
    with pytest.raises(TypeError, match="parallel_tool_calls: must be bool, not int"):
        engine.chat([QUESTION], parallel_tool_calls=0)  # type: ignore[call-overload]


def test_a_strict_tool_is_called_as_its_schema_says(engine: Engine) -> None:
    """The model would write the city's name. Written as OpenAI's agents write tools."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Get the weather in a city.", "parameters": schema}
    for strict, cities in ((True, {"Oslo", "Rome"}), (False, {"Paris"}), (None, {"Paris"})):
        tool = {"type": "function", "function": {**function, "strict": strict}}
        made = engine.chat([QUESTION], tools=[tool], sampling=GREEDY, stopping=LENGTH)
        (call,) = made.tool_calls
        assert call.arguments["city"] in cities
    with pytest.raises(InvalidRequest, match='"strict" must be true or false, not str'):
        engine.chat([QUESTION], tools=[{**function, "strict": "yes"}])


def test_a_call_may_be_required_or_forbidden(engine: Engine) -> None:
    hello = [{"role": "user", "content": "Tell me a story."}]
    hot = SamplingParams(temperature=1.5, seed=3)
    made = engine.chat(
        hello, tools=[WEATHER], tool_choice="required", n=3, sampling=hot, stopping=StoppingParams()
    )
    for output in made.outputs:
        for call in output.tool_calls:
            assert call.name == "get_weather"
            assert isinstance(call.arguments["city"], str)
        assert output.tool_calls or output.finish.reason is not FinishReason.EOS
    none = engine.chat([QUESTION], tools=[WEATHER], tool_choice="none", sampling=GREEDY, stopping=LENGTH)
    assert none.tool_calls == ()
    with pytest.raises(InvalidRequest, match="constraint: not together with"):
        engine.chat(hello, tools=[WEATHER], tool_choice="required", constraint=JsonObject())


def test_a_callers_template_and_the_models_reasoning(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "forms", choose_forms("", reasoning="think"))
    assert engine.text is not None
    end = engine.text.added_tokens["</think>"]
    asked: dict[str, Any] = {
        "chat_template": THINKING,
        "template_options": {"think": True},
        "sampling": SamplingParams(temperature=1.5, seed=5, logit_bias={end: 10.0}),
        "stopping": LENGTH,
        "constraint": Regex("[a-c]{4}"),
    }
    made = engine.chat([{"role": "user", "content": "Once"}], **asked)
    assert engine.text.decode(made.prompt.token_ids, skip_special_tokens=False).endswith("<think>")
    assert re.fullmatch("[a-c]{4}", made.text)
    with engine.chat([{"role": "user", "content": "Once"}], stream=True, **asked) as stream:
        deltas = list(stream)
    assert "".join(delta.delta for delta in deltas) == made.text
    assert "".join(delta.reasoning for delta in deltas) == made.reasoning == stream.reasoning()
    assert "think>" not in made.reasoning + made.text


async def test_chats_of_coroutines(engine: Engine) -> None:
    whole = engine.chat([QUESTION], tools=[WEATHER], sampling=GREEDY, stopping=LENGTH)
    aio = AsyncEngine(engine)
    made = await aio.chat([QUESTION], tools=[WEATHER], sampling=GREEDY, stopping=LENGTH)
    assert [(c.name, c.arguments) for c in made.tool_calls] == [
        (c.name, c.arguments) for c in whole.tool_calls
    ]
    hello = [ChatTurn("user", "hello")]
    said = await aio.chat(hello, sampling=GREEDY, stopping=LENGTH)
    async with aio.chat(hello, sampling=GREEDY, stopping=LENGTH, stream=True) as stream:
        assert "".join([delta.delta async for delta in stream]) == said.text


@pytest.mark.parametrize(
    ("messages", "options", "named"),
    [
        ([], {}, "chat.messages: must not be empty"),
        ("hi", {}, "chat.messages: must be a sequence, not str"),
        ([{"role": "user", "text": "hi"}], {}, "chat.messages[0]: unknown key 'text'"),
        ([{"content": "hi"}], {}, 'chat.messages[0]: needs "role"'),
        ([{"role": "user", "content": 7}], {}, 'chat.messages[0]: "content" must be a text or a sequence'),
        ([QUESTION, 7], {}, "chat.messages[1]: must be a mapping, not int"),
        ([{"role": "robot", "content": ""}], {}, "chat.messages[0].role"),
        ([QUESTION], {"tools": [{"description": "x"}]}, 'chat.tools[0]: needs "name"'),
        ([QUESTION], {"tools": [{"type": "code", "function": {}}]}, "chat.tools[0]: \"type\" is 'code'"),
        ([QUESTION], {"tool_choice": "required"}, "chat.tool_choice: required needs at least one tool"),
        (
            [QUESTION],
            {"tools": [WEATHER], "parallel_tool_calls": False, "return_text": False},
            "chat.parallel_tool_calls: false needs return_text",
        ),
        ([{**QUESTION, "reasoning": "hm"}], {}, "chat.messages[0].reasoning"),
        ([QUESTION], {"chat_template": "{{ nothing() }}"}, "chat.chat_template"),
        ([QUESTION], {"template_options": {"tools": []}}, "chat.template_options_json"),
    ],
)
def test_what_is_no_conversation_is_refused(
    engine: Engine, messages: Any, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.chat(messages, **options)
    assert named in str(caught.value)


def test_parsers_are_options_of_the_engine() -> None:
    for name in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match=f"{name}: must be one of auto, none, "):
            EngineConfig(**{name: "gpt"})  # type: ignore[arg-type]


# -- text --


@pytest.mark.parametrize(
    ("constraint", "matches"),
    [
        (Choice(["red", "green"]), lambda text: text in ("red", "green")),
        (Regex("[0-9]{3}-[a-f]+"), lambda text: re.fullmatch("[0-9]{3}-[a-f]+", text)),
        (Ebnf('start: "a" ("b" | "c")'), lambda text: text in ("ab", "ac")),
        (JsonObject(), lambda text: isinstance(json.loads(text), dict)),
        (JsonSchema({"enum": [1, "two"]}), lambda text: json.loads(text) in (1, "two")),
        (JsonSchema('{"const": null}'), lambda text: text == "null"),
    ],
)
def test_every_output_matches_its_constraint(engine: Engine, constraint: Any, matches: Any) -> None:
    hot = SamplingParams(temperature=1.2, seed=2)
    made = engine.generate(
        ["Once", "Then"], n=2, constraint=constraint, sampling=hot, stopping=StoppingParams(max_tokens=200)
    )
    ended = [o for g in made for o in g.outputs if o.finish.reason is not FinishReason.MAX_TOKENS]
    assert ended
    assert all(matches(output.text) for output in ended)


@pytest.mark.parametrize(
    ("constraint", "error"),
    [
        (Regex("("), InvalidRequest),
        (JsonSchema(""), InvalidRequest),
        (JsonSchema({"const": float("nan")}), InvalidRequest),
        (Choice("red"), TypeError),
        ({"type": "object"}, TypeError),
    ],
)
def test_what_is_no_constraint_is_refused(engine: Engine, constraint: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="constraint"):
        engine.generate("Once", constraint=constraint)


def test_stop_strings_and_bad_words(engine: Engine) -> None:
    plain = engine.generate("Once upon a time", sampling=GREEDY, stopping=LENGTH)
    words = plain.text.split()
    stop = next(word for word in words[5:] if len(word) > 3)
    until = plain.text[: plain.text.index(stop)]
    stopped = engine.generate(
        "Once upon a time", n=2, sampling=GREEDY, stopping=StoppingParams(max_tokens=80, stop=(stop,))
    )
    assert [o.text for o in stopped.outputs] == [until] * 2
    assert stopped.finish.stop == stop
    without = engine.generate(
        "Once upon a time", sampling=SamplingParams(temperature=0.0, bad_words=[stop]), stopping=LENGTH
    )
    assert without.text.startswith(until)
    assert without.text != plain.text


def test_token_ids_alone(engine: Engine) -> None:
    made = engine.generate("Once", return_text=False, sampling=GREEDY, stopping=StoppingParams(max_tokens=5))
    assert (made.text, len(made.token_ids)) == ("", 5)
    with pytest.raises(InvalidRequest, match=r"stopping\.stop: needs return_text"):
        engine.generate("Once", return_text=False, stopping=StoppingParams(stop=("x",)))
    with pytest.raises(InvalidRequest, match="prompt: must not be empty"):
        engine.generate("")
