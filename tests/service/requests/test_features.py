"""What an operator has switched off is refused by name, with the flag that is responsible, and is not listed
as a feature.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.service.requests.generate import Features
from penstock.v1 import control_pb2, types_pb2
from tests.service.codecs import byte_codec
from tests.service.rig import Failure, Rig, failure_of, fake, generate, serving, stream

USER = types_pb2.ChatMessage(role="user", content="hi")
CHAT: dict[str, Any] = {"messages": [USER]}
CALL = {**CHAT, "tools": [types_pb2.ToolDefinition(name="f")], "tool_choice": "required"}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": "{}"},
    "json_object": {"json_object": {}},
    "regex": {"regex": "a"},
    "ebnf": {"ebnf": 'start: "a"'},
    "choice": {"choice": {"choices": ["a"]}},
}


async def refusals(rig: Rig, **fields: Any) -> list[Failure]:
    """Return the refusals of Generate and Stream."""
    prompt = None if "chat" in fields else "a"
    return [
        await failure_of(rig.inference.Generate(generate(prompt, **fields))),
        await failure_of(rig.inference.Stream(stream(prompt, **fields)).read()),
    ]


def check(failure: Failure, field: str, flag: str) -> None:
    assert (failure.code.name, failure.reason) == ("UNIMPLEMENTED", "UNSUPPORTED_FEATURE")
    assert failure.info.metadata["field"] == field
    assert flag in failure.message


@pytest.mark.parametrize("kind", CONSTRAINTS)
async def test_no_constraints(kind: str) -> None:
    async with serving(fake(), features=Features(constraints=False)) as rig:
        for failure in await refusals(rig, constraint=CONSTRAINTS[kind]):
            check(failure, f"constraint.{kind}", "--no-constraints")
        assert not rig.engine.seen


async def test_without_constraints_no_call_can_be_required() -> None:
    async with serving(fake(), features=Features(constraints=False)) as rig:
        for choice in ("required", "f"):
            for failure in await refusals(rig, chat={**CALL, "tool_choice": choice}):
                check(failure, "chat.tool_choice", "--no-constraints")
        reply = await rig.inference.Generate(generate(chat={**CALL, "tool_choice": "auto"}))
        assert len(reply.outputs) == 1


async def test_what_is_off_is_no_feature_of_the_model() -> None:
    grammars = {control_pb2.FEATURE_JSON_SCHEMA, control_pb2.FEATURE_REGEX}
    for features, listed in ((Features(), grammars), (Features(constraints=False), set())):
        async with serving(fake(), features=features) as rig:
            info = await rig.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert grammars & set(info.features) == listed


async def test_callers_templates_are_refused_unless_they_are_allowed() -> None:
    own = {**CHAT, "chat_template": "{{ 1 }}"}
    async with serving(fake()) as rig:
        failures = await refusals(rig, chat=own)
        asked = control_pb2.TokenizeRequest(chat=types_pb2.ChatPrompt(**own))
        failures.append(await failure_of(rig.control.Tokenize(asked)))
        for failure in failures:
            check(failure, "chat.chat_template", "--allow-request-templates")
        assert not rig.engine.seen


async def test_a_template_of_the_models_own_may_be_named() -> None:
    """It is the operator's template, and only its name comes with the request."""
    codec = byte_codec(chat_template={"default": "d", "other": "o"})  # type: ignore[arg-type]
    async with serving(fake(codec=codec)) as rig:
        await rig.inference.Generate(generate(chat={**CHAT, "chat_template": "other"}))
        assert bytes(rig.engine.seen[0].prompt_token_ids) == b"o"
        for failure in await refusals(rig, chat={**CHAT, "chat_template": "others"}):
            check(failure, "chat.chat_template", "--allow-request-templates")
