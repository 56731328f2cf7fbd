"""Strict tools where the model is free to call them: words are free, and arguments follow the schema.

The fake engine writes scripts in the form of Hermes and Qwen. Where the grammar forbids the script's next
token, it writes the lowest allowed one that is not below it, or else the lowest allowed one.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.service.requests.generate import Features
from penstock.v1 import types_pb2
from tests.service.codecs import byte_codec
from tests.service.rig import failure_of, fake, generate, serving
from tests.service.servicers.chats.test_tool_calls import CALLS, ON, THOUGHT, both, chat, qwen, said
from tests.support.chat import LLAMA3
from tests.support.models.byte_text import EOS

TOOLS = [
    types_pb2.ToolDefinition(name="put"),
    types_pb2.ToolDefinition(name="get", parameters_json=json.dumps(ON), strict=True),
]
CONSTRAINED: dict[str, Any] = {"constraint": {"json_object": {}}}
PROMPT = "T:put:get|u:hi|a:"
WRONG = '<tool_call>\n{"name": "get", "arguments": {"on": 7}}\n</tool_call>'
RIGHT = WRONG.replace("7", "true")


def strict(**fields: Any) -> types_pb2.ChatPrompt:
    return chat(**{"tools": TOOLS, **fields})


@pytest.mark.parametrize("tokens_per_step", [1, 4])
async def test_a_strict_tool_is_called_as_its_schema_says(tokens_per_step):
    """Not so where it is not strict: then the model's own arguments are told."""
    async with serving(qwen(f"{THOUGHT}I look.\n{WRONG}", PROMPT, tokens_per_step=tokens_per_step)) as rig:
        (output,) = await both(rig, chat=strict(), stopping={"max_tokens": 300})
        assert said(output) == ("I look.", "hm, \u00e9", [("get", '{"on": false}')])
        assert output.finish.reason == types_pb2.FINISH_REASON_EOS
    loose = [types_pb2.ToolDefinition(name=tool.name, parameters_json=tool.parameters_json) for tool in TOOLS]
    async with serving(qwen(WRONG, PROMPT)) as rig:
        (output,) = await both(rig, chat=chat(tools=loose))
        assert said(output) == ("", "", [("get", '{"on": 7}')])
        assert rig.engine.seen[-1].constraint is None


async def test_what_fits_is_let_through():
    """Words, a call as it should be, several of them, and the other tool with whatever arguments."""
    put = '<tool_call>\n{"name": "put", "arguments": {"a": [1, {"b": null}]}}\n</tool_call>'
    for script, expected in (
        ("no need", ("no need", "", [])),
        (f"{THOUGHT}so", ("so", "hm, \u00e9", [])),
        (RIGHT, ("", "", [("get", '{"on": true}')])),
        (f"one {RIGHT}\n{put} two", ("one two", "", [("get", '{"on": true}'), ("put", put[41:-14])])),
    ):
        async with serving(qwen(script, PROMPT)) as rig:
            (output,) = await both(rig, chat=strict())
            assert said(output) == expected
            assert output.token_ids[-1] == EOS


async def test_one_strict_call():
    async with serving(qwen(f"one {RIGHT}\n{RIGHT} two", PROMPT)) as rig:
        (output,) = await both(rig, chat=strict(parallel_tool_calls=False))
        assert said(output) == ("one", "", [("get", '{"on": true}')])
        assert output.finish.reason == types_pb2.FINISH_REASON_EOS


async def test_tools_that_are_not_offered_enforce_nothing():
    async with serving(qwen(WRONG, "u:hi|a:"), features=Features(constraints=False)) as rig:
        (output,) = await both(rig, chat=strict(tool_choice="none"))
        assert output.text.endswith('{"on": 7}}\n')
        assert rig.engine.seen[-1].constraint is None


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("nonsense", ("nope", "", [])),
        (f"{THOUGHT}yes", ("yes", "hm, \u00e9", [])),
        (f"{THOUGHT}{WRONG}", ("", "hm, \u00e9", [("get", '{"on": false}')])),
        (f"{RIGHT}\n{RIGHT}", ("", "", [("get", '{"on": true}')] * 2)),
        (f"yes {RIGHT}", ("yes", "", [])),
    ],
)
async def test_under_a_constraint_the_output_is_the_answer_or_calls(script, expected):
    """So an agent can have an answer of a schema after calls of its tools."""
    async with serving(qwen(script, PROMPT)) as rig:
        (output,) = await both(rig, chat=strict(), constraint={"choice": {"choices": ["yes", "nope"]}})
        assert said(output) == expected


async def test_a_call_that_must_be_made_obeys_every_keyword_of_a_strict_tool():
    """A tool that is not strict follows the keywords that a grammar can express; a strict one is refused."""
    odd = json.dumps({"type": "object", "properties": {"a": {"enum": [1, 2], "not": {"const": 1}}}})
    loose = types_pb2.ToolDefinition(name="get", parameters_json=odd)
    tool = types_pb2.ToolDefinition(name="get", parameters_json=odd, strict=True)
    async with serving(qwen(CALLS, "T:get|u:hi|a:")) as rig:
        (output,) = await both(
            rig, chat=chat(tools=[loose], tool_choice="required", parallel_tool_calls=False)
        )
        assert len(output.tool_calls) == 1
        for choice, more in (("auto", {}), ("required", {}), ("get", {}), ("auto", CONSTRAINED)):
            asked = generate(chat=chat(tools=[tool], tool_choice=choice), **more)
            failure = await failure_of(rig.inference.Generate(asked))
            assert failure.code.name == "INVALID_ARGUMENT"
            assert list(failure.violations) == ["chat.tools[0].parameters_json"]
            assert "not supported here: " in failure.violations["chat.tools[0].parameters_json"]


async def test_schemas_are_bounded_as_grammars_are():
    """Also beside a constraint, whose own size is counted apart."""
    schema = json.dumps({"type": "object", "properties": {"a": {"enum": ["x" * 270_000]}}})
    tools = [*TOOLS, types_pb2.ToolDefinition(name="big", parameters_json=schema, strict=True)]
    async with serving(qwen("", PROMPT)) as rig:
        for more in ({}, CONSTRAINED):
            failure = await failure_of(rig.inference.Generate(generate(chat=strict(tools=tools), **more)))
            assert list(failure.violations) == ["chat.tools[2].parameters_json"]
            assert "at most 262144 bytes" in failure.violations["chat.tools[2].parameters_json"]


async def test_a_server_without_grammars_refuses_strict_tools_by_name():
    async with serving(qwen("", PROMPT), features=Features(constraints=False)) as rig:
        failure = await failure_of(rig.inference.Generate(generate(chat=strict())))
    assert (failure.code.name, failure.reason) == ("UNIMPLEMENTED", "UNSUPPORTED_FEATURE")
    assert "chat.tools[1].strict" in failure.message
    assert "--no-constraints" in failure.message


async def test_a_model_whose_calls_nobody_knows_has_no_strict_tools():
    async with serving(fake(codec=byte_codec("{{ tools }}a:"), max_model_len=2000)) as rig:
        failure = await failure_of(rig.inference.Generate(generate(chat=strict())))
    assert list(failure.violations) == ["chat.tools[1].strict"]
    assert "--tool-call-parser" in failure.violations["chat.tools[1].strict"]


async def test_an_answer_that_looks_like_a_call_excludes_strict_tools():
    """Calls of Llama's form begin as any JSON does, and no marker tells them from an answer."""
    async with serving(fake(codec=byte_codec(LLAMA3), max_model_len=2000)) as rig:
        failure = await failure_of(
            rig.inference.Generate(generate(chat=strict(), constraint={"json_object": {}}))
        )
    assert list(failure.violations) == ["constraint"]
    assert "llama3_json" in failure.violations["constraint"]
