"""What the server is asked for a chat, field by field, and what the front refuses by itself."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.client import ChatMessage, Choice, Ebnf, Image, JsonObject, JsonSchema, Regex, Tool, ToolCall
from penstock.openai.failures import ApiError
from penstock.openai.routes.chat import chat_ignored, chat_options, chat_params
from tests.service.openai.chat.bodies import HI, asked, chat_body, facts, refusal

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
LOOSE = {"type": "function", "function": {"name": "look"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
BARE = {
    "model": "m",
    "messages": [ChatMessage("user", "hi")],
    "return_token_ids": False,
    "echo_prompt_token_ids": False,
}
LENIENT = {"x-guidance": {"ignore_unknown_formats": True}}
"""What the schema of a form that is not strict says beside itself."""


def test_what_is_left_out_is_left_to_the_server() -> None:
    assert asked() == BARE


def test_images_stay_where_they_stand_in_a_turn() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,YWJj", "detail": "auto"}}
    content = [{"type": "text", "text": "This"}, image, {"type": "text", "text": "is what?"}]
    body = {"messages": [{"role": "user", "content": content}]}
    seen = ("This", Image(b"abc", "image/png"), "is what?")
    assert asked(**body)["messages"] == [ChatMessage("user", seen)]
    params = chat_params(chat_body(**body))
    assert params["chat.messages[0].parts[1].image.data"] == "messages[0].content[1].image_url.url"
    assert params["chat.messages[0].parts[0]"] == "messages[0].content[0]"


@pytest.mark.parametrize(
    ("field", "value", "options"),
    [
        ("temperature", 0, {"temperature": 0}),
        ("top_p", 0.5, {"top_p": 0.5}),
        ("presence_penalty", -1, {"presence_penalty": -1}),
        ("frequency_penalty", 1.5, {"frequency_penalty": 1.5}),
        ("seed", 7, {"seed": 7}),
        ("seed", -1, {"seed": 2**64 - 1}),
        ("n", 3, {"n": 3}),
        ("stop", "x", {"stop": "x"}),
        ("stop", ["x", "y"], {"stop": ["x", "y"]}),
        ("logit_bias", {"50": -100, "7": 1.5}, {"logit_bias": {50: -100, 7: 1.5}}),
        ("max_tokens", 5, {"max_tokens": 5}),
        ("max_completion_tokens", 5, {"max_tokens": 5}),
        ("top_k", 4, {"top_k": 4}),
        ("top_k", -1, {"top_k": 0}),
        ("min_p", 0.1, {"min_p": 0.1}),
        ("repetition_penalty", 1.2, {"repetition_penalty": 1.2}),
        ("min_tokens", 2, {"min_tokens": 2}),
        ("ignore_eos", True, {"ignore_eos": True}),
        ("stop_token_ids", [1, 2], {"stop_token_ids": [1, 2]}),
        ("include_stop_str_in_output", True, {"include_stop": True}),
        ("skip_special_tokens", False, {"skip_special_tokens": False}),
        ("bad_words", ["no"], {"bad_words": ["no"]}),
        ("allowed_token_ids", [5], {"allowed_token_ids": [5]}),
        ("cache_salt", "s", {"cache_salt": "s"}),
        ("priority", 3, {"priority": -3}),
        ("time_limit", 2.5, {"time_limit": 2.5}),
        ("prompt_logprobs", 2, {"prompt_logprobs": 2, "echo_prompt_token_ids": True}),
        ("return_token_ids", True, {"return_token_ids": True, "echo_prompt_token_ids": True}),
        ("logprobs", True, {"logprobs": 0, "return_token_ids": True}),
        ("logprobs", False, {}),
        ("truncate_prompt_tokens", 40, {"truncation": "left", "reserve_tokens": 24}),
        ("truncate_prompt_tokens", -1, {"truncation": "left"}),
        ("truncate_prompt_tokens", 64, {"truncation": "left"}),
        ("chat_template", "tool_use", {"chat_template": "tool_use"}),
        ("chat_template_kwargs", {"a": None}, {"template_options": {"a": None}}),
        ("response_format", {"type": "text"}, {}),
        ("response_format", {"type": "json_object"}, {"constraint": JsonObject()}),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}, "strict": True}},
            {"constraint": JsonSchema({"type": "null"})},
        ),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"format": "x"}, "strict": False}},
            {"constraint": JsonSchema({"format": "x", **LENIENT})},
        ),
        (
            "response_format",
            {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"x-guidance": {"coerce_one_of": True}}},
            },
            {"constraint": JsonSchema({"x-guidance": {**LENIENT["x-guidance"], "coerce_one_of": True}})},
        ),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"x-guidance": 7}}},
            {"constraint": JsonSchema({"x-guidance": 7})},
        ),
        ("structured_outputs", {"json": {"a": None}}, {"constraint": JsonSchema({"a": None, **LENIENT})}),
        ("structured_outputs", {"json": "{}"}, {"constraint": JsonSchema("{}")}),
        ("structured_outputs", {"regex": "a+"}, {"constraint": Regex("a+")}),
        ("structured_outputs", {"choice": ["a", "b"]}, {"constraint": Choice(["a", "b"])}),
        ("structured_outputs", {"grammar": "start: A"}, {"constraint": Ebnf("start: A")}),
        ("structured_outputs", {"json_object": True}, {"constraint": JsonObject()}),
        ("guided_json", {"a": None}, {"constraint": JsonSchema({"a": None, **LENIENT})}),
        ("guided_json", "{}", {"constraint": JsonSchema("{}")}),
        ("guided_regex", "a+", {"constraint": Regex("a+")}),
        ("guided_choice", ["a", "b"], {"constraint": Choice(["a", "b"])}),
        ("guided_grammar", "start: A", {"constraint": Ebnf("start: A")}),
        ("guided_decoding_backend", "guidance:no-fallback", {}),
        ("regex", "a+", {"constraint": Regex("a+")}),
        ("ebnf", 'root ::= "a"', {"constraint": Ebnf('root ::= "a"')}),
        ("tools", [], {}),
        ("tools", None, {}),
        ("parallel_tool_calls", False, {}),
        ("tool_choice", "none", {"tool_choice": "none"}),
        ("modalities", ["text"], {}),
        ("user", "u", {}),
        ("metadata", {"a": "b"}, {}),
        ("store", False, {}),
        ("service_tier", "auto", {}),
        ("safety_identifier", "u", {}),
        ("prompt_cache_key", "u", {}),
        ("stream", False, {}),
        ("function_call", None, {}),
    ],
)
def test_each_field(field: str, value: Any, options: dict[str, Any]) -> None:
    assert asked(**{field: value}) == BARE | options


def test_top_logprobs() -> None:
    options = asked(logprobs=True, top_logprobs=4)
    assert (options["logprobs"], options["return_token_ids"]) == (4, True)


def test_usage_in_every_chunk_needs_the_tokens_of_each() -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert asked(stream=True, stream_options=both)["return_token_ids"] is True
    assert asked(stream=True, stream_options={"include_usage": True})["return_token_ids"] is False


def test_turns() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "get_weather"},
        {"role": "assistant", "reasoning_content": "ah", "content": "Sunny."},
        {"role": "user", "content": ""},
    ]
    call = ToolCall("c1", "get_weather", '{"city": "Oslo"}')
    assert asked(messages=messages)["messages"] == [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "a\nb"),
        ChatMessage("assistant", "", (call,), reasoning="hm"),
        ChatMessage("tool", "sunny", tool_call_id="c1", name="get_weather"),
        ChatMessage("assistant", "Sunny.", reasoning="ah"),
        ChatMessage("user", ""),
    ]


def test_an_answer_can_be_sent_back_as_clients_keep_it() -> None:
    """With what openai's client adds (parsed, parsed_arguments, index), and LiteLLM."""
    function = CALL["function"] | {"parsed_arguments": {"city": "Oslo"}}  # type: ignore[operator]
    turn = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "parsed": None,
        "provider_specific_fields": {"refusal": None},
        "tool_calls": [{**CALL, "index": 0, "function": function}],
    }
    (_, answer) = asked(messages=[*HI, turn])["messages"] or ()
    call = ToolCall("c1", "get_weather", '{"city": "Oslo"}')
    assert answer == ChatMessage("assistant", "", (call,))


def test_tools_and_the_choice_of_one() -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    options = asked(tools=[WEATHER], tool_choice=named, parallel_tool_calls=False)
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    assert options["tools"] == (Tool("get_weather", "The weather.", parameters, strict=True),)
    assert (options["tool_choice"], options["parallel_tool_calls"]) == ("get_weather", False)


def test_a_custom_tool_is_a_function_with_one_text() -> None:
    """For the model, which knows functions only."""
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a|b"}}
    custom = {"type": "custom", "custom": {"name": "run", "description": "Runs it.", "format": grammar}}
    call = {"id": "c1", "type": "custom", "custom": {"name": "run", "input": 'say "é"'}}
    body = {
        "tools": [WEATHER, custom],
        "tool_choice": {"type": "custom", "custom": {"name": "run"}},
        "messages": [*HI, {"role": "assistant", "tool_calls": [call]}],
    }
    options, params = asked(**body), chat_params(chat_body(**body))
    schema = {
        "type": "object",
        "properties": {"input": {"type": "string", "pattern": "^(?:a|b)$"}},
        "required": ["input"],
        "additionalProperties": False,
    }
    assert (options["tools"] or ())[1] == Tool("run", "Runs it.", schema, strict=True)
    assert options["tool_choice"] == "run"
    made = ToolCall("c1", "run", '{"input": "say \\"é\\""}')
    assert (options["messages"] or ())[1] == ChatMessage("assistant", "", (made,))
    assert params["chat.tools[1].parameters_json"] == "tools[1].custom.format"
    assert params["chat.messages[1].tool_calls[0].name"] == "messages[1].tool_calls[0].custom.name"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_the_tools_that_are_allowed_are_offered(mode: str) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "look"}}]}
    body = {"tools": [WEATHER, LOOSE], "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    options = asked(**body)
    assert options["tools"] == (Tool("look"),)
    assert options["tool_choice"] == mode
    assert chat_params(chat_body(**body))["chat.tools[0].name"] == "tools[1].function.name"


@pytest.mark.parametrize(
    ("effort", "variables", "expected"),
    [
        ("low", ("reasoning_effort",), {"reasoning_effort": "low"}),
        ("none", ("reasoning_effort", "enable_thinking"), {"reasoning_effort": "none"}),
        ("none", ("enable_thinking",), {"enable_thinking": False}),
        ("none", ("thinking",), {"thinking": False}),
    ],
)
def test_reasoning_effort(effort: str, variables: tuple[str, ...], expected: dict[str, Any]) -> None:
    body = chat_body(reasoning_effort=effort, chat_template_kwargs={"date": "today"})
    options = chat_options(body, facts(template_variables=variables))
    assert options["template_options"] == {"date": "today"} | expected
    assert chat_ignored(body, facts(template_variables=variables)) == set()


@pytest.mark.parametrize(
    ("features", "fields", "ignored"),
    [
        ({"chat"}, {}, {"messages[].name"}),
        ({"chat", "names"}, {}, set()),
        ({"chat"}, {"chat_template": "{{ messages[0].name }}"}, set()),
    ],
)
def test_names_go_to_the_template_that_shows_them(
    features: set[str], fields: dict[str, Any], ignored: set[str]
) -> None:
    said = [{"role": role, "name": role[:2], "content": "x"} for role in ("system", "user", "assistant")]
    body = chat_body(messages=said, **fields)
    there = facts(features=frozenset(features))
    turns: Any = chat_options(body, there)["messages"]
    assert [turn.name for turn in turns] == ["sy", "us", "as"]
    assert chat_ignored(body, there) == ignored


def test_an_effort_that_is_given_twice_is_refused() -> None:
    both = chat_body(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    with pytest.raises(ApiError) as caught:
        chat_options(both, facts(template_variables=("enable_thinking",)))
    assert (caught.value.param, caught.value.code) == ("reasoning_effort", "invalid_value")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("stream_options", {"stream_options": {"include_usage": True}}),
        (
            "stream_options.continuous_usage_stats",
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        ),
        ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
        ("top_logprobs", {"top_logprobs": 1}),
        ("max_tokens", {"max_tokens": 1, "max_completion_tokens": 2}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
        ("logit_bias", {"logit_bias": {"a": 1}}),
        ("logit_bias", {"logit_bias": {"-1": 1}}),
        ("logit_bias", {"logit_bias": {"1": 1, "01": 2}}),
        ("logit_bias", {"logit_bias": {str(i): 1 for i in range(261)}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        ("structured_outputs", {"structured_outputs": {}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
        (
            "structured_outputs",
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        ),
        ("guided_json", {"guided_json": {}, "response_format": {"type": "json_object"}}),
        ("guided_regex", {"guided_regex": "a", "structured_outputs": {"regex": "b"}}),
        ("guided_grammar", {"guided_grammar": "start: A", "guided_choice": ["a"]}),
        ("ebnf", {"ebnf": 'root ::= "a"', "regex": "a"}),
        ("guided_regex", {"guided_regex": "a", "tools": [LOOSE]}),
        ("tool_choice.function.name", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "x"}]}),
        ("messages[0].tool_call_id", {"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}),
        ("messages[0].tool_calls", {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}),
        ("messages[0].reasoning", {"messages": [{"role": "user", "content": "x", "reasoning": "y"}]}),
        ("messages[0].content[1].type", {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "video"}]}]}),
        ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        (
            "messages[0].reasoning_content",
            {"messages": [{"role": "assistant", "reasoning": "a", "reasoning_content": "b"}]},
        ),
    ],
)  # fmt: skip
def test_what_the_front_refuses(param: str, fields: dict[str, Any]) -> None:
    assert refusal(**fields).param == param


def test_one_form_may_be_asked_for_by_two_names() -> None:
    """guidance does that, because it does not know the server's release."""
    fields = {"guided_grammar": "start: A", "structured_outputs": {"grammar": "start: A"}}
    assert asked(**fields)["constraint"] == Ebnf("start: A")


@pytest.mark.parametrize("choice", [None, "auto"])
def test_a_grammar_would_keep_the_model_from_calling_tools(choice: str | None) -> None:
    fields = {"tools": [LOOSE], "tool_choice": choice, "response_format": {"type": "json_object"}}
    assert refusal(**fields).param == "response_format"
    assert asked(**fields | {"tool_choice": "none"})["constraint"] == JsonObject()


def test_strict_tools_may_be_called_beside_a_constraint() -> None:
    """The output is then calls or the answer; where a call is required, the call decides."""
    fields = {"tools": [WEATHER, LOOSE], "response_format": {"type": "json_object"}}
    options = asked(**fields)
    assert options["constraint"] == JsonObject()
    assert options["tools"] is not None
    assert [isinstance(tool, Tool) and tool.strict for tool in options["tools"]] == [True, False]
    required = fields | {"tool_choice": "required"}
    assert "constraint" not in asked(**required)
    assert chat_ignored(chat_body(**required), facts()) == {"response_format"}
    regex = {"tools": [LOOSE], "tool_choice": "required", "structured_outputs": {"regex": "a"}}
    assert refusal(**regex).param == "structured_outputs"


def test_fields_of_the_contract_have_their_names_in_the_body() -> None:
    call = {"role": "assistant", "tool_calls": [CALL]}
    body = chat_body(tools=[WEATHER], messages=[*HI, call], max_completion_tokens=3)
    params = chat_params(body)
    assert params["chat.tools[0].parameters_json"] == "tools[0].function.parameters"
    assert params["chat.messages[1].tool_calls[0].name"] == "messages[1].tool_calls[0].function.name"
    assert params["stopping.max_tokens"] == "max_completion_tokens"
    assert params["constraint.json_schema"] == "structured_outputs.json"
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
    of_format = chat_params(chat_body(response_format=schema, max_tokens=1))
    assert of_format["constraint.json_schema"] == "response_format.json_schema.schema"
    assert of_format["stopping.max_tokens"] == "max_tokens"


def test_a_bias_may_have_as_many_keys_as_the_model_has_tokens() -> None:
    assert asked(logit_bias={str(i): 1 for i in range(260)})["logit_bias"] == dict.fromkeys(range(260), 1)
