"""Fields of /v1/responses become options of the client, or are refused by name."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from penstock.client import JsonObject, JsonSchema, Regex, SamplingDefaults, Tool
from penstock.openai.backend import ModelFacts
from penstock.openai.failures import ApiError
from penstock.openai.routes.responses.responses import (
    response_ignored,
    response_options,
    response_params,
)
from penstock.openai.schemas.responses import ResponsesBody

FACTS = ModelFacts(
    model="demo",
    features=frozenset(),
    max_context_tokens=64,
    vocab_size=512,
    default_sampling=SamplingDefaults(),
    created=0,
    template_variables=frozenset({"enable_thinking"}),
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells it.",
    "parameters": SCHEMA,
    "strict": True,
}
CUSTOM = {"type": "custom", "name": "run", "description": "Runs code."}
FORMAT = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    """Make a choice that leaves the functions of these names."""
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


def text_tool(**text: Any) -> Tool:
    """Return the function that stands for `CUSTOM`, if its text is so."""
    schema = {
        "type": "object",
        "properties": {"input": {"type": "string", **text}},
        "required": ["input"],
        "additionalProperties": False,
    }
    return Tool("run", "Runs code.", schema, strict=True)


def options(**fields: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    body = ResponsesBody.model_validate({"model": "demo", "input": "hi", **fields})
    return {name: value for name, value in response_options(body, FACTS).items() if value is not None}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0, "top_p": 0.5}, {"temperature": 0, "top_p": 0.5}),
        ({"max_output_tokens": 5}, {"max_tokens": 5}),
        (
            {"top_k": 4, "seed": 7, "stop": ["x"], "min_p": 0.1},
            {"top_k": 4, "seed": 7, "stop": ["x"], "min_p": 0.1},
        ),
        ({"truncation": "auto"}, {"truncation": "left"}),
        ({"truncation": "disabled"}, {"truncation": "reject"}),
        ({}, {"truncation": "reject", "return_token_ids": False, "model": "demo"}),
        ({"text": {"format": {"type": "json_object"}}}, {"constraint": JsonObject()}),
        ({"text": {"format": FORMAT}}, {"constraint": JsonSchema(SCHEMA)}),
        (
            {"text": {"format": FORMAT | {"strict": False}}},
            {"constraint": JsonSchema({**SCHEMA, "x-guidance": {"ignore_unknown_formats": True}})},
        ),
        ({"structured_outputs": {"regex": "a+"}}, {"constraint": Regex("a+")}),
        ({"guided_regex": "a+"}, {"constraint": Regex("a+")}),
        ({"reasoning": {"effort": "none"}}, {"template_options": {"enable_thinking": False}}),
        ({"chat_template_kwargs": {"a": 1}}, {"template_options": {"a": 1}}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": 0, "return_token_ids": True}),
        (
            {"include": ["message.output_text.logprobs"], "top_logprobs": 3},
            {"logprobs": 3, "return_token_ids": True},
        ),
        (
            {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
            {
                "tools": [Tool("get_weather", "Tells it.", SCHEMA, strict=True)],
                "tool_choice": "required",
                "parallel_tool_calls": False,
            },
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "get_weather"}},
            {"tool_choice": "get_weather"},
        ),
        (
            {"tools": [CUSTOM], "tool_choice": {"type": "custom", "name": "run"}},
            {"tools": [text_tool()], "tool_choice": "run"},
        ),
        (
            {"tools": [{**CUSTOM, "format": {"type": "grammar", "syntax": "regex", "definition": "a|b"}}]},
            {"tools": [text_tool(pattern="^(?:a|b)$")]},
        ),
        (
            {"tools": [TOOL, CUSTOM], "tool_choice": allowed("run", mode="required")},
            {"tools": [text_tool()], "tool_choice": "required"},
        ),
        (
            {"tools": [TOOL, CUSTOM], "tool_choice": allowed("run", "get_weather")},
            {
                "tools": [Tool("get_weather", "Tells it.", SCHEMA, strict=True), text_tool()],
                "tool_choice": "auto",
            },
        ),
    ],
)
def test_a_field_becomes_an_option(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    made = options(**fields)
    assert {name: made[name] for name in expected} == expected


def test_what_agents_always_send_changes_nothing() -> None:
    sent = {
        "store": False,
        "background": False,
        "include": [],
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": None, "summary": "auto"},
        "service_tier": "auto",
        "prompt_cache_retention": "24h",
        "user": "u",
        "metadata": {"a": "b"},
        "max_tool_calls": 3,
    }
    assert options(**sent) == options(tool_choice="auto")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"background": True}, "background", "unsupported_value"),
        ({"include": ["file_search_call.results"]}, "include[0]", "unsupported_value"),
        ({"tools": [{"type": "telepathy"}]}, "tools[0].type", "unsupported_value"),
        (
            {
                "tools": [
                    {**CUSTOM, "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"}}
                ]
            },
            "tools[0].format.syntax",
            "unsupported_value",
        ),
        (
            {"tools": [TOOL, {**CUSTOM, "format": {"type": "grammar", "syntax": "regex"}}]},
            "tools[1].format.definition",
            "missing_required_parameter",
        ),
        (
            {"tools": [{**CUSTOM, "format": {"type": "text", "syntax": "regex"}}]},
            "tools[0].format.syntax",
            "invalid_value",
        ),
        ({"tools": [TOOL], "tool_choice": allowed("get")}, "tool_choice.tools[0].name", "invalid_value"),
        (
            {"tools": [TOOL], "tool_choice": {**allowed(), "tools": [{"type": "telepathy"}]}},
            "tool_choice.tools[0].type",
            "unsupported_value",
        ),
        (
            {"tools": [TOOL], "tool_choice": {**allowed(mode="required"), "tools": [{"type": "mcp"}]}},
            "tool_choice.tools",
            "invalid_value",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
            "tool_choice.name",
            "invalid_value",
        ),
        (
            {"tools": [{**TOOL, "name": "auto"}], "tool_choice": {"type": "function", "name": "auto"}},
            "tool_choice.name",
            "unsupported_value",
        ),
        (
            {"tools": [{**TOOL, "strict": False}], "text": {"format": FORMAT}},
            "text.format",
            "unsupported_value",
        ),
        (
            {"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "unsupported_value",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format.schema",
            "missing_required_parameter",
        ),
        (
            {"text": {"format": {"type": "json_schema", "schema": {}}}},
            "text.format.name",
            "missing_required_parameter",
        ),
        ({"text": {"format": {"type": "text", "strict": True}}}, "text.format.strict", "invalid_value"),
        (
            {"text": {"format": FORMAT}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "invalid_value",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "invalid_value"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        options(**fields)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


def test_strict_tools_may_be_called_beside_a_format() -> None:
    made = options(tools=[TOOL], text={"format": FORMAT})
    assert made["constraint"] is not None
    assert made["tools"] is not None


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "name": "get_weather"}, allowed("get_weather", mode="required")],
)
def test_a_call_that_is_required_decides_and_not_the_format(choice: Any) -> None:
    """Instructor sends one schema as both."""
    fields = {"tools": [TOOL], "tool_choice": choice, "text": {"format": FORMAT}}
    made = options(**fields)
    assert "constraint" not in made
    assert made == options(**fields | {"text": None})
    body = ResponsesBody.model_validate({"model": "demo", "input": "hi", **fields})
    assert response_ignored(body, FACTS) == {"text.format"}


def test_programs_are_told_what_is_taken() -> None:
    """By the JSON Schema of the body, which /openapi.json has."""
    schema = jsonschema.Draft202012Validator(ResponsesBody.model_json_schema())
    user, choice = {"role": "user", "content": "hi"}, {"type": "function", "name": "get_weather"}
    taken = {"model": "demo", "input": [user], "tools": [TOOL], "tool_choice": choice}
    schema.validate(taken)
    others: list[dict[str, Any]] = [
        {"tools": [{"type": "telepathy"}]},
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        {"input": [{"type": "telepathy", "id": "msg_1"}]},
        {"input": [{**user, "content": [{"type": "input_image", "file_id": "x"}]}]},
    ]
    for fields in others:
        assert not schema.is_valid(taken | fields), fields


def test_paths_of_the_contract_lead_back_to_fields() -> None:
    body = ResponsesBody.model_validate(
        {"model": "demo", "input": "hi", "tools": [TOOL], "text": {"format": FORMAT}}
    )
    params = response_params(body)
    assert params["stopping.max_tokens"] == "max_output_tokens"
    assert params["sampling.temperature"] == "temperature"
    assert params["constraint.json_schema"] == "text.format.schema"
    assert params["chat.tools[0].parameters_json"] == "tools[0].parameters"
    left = {"tools": [TOOL, CUSTOM], "tool_choice": allowed("run")}
    params = response_params(ResponsesBody.model_validate({"model": "demo", "input": "hi", **left}))
    assert params["chat.tools[0].parameters_json"] == "tools[1].format"
