"""Fields and blocks of /v1/messages become options of the client, or are ignored or refused by name."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from penstock.client import ChatMessage, Image, JsonSchema, SamplingDefaults, Tool, ToolCall
from penstock.openai import reading
from penstock.openai.backend import ModelFacts
from penstock.openai.failures import ApiError
from penstock.openai.routes.messages.messages import message_ignored, message_options, message_params
from penstock.openai.schemas.messages import MessagesBody
from penstock.openai.schemas.responses import carried
from tests.service.codecs import QWEN_VOCAB, qwen_codec
from tests.service.openai.rig import front_rig
from tests.service.rig import fake

HI: dict[str, Any] = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: dict[str, Any] = {"name": "get", "description": "Tells it.", "input_schema": SCHEMA}
PNG = base64.b64encode(b"an image").decode()
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
CACHE = {"type": "ephemeral"}


def facts(*variables: str) -> ModelFacts:
    """Return what is known of a model whose chat template reads these variables."""
    return ModelFacts(
        model="fake",
        features=frozenset(),
        max_context_tokens=64,
        vocab_size=260,
        default_sampling=SamplingDefaults(),
        created=0,
        template_variables=frozenset(variables),
    )


def read(*variables: str, **fields: Any) -> tuple[MessagesBody, set[str]]:
    """Return the body with these fields, and which of them have no effect with such a template."""
    ignored: set[str] = set()
    data = json.dumps({"model": "fake", "max_tokens": 9, "messages": [HI], **fields}).encode()
    body = reading._parsed(data, MessagesBody, ignored)
    return body, ignored | message_ignored(body, facts(*variables))


def options(*variables: str, **fields: Any) -> dict[str, Any]:
    """Return the options that are not None, but for those of every request here."""
    body, _ = read(*variables, **fields)
    made = message_options(body, facts(*variables))
    assert made.pop("model", None) == "fake"
    return {name: value for name, value in made.items() if value is not None}


def blocks(*content: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(content)}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def tool_use(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "get", "input": arguments}


def result(call_id: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def thinking(words: str, signature: str = "penstock-unsigned") -> dict[str, Any]:
    return {"type": "thinking", "thinking": words, "signature": signature}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"max_tokens": 9}),
        ({"temperature": 0, "top_p": 0.5, "top_k": 4}, {"temperature": 0, "top_p": 0.5, "top_k": 4}),
        ({"stop_sequences": ["x", "y"]}, {"stop": ["x", "y"]}),
        ({"tools": [TOOL]}, {"tools": [Tool("get", "Tells it.", SCHEMA)]}),
        (
            {"tools": [{"type": "custom", "name": "get", "input_schema": SCHEMA, "strict": True}]},
            {"tools": [Tool("get", "", SCHEMA, strict=True)]},
        ),
        ({"tool_choice": {"type": "auto"}}, {"tool_choice": "auto"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "tool", "name": "get", "disable_parallel_tool_use": True},
            },
            {
                "tools": [Tool("get", "Tells it.", SCHEMA)],
                "tool_choice": "get",
                "parallel_tool_calls": False,
            },
        ),
        *(
            (fields, {"constraint": JsonSchema({**SCHEMA, "x-guidance": {"ignore_unknown_formats": True}})})
            for fields in ({"output_config": {"format": FORMAT}}, {"output_format": FORMAT})
        ),
    ],
)
def test_fields_become_options(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    made = options(**fields)
    assert made.pop("messages") == [ChatMessage("user", "hi")]
    assert made == {"max_tokens": 9} | expected


@pytest.mark.parametrize(
    ("variables", "fields", "expected", "ignored"),
    [
        (("enable_thinking",), {"thinking": {"type": "enabled"}}, {"enable_thinking": True}, set()),
        (("thinking",), {"thinking": {"type": "adaptive"}}, {"thinking": True}, set()),
        (("enable_thinking",), {"thinking": {"type": "disabled"}}, {"enable_thinking": False}, set()),
        (("reasoning_effort",), {"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}, set()),
        (("reasoning_effort",), {"output_config": {"effort": "max"}}, {"reasoning_effort": "max"}, set()),
        (
            ("enable_thinking", "reasoning_effort"),
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
            {"enable_thinking": False},
            {"output_config.effort"},
        ),
        (("enable_thinking",), {"output_config": {"effort": "low"}}, None, {"output_config.effort"}),
        ((), {"thinking": {"type": "enabled"}}, None, {"thinking"}),
        (
            ("enable_thinking",),
            {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "summarized"}},
            {"enable_thinking": True},
            {"thinking.budget_tokens", "thinking.display"},
        ),
        (("enable_thinking",), {}, None, set()),
    ],
)
def test_thinking_is_what_the_template_can(
    variables: tuple[str, ...], fields: dict[str, Any], expected: Any, ignored: set[str]
) -> None:
    assert options(*variables, **fields).get("template_options") == expected
    assert read(*variables, **fields)[1] == ignored


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"system": "Be brief."}, [ChatMessage("system", "Be brief."), ChatMessage("user", "hi")]),
        ({"system": [text("A."), text("B.")]}, [ChatMessage("system", "A.\nB."), ChatMessage("user", "hi")]),
        ({"messages": [blocks(text("a"), text("b"))]}, [ChatMessage("user", "a\nb")]),
        ({"messages": [HI, blocks(text("b")), HI]}, [ChatMessage("user", "hi\nb\nhi")]),
        ({"messages": [blocks()]}, [ChatMessage("user", "")]),
        (
            {"messages": [HI, *({"role": "assistant", "content": said} for said in "ab"), HI]},
            [ChatMessage("user", "hi"), ChatMessage("assistant", "ab"), ChatMessage("user", "hi")],
        ),
        (
            {"messages": [blocks(text("Look:"), IMAGE)]},
            [ChatMessage("user", ("Look:", Image(b"an image", "image/png")))],
        ),
        (
            {"messages": [HI, {"role": "system", "content": "Now in French."}, HI]},
            [ChatMessage("user", "hi"), ChatMessage("system", "Now in French."), ChatMessage("user", "hi")],
        ),
        (
            {
                "messages": [
                    HI,
                    blocks(
                        thinking("Hm."),
                        text("I look", citations=None),
                        tool_use("a", city="Rome"),
                        tool_use("b"),
                        text("."),
                        role="assistant",
                    ),
                    blocks(result("a", "28"), result("b", [text("x"), IMAGE], is_error=True), text("So?")),
                ]
            },
            [
                ChatMessage("user", "hi"),
                ChatMessage(
                    "assistant",
                    "I look.",
                    (ToolCall("a", "get", '{"city": "Rome"}'), ToolCall("b", "get", "{}")),
                    reasoning="Hm.",
                ),
                ChatMessage("tool", "28", tool_call_id="a"),
                ChatMessage("tool", ("Error:", "x", Image(b"an image", "image/png")), tool_call_id="b"),
                ChatMessage("user", "So?"),
            ],
        ),
        (
            {"messages": [HI, blocks(tool_use("a"), role="assistant"), blocks(result("a", None))]},
            [
                ChatMessage("user", "hi"),
                ChatMessage("assistant", "", (ToolCall("a", "get", "{}"),)),
                ChatMessage("tool", "", tool_call_id="a"),
            ],
        ),
        (
            {"messages": [HI, blocks(thinking("", carried("Hm.")), text("A"), role="assistant"), HI]},
            [
                ChatMessage("user", "hi"),
                ChatMessage("assistant", "A", reasoning="Hm."),
                ChatMessage("user", "hi"),
            ],
        ),
    ],
)
def test_blocks_become_turns(fields: dict[str, Any], expected: list[ChatMessage]) -> None:
    assert options(**fields)["messages"] == expected
    assert read(**fields)[1] == set()


WISHES: list[tuple[dict[str, Any], set[str]]] = [
    *(
        ({name: {"a": 1}}, {name})
        for name in (
            *("billing_policy", "cache_control", "context_management", "diagnostics"),
            *("fallback_credit_token", "fallbacks", "metadata", "service_tier", "speed"),
            *("user_profile_id", "workspace_id"),
        )
    ),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, {"output_config.task_budget"}),
    ({"system": [text("a", cache_control=CACHE)]}, {"system[].cache_control"}),
    (
        {"messages": [blocks({**IMAGE, "cache_control": CACHE})]},
        {"messages[].content[].cache_control"},
    ),
    *(
        ({"tools": [{**TOOL, name: value}]}, {f"tools[].{name}"})
        for name, value in {
            "cache_control": CACHE,
            "defer_loading": True,
            "eager_input_streaming": True,
            "input_examples": [{"city": "Rome"}],
        }.items()
    ),
    *(
        ({"tools": [TOOL, {"type": kind, "name": "x", "max_uses": 1}]}, {f"tools[].{name}"})
        for kind, name in {
            "advisor_20260301": "advisor",
            "bash_20250124": "bash",
            "browser_toolset_20260801": "browser_toolset",
            "code_execution_20250825": "code_execution",
            "computer_20250124": "computer",
            "computer_toolset_20260801": "computer_toolset",
            "mcp_toolset": "mcp_toolset",
            "memory_20250818": "memory",
            "text_editor_20250728": "text_editor",
            "tool_search_tool_bm25": "tool_search_tool_bm25",
            "tool_search_tool_regex_20251119": "tool_search_tool_regex",
            "web_fetch_20250910": "web_fetch",
            "web_search_20260318": "web_search",
        }.items()
    ),
    *(
        (
            {"messages": [HI, blocks(block, text("A"), role="assistant"), HI]},
            {f"messages[].content[].{block['type']}"},
        )
        for block in (thinking("", "EqQBCkYI"), {"type": "redacted_thinking", "data": "EqQB"})
    ),
]


@pytest.mark.parametrize(("fields", "ignored"), WISHES)
def test_wishes_are_taken_and_named(fields: dict[str, Any], ignored: set[str]) -> None:
    assert read(**fields)[1] == ignored
    assert options(**fields)["max_tokens"] == 9


def test_every_ignored_field_is_tried() -> None:
    tried = {name for _, ignored in WISHES for name in ignored}
    assert MessagesBody.ignored <= tried


@pytest.mark.parametrize(
    "fields",
    [
        {"context_management": {"edits": []}},
        {"fallbacks": []},
        {"inference_geo": "global"},
        {"mcp_servers": []},
        {"metadata": {"user_id": None}},
        {"service_tier": "auto"},
        {"service_tier": "standard_only"},
        {"speed": "standard"},
        {"thread": {}},
        {"stream": False},
        {"tools": [], "output_config": {}},
        {"tools": [{**TOOL, "defer_loading": False, "eager_input_streaming": False, "input_examples": []}]},
        {"tools": [{**TOOL, "allowed_callers": ["direct"]}]},
        *({name: None} for name in ("container", "compaction", "inference_geo", "system", "top_k")),
    ],
)
def test_neutral_values_ask_for_nothing(fields: dict[str, Any]) -> None:
    _, ignored = read(**fields)
    tools = {"tools": fields["tools"][:1]} if "tools" in fields else {}
    plain = [{name: value for name, value in tool.items() if name in TOOL} for tool in tools.get("tools", ())]
    assert (options(**fields), ignored) == (options(tools=plain), set())


PARAMS: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "max_tokens", "missing_required_parameter"),
    ({"model": None}, "model", "missing_required_parameter"),
    ({"frequency_penalty": 1}, "frequency_penalty", "unknown_parameter"),
    *(
        ({name: {"x": 1}}, name, "unsupported_parameter")
        for name in ("compaction", "container", "inference_geo", "mcp_servers", "thread")
    ),
    ({"thinking": {"type": "between_tools"}}, "thinking.type", "unsupported_value"),
    ({"output_config": {"format": FORMAT}, "output_format": FORMAT}, "output_format", "invalid_value"),
    ({"output_format": FORMAT, "tools": [TOOL]}, "output_format", "unsupported_value"),
    ({"output_config": {"format": FORMAT}, "tools": [TOOL]}, "output_config.format", "unsupported_value"),
    ({"tools": [{"type": "telepathy"}]}, "tools[0].type", "unsupported_value"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema", "missing_required_parameter"),
    (
        {"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]},
        "tools[0].allowed_callers[0]",
        "",
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", "missing_required_parameter"),
    ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name", "invalid_value"),
    ({"tool_choice": {"type": "auto", "name": "x"}}, "tool_choice.name", "invalid_value"),
    ({"messages": [HI, {"role": "assistant", "content": "He"}]}, "messages[1].role", "unsupported_value"),
    ({"messages": [blocks({"type": "document"})]}, "messages[0].content[0].type", "unsupported_value"),
    ({"messages": [blocks(tool_use("a"))]}, "messages[0].content[0].type", "invalid_value"),
    ({"messages": [blocks(thinking("a"))]}, "messages[0].content[0].type", "invalid_value"),
    (
        {"messages": [HI, blocks(IMAGE, role="assistant"), HI]},
        "messages[1].content[0].type",
        "invalid_value",
    ),
    (
        {"messages": [blocks({**IMAGE, "transformations": {}})]},
        "messages[0].content[0].transformations",
        "",
    ),
    (
        {"messages": [blocks({"type": "image", "source": {"type": "url", "url": "http://a/b.png"}})]},
        "messages[0].content[0].source.type",
        "unsupported_value",
    ),
    (
        {"messages": [blocks({**IMAGE, "source": {**IMAGE["source"], "data": "?"}})]},  # type: ignore[dict-item]  # a mapping
        "messages[0].content[0].source.data",
        "invalid_value",
    ),
    (
        {"messages": [blocks(text("a"), result("a", [{"type": "document"}]))]},
        "messages[0].content[1].content[0].type",
        "unsupported_value",
    ),
    ({"messages": [blocks(*[text("a")] * 20_001)]}, "messages", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), PARAMS, ids=lambda value: str(value)[:60])
def test_what_the_front_refuses_is_named(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        options(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.code == code or not code
    assert param in caught.value.message


def test_paths_of_the_contract_lead_back_to_blocks() -> None:
    body, _ = read(
        system="s",
        tools=[{"type": "web_search_20250305", "name": "w"}, TOOL],
        messages=[
            HI,
            blocks(text("a"), tool_use("a"), role="assistant"),
            blocks(result("a", [text("x"), IMAGE]), text("y"), IMAGE),
            blocks(IMAGE),
        ],
    )
    params = message_params(body)
    for path, field in {
        "chat.tools[0].parameters_json": "tools[1].input_schema",
        "chat.messages[0]": "system",
        "chat.messages[0].content": "system",
        "chat.messages[1].parts": "messages[0].content",
        "chat.messages[1]": "messages[0]",
        "chat.messages[2].tool_calls[0].arguments_json": "messages[1].content[1].input",
        "chat.messages[3].tool_call_id": "messages[2].content[0].tool_use_id",
        "chat.messages[3].content": "messages[2].content[0].content",
        "chat.messages[3].parts[1].image.data": "messages[2].content[0].content[1].source.data",
        "chat.messages[4].parts[1].image": "messages[2].content[2].source.data",
        "chat.messages[4].parts[2].image": "messages[3].content[0].source.data",
        "constraint.json_schema": "output_config.format.schema",
    }.items():
        assert params[path] == field


async def test_what_the_server_refuses_has_the_name_of_its_field() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"temperature": -1}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"output_config": {"format": {**FORMAT, "schema": {"type": "x"}}}}, "output_config.format.schema"),
        ({"messages": [blocks(result("a", "b"))]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [blocks(text("a"), IMAGE)]}, "messages[0].content"),
    ]
    async with front_rig(fake(codec=qwen_codec(), vocab_size=QWEN_VOCAB)) as rig:
        for fields, param in cases:
            body = {"model": "fake", "max_tokens": 9, "messages": [HI], **fields}
            reply = await rig.http.post("/v1/messages", json=body)
            error = reply.json()["error"]
            assert (reply.status_code, error["type"]) == (400, "invalid_request_error"), fields
            assert f"'{param}" in error["message"], (fields, error)
