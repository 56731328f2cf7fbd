"""Tools of /v1/responses that are no plain functions: those of namespaces become functions, and those that
only OpenAI can run are passed over.
"""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, tool_param

from penstock.openai.failures import ApiError
from penstock.openai.routes.responses.responses import response_options, response_params
from penstock.openai.routes.responses.tools import functions_of, names_of
from penstock.openai.schemas.responses import BuiltIn, ResponsesBody
from tests.service.openai.responses.sent_events import accumulated, events_of
from tests.service.openai.responses.test_options import FACTS
from tests.service.openai.responses.test_serving import PARAMETERS, scripted
from tests.service.openai.rig import front_rig

BUILT_IN = [{"type": name} for name in sorted(get_args(BuiltIn))]
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
CODEX: dict[str, Any] = {
    "model": "fake",
    "instructions": "You are a coding agent.",
    "store": False,
    "include": [],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "prompt_cache_key": "abc",
    "client_metadata": {"x-codex-installation-id": "a"},
    "reasoning": {"effort": "none", "summary": "auto"},
    "text": {"verbosity": "low"},
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "run",
            "strict": False,
            "parameters": PARAMETERS,
        },
        {"type": "web_search", "external_web_access": False},
        {
            "type": "namespace",
            "name": "mcp__a",
            "description": "d",
            "tools": [{"type": "function", "name": "get", "parameters": PARAMETERS, "defer_loading": True}],
        },
    ],
}
"""What Codex sends with its default settings, much shortened."""


def body_of(*tools: Any, **fields: Any) -> ResponsesBody:
    return ResponsesBody.model_validate({"model": "demo", "input": "hi", "tools": list(tools), **fields})


def namespace(name: str, *functions: str) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "tools": [{**FUNCTION, "name": name} for name in functions]}


def test_every_tool_of_openai_is_taken_or_refused_on_purpose() -> None:
    """OpenAI's own types say which there are."""
    theirs: set[str] = set()
    for kind in get_args(tool_param.ToolParam):
        word = get_type_hints(kind)["type"]
        theirs |= set(get_args(word))
    assert theirs == {*get_args(BuiltIn), "function", "namespace", "custom"}


@pytest.mark.parametrize("streams", [False, True])
async def test_codex_calls_a_function_of_a_namespace_and_goes_on(streams: bool) -> None:
    call = '<tool_call>\n{"name": "mcp__a__get", "arguments": {"city": "Rome"}}\n</tool_call>'
    tools = "T:shell:mcp__a__get|s:You are a coding agent.|u:hi|a:"
    called = '<tool_call>mcp__a__get{"city": "Rome"}</tool_call>|t:28=mcp__a__get|a:'
    async with front_rig(scripted({tools: call, tools + called: "It is warm."})) as rig:

        async def answer(items: list[Any]) -> Any:
            asked = CODEX | {"input": items, "stream": streams}
            reply = await rig.http.post("/v1/responses", json=asked)
            assert reply.status_code == 200, reply.text
            assert reply.headers["x-penstock-ignored"] == (
                "client_metadata, reasoning.summary, text.verbosity, "
                "tools[].defer_loading, tools[].description, tools[].web_search"
            )
            made = accumulated(events_of(reply.text)) if streams else reply.json()
            return Response.model_validate(made)

        items = list(CODEX["input"])
        (item,) = (await answer(items)).output
        assert (item.type, item.namespace, item.name) == ("function_call", "mcp__a", "get")
        assert json.loads(item.arguments) == {"city": "Rome"}
        items += [
            item.model_dump(),
            {"type": "function_call_output", "call_id": item.call_id, "output": "28"},
        ]
        last = await answer(items)
        assert last.output_text == "It is warm."
        assert [tool.type for tool in last.tools] == ["function", "namespace"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("space", [None, "lab"])
async def test_a_custom_tool_is_given_a_text_and_answers(streams: bool, space: str | None) -> None:
    text = 'print("é")\n'
    name = "run" if space is None else f"{space}__run"
    tool: dict[str, Any] = {"type": "custom", "name": "run", "description": "Runs code."}
    tools = [tool] if space is None else [{"type": "namespace", "name": space, "tools": [tool]}]
    arguments = json.dumps({"input": text}, ensure_ascii=False)
    asked = f"T:{name}|u:hi|a:"
    called = f"<tool_call>{name}{arguments}</tool_call>|t:28={name}|a:"
    scripts = {
        asked: f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
        asked + called: "Done.",
    }
    async with front_rig(scripted(scripts)) as rig:

        async def answer(items: list[Any]) -> Any:
            fields = {"model": "fake", "input": items, "stream": streams, "tools": tools}
            reply = await rig.http.post("/v1/responses", json=fields)
            assert reply.status_code == 200, reply.text
            return accumulated(events_of(reply.text)) if streams else reply.json()

        items: list[Any] = [{"role": "user", "content": "hi"}]
        response = await answer(items)
        assert response["tools"][0]["type"] == ("custom" if space is None else "namespace")
        (item,) = response["output"]
        typed = Response.model_validate(response).output[0]
        assert typed.type == "custom_tool_call"
        assert (typed.input, typed.name, typed.namespace) == (text, "run", space)
        output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "28"}
        last = Response.model_validate(await answer([*items, item, output]))
        assert last.output_text == "Done."


@pytest.mark.parametrize("tool", BUILT_IN, ids=lambda tool: str(tool["type"]))
def test_tools_that_are_built_in_are_passed_over(tool: dict[str, Any]) -> None:
    further = {**tool, "filters": {"a": [1]}, "name": "f"}
    assert [function.path for function in functions_of(body_of(further, FUNCTION).tools)] == ["tools[1]"]
    assert response_options(body_of(further), FACTS) == response_options(body_of(), FACTS)


@pytest.mark.parametrize(
    ("tools", "param", "code"),
    [
        ([{"type": "telepathy"}], "tools[0].type", "unsupported_value"),
        (
            [FUNCTION, {**namespace("a"), "tools": [FUNCTION, {"type": "telepathy"}]}],
            "tools[1].tools[1].type",
            "unsupported_value",
        ),
        ([namespace("a", *"bc" * 300), namespace("d", *"bc" * 300)], "tools", "invalid_value"),
    ],
)
def test_other_tools_are_refused(tools: list[Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        functions_of(body_of(*tools).tools)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_a_choice_of_a_tool_that_is_passed_over_is_refused() -> None:
    with pytest.raises(ApiError) as caught:
        response_options(body_of({"type": "web_search"}, tool_choice={"type": "web_search"}), FACTS)
    assert (caught.value.param, caught.value.code) == ("tool_choice.type", "unsupported_value")


def test_paths_of_the_contract_lead_back_to_functions_of_namespaces() -> None:
    params = response_params(body_of({"type": "mcp"}, namespace("a", "b"), FUNCTION))
    assert params["chat.tools[0]"] == "tools[1].tools[0]"
    assert params["chat.tools[0].parameters_json"] == "tools[1].tools[0].parameters"
    assert params["chat.tools[1]"] == "tools[2]"


NAMES = st.sampled_from(["a", "b", "crm", "mcp__x", "mcp__y__", "get"])


@given(st.lists(st.tuples(NAMES, st.lists(NAMES, max_size=3)), max_size=4))
def test_each_call_is_told_by_the_names_that_its_function_was_given_by(
    spaces: list[tuple[str, list[str]]],
) -> None:
    """Two functions have the same name for the model only where they have both names in common."""
    tools = body_of(*(namespace(name, *inner) for name, inner in spaces)).tools
    names = names_of(tools)
    for function in functions_of(tools):
        assert names[function.flat_name] == {"namespace": function.namespace, "name": function.tool.name}
