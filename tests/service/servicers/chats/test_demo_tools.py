"""The demo model calls the weather tool through the whole server: question, call, result, answer."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest

from penstock.runtime.chat.parser import choose_forms
from penstock.runtime.config import EngineConfig
from penstock.runtime.engine import Engine
from penstock.service.requests.generate import Features
from penstock.v1 import types_pb2
from tests.service.rig import Kept, collect, generate, joined, serving, stream
from tests.support.models.compilation_cache import TEST_CACHE

pytestmark = pytest.mark.ci

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = types_pb2.ToolDefinition(
    name="get_weather", description="Get the weather in a city.", parameters_json=json.dumps(SCHEMA)
)
ASK = types_pb2.ChatMessage(role="user", content="what's the weather in Paris?")
GREEDY = {"temperature": 0}


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
    assert loaded.compiles_after_warmup == 0
    assert loaded.load().pages_used == 0
    loaded.shutdown()


def chat(*turns: types_pb2.ChatMessage, **fields: Any) -> types_pb2.ChatPrompt:
    return types_pb2.ChatPrompt(messages=turns, tools=[TOOL], **fields)


async def both(rig: Any, **fields: Any) -> Any:
    """Return the outputs on which Generate and Stream agree, except for the ids of calls, which are
    Generate's.
    """
    fields = {"stopping": {"max_tokens": 200}, "sampling": GREEDY, **fields}
    whole = await asyncio.wait_for(rig.inference.Generate(generate(**fields)), 60)
    parts = joined(await collect(rig.inference.Stream(stream(**fields))))
    for one, other in zip(whole.outputs, parts.outputs, strict=True):
        assert (one.text, one.token_ids, one.finish) == (other.text, other.token_ids, other.finish)
        calls = [[(c.name, c.arguments_json) for c in output.tool_calls] for output in (one, other)]
        assert calls[0] == calls[1]
    return whole.outputs


async def test_the_weather_tool_end_to_end(engine: Any) -> None:
    async with serving(engine) as rig:
        (output,) = await both(rig, chat=chat(ASK))
        (call,) = output.tool_calls
        assert (output.text, call.name, json.loads(call.arguments_json)) == (
            "",
            "get_weather",
            {"city": "Paris"},
        )
        said = types_pb2.ChatMessage(role="assistant", tool_calls=[call])
        weather = json.dumps({"city": "Paris", "temperature": 21, "condition": "sunny"})
        told = types_pb2.ChatMessage(role="tool", content=weather, tool_call_id=call.id)
        (output,) = await both(rig, chat=chat(ASK, said, told))
    assert not output.tool_calls
    assert "21" in output.text
    assert "sunny" in output.text


@pytest.mark.parametrize("choice", ["required", "get_weather"])
async def test_a_required_call_is_one_whatever_was_asked(engine: Any, choice: str) -> None:
    """Several outputs at a temperature at which the model writes anything: every output that ends is a call
    that the schema allows.
    """
    hello = types_pb2.ChatMessage(role="user", content="hello, how are you?")
    ended = 0
    async with serving(engine) as rig:
        for seed in range(3):
            sampling = {"temperature": 1.5, "seed": seed, "n": 4}
            for output in await both(rig, chat=chat(hello, tool_choice=choice), sampling=sampling):
                if output.finish.reason != types_pb2.FINISH_REASON_EOS:
                    continue
                ended += 1
                assert output.text == ""
                assert len(output.tool_calls) == 1 or choice == "required"
                for call in output.tool_calls:
                    assert call.name == "get_weather"
                    jsonschema.validate(json.loads(call.arguments_json), SCHEMA)
                assert output.tool_calls
    assert ended >= 6


async def test_a_strict_call_follows_its_schema_where_the_model_writes_anything(engine: Any) -> None:
    """The model is free to call, and a bias towards the tag makes it begin a call. At this temperature it
    writes noise, and a schema that it has never seen.
    """
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["rain", "snow"]},
            "days": {
                "type": "array",
                "items": {"type": "integer", "minimum": 1, "maximum": 9},
                "maxItems": 2,
            },
            "exact": {"type": "boolean"},
        },
        "required": ["kind", "days", "exact"],
        "additionalProperties": False,
    }
    tool = types_pb2.ToolDefinition(name="forecast", parameters_json=json.dumps(schema), strict=True)
    asked = types_pb2.ChatPrompt(messages=[ASK], tools=[tool], parallel_tool_calls=False)
    bias = {engine.text.added_tokens["<tool_call>"]: 100.0}
    sampling = {"temperature": 3, "seed": 7, "n": 4, "logit_bias": bias}
    async with serving(engine) as rig:
        outputs = await both(rig, chat=asked, sampling=sampling)
    for output in outputs:
        (call,) = output.tool_calls
        assert (call.name, output.text) == ("forecast", "")
        jsonschema.validate(json.loads(call.arguments_json), schema)
        assert output.finish.reason == types_pb2.FINISH_REASON_EOS
    assert len({output.tool_calls[0].arguments_json for output in outputs}) > 1, "they are not all alike"


async def test_a_strict_tool_changes_nothing_for_a_model_that_calls_well(engine: Any) -> None:
    strict = types_pb2.ToolDefinition()
    strict.CopyFrom(TOOL)
    strict.strict = True
    async with serving(engine) as rig:
        (free,) = await both(rig, chat=chat(ASK))
        (kept,) = await both(rig, chat=types_pb2.ChatPrompt(messages=[ASK], tools=[strict]))
    assert kept.token_ids == free.token_ids


async def test_offered_none_it_calls_none(engine: Any) -> None:
    async with serving(engine) as rig:
        (output,) = await both(rig, chat=chat(ASK, tool_choice="none"))
    assert not output.tool_calls


THINKING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n"
)
"""As in DeepSeek-R1 and Qwen3-Thinking: the output begins inside the reasoning block."""
CONSTRAINTS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "json_schema": ({"json_schema": json.dumps(SCHEMA)}, lambda text: is_arguments(text)),
    "json_object": ({"json_object": {}}, lambda text: isinstance(json.loads(text), dict)),
    "regex": ({"regex": "[0-9]{3}"}, lambda text: re.fullmatch("[0-9]{3}", text)),
    "ebnf": ({"ebnf": 'start: "<" ("a" | "b")* ">"'}, lambda text: re.fullmatch("<[ab]*>", text)),
    "choice": ({"choice": {"choices": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
}


def is_arguments(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


@pytest.mark.parametrize("kind", CONSTRAINTS)
async def test_a_constraint_is_for_the_answer_of_a_model_that_thinks(
    engine: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a temperature at which the model thinks anything, and with a bias towards the end: every answer
    matches, whatever was thought. (The demo model's own template shows no reasoning, so the parser is chosen
    by option.)
    """
    constraint, matches = CONSTRAINTS[kind]
    end_think = engine.text.added_tokens["</think>"]
    ended = thought = 0
    monkeypatch.setattr(engine, "forms", choose_forms("", reasoning="think"))
    async with serving(engine, features=Features(request_templates=True)) as rig:
        asked = types_pb2.ChatPrompt(messages=[ASK], chat_template=THINKING_TEMPLATE)
        sampling = {"temperature": 1.5, "seed": 5, "n": 4, "logit_bias": {end_think: 10.0}}
        for output in await both(rig, chat=asked, sampling=sampling, constraint=constraint):
            assert end_think in output.token_ids
            thought += bool(output.reasoning)
            if output.finish.reason == types_pb2.FINISH_REASON_EOS:
                ended += 1
                assert matches(output.text), output.text
    assert ended
    assert thought
