"""Grammars of required calls in XML: what of a schema they obey, and what they refuse."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from penstock.runtime.chat.enforce.forced_calls import call_grammar
from penstock.runtime.chat.messages import Chat, Tool
from penstock.runtime.chat.parser import ChatForms
from penstock.runtime.chat.tool_formats.tools import TOOL_FORMS
from penstock.runtime.errors import InvalidRequest
from tests.runtime.chat.enforce.test_forced_calls import USER, Model, grammar_of, model_of, parsed
from tests.support.chat import UNTYPED, bytes_tokenizer, spelled

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "minLength": 1, "maxLength": 5},
        "choice": {"enum": ["red", "deep blue"]},
        "mixed": {"enum": ["a", 1, None]},
        "count": {"type": "integer", "minimum": 3},
        "optional": {"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}], "default": None},
        "anything": {},
    },
    "required": ["text"],
    "$defs": {"color": {"type": "string", "enum": ["red", "blue"]}},
}


@pytest.fixture(scope="module", params=["plain", "marked"])
def model(request: pytest.FixtureRequest) -> Model:
    marks = sorted({mark for form in UNTYPED for mark in TOOL_FORMS[form].markers})
    return model_of(bytes_tokenizer(ordinary=marks if request.param == "marked" else []))


@pytest.mark.parametrize("form", UNTYPED)
@pytest.mark.parametrize("strict", [pytest.param(False, marks=pytest.mark.ci), True])
@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ({"text": "a"}, True),
        ({"text": "\n<b>é"}, True),
        ({"text": "a</b>"}, True),
        ({"text": ""}, False),
        ({"text": "abcdef"}, False),
        ({}, False),
        ({"text": "a", "choice": "deep blue"}, True),
        ({"text": "a", "choice": "deep"}, False),
        ({"text": "a", "mixed": "a"}, True),
        ({"text": "a", "mixed": 1}, True),
        ({"text": "a", "mixed": None}, True),
        ({"text": "a", "mixed": 2}, False),
        ({"text": "a", "count": 3}, True),
        ({"text": "a", "count": 2}, False),
        ({"text": "a", "count": "many"}, False),
        ({"text": "a", "optional": "blue"}, True),
        ({"text": "a", "optional": None}, True),
        ({"text": "a", "optional": "green"}, False),
        ({"text": "a", "anything": "[1]\n\n{"}, True),
        ({"text": "a", "choice": "red", "count": 4, "anything": ""}, True),
        ({"count": 4, "text": "a"}, False),  # not in the schema's order
        ({"text": "a", "more": "x"}, False),
    ],
)
def test_what_the_grammar_allows(
    model: Model, form: str, strict: bool, arguments: dict[str, Any], allowed: bool
) -> None:
    """What it allows, the parser reads as values that the schema accepts."""
    tools = (Tool("f", "", SCHEMA, strict=strict),)
    forms = ChatForms(TOOL_FORMS[form])
    chat = Chat(USER, tools, "required")
    text = spelled(form, [("f", arguments)])
    assert model.allows(grammar_of(model, forms, chat), text) is allowed, text
    (call,) = parsed(forms, chat, "", text)[2]
    if allowed:
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
        assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize("form", UNTYPED)
def test_several_calls_or_one(model: Model, form: str) -> None:
    forms, tool = ChatForms(TOOL_FORMS[form]), Tool("f")
    two = spelled(form, [("f", {}), ("f", {})])
    for chat, allowed in (
        (Chat(USER, (tool,), "required"), True),
        (Chat(USER, (tool,), "required", parallel_tool_calls=False), False),
        (Chat(USER, (tool,), "f"), False),
    ):
        assert model.allows(grammar_of(model, forms, chat), two) is allowed


def refused(form: str, schema: dict[str, Any], name: str = "f") -> list[tuple[str, str]]:
    with pytest.raises(InvalidRequest) as caught:
        call_grammar(
            ChatForms(TOOL_FORMS[form]),
            Chat(USER, (Tool(name, "", schema, strict=True),), "required"),
            "",
            {},
        )
    return [(v.field.removeprefix("chat.tools[0]."), v.description) for v in caught.value.violations]


@pytest.mark.parametrize("form", UNTYPED)
def test_refusals(form: str) -> None:
    def one(schema: dict[str, Any]) -> str:
        ((field, told),) = refused(form, {"properties": {"a": schema}})
        assert field == "parameters_json"
        return told

    assert one({"type": "string", "pattern": "^x$"}) == "'pattern' of 'a' cannot be enforced in a call in XML"
    assert (
        one({"type": "string", "maxLength": 9999}) == "'maxLength' of 'a' cannot be enforced in a call in XML"
    )
    assert one({"type": ["string", "array"]}).startswith("'a' may be a string or of another type")
    assert one({"anyOf": [{"type": "string"}, {"type": "array"}]}).startswith("'anyOf' of 'a' cannot")
    assert one({"type": "strin"}) == "'type' of 'a' cannot be enforced in a call in XML"
    assert refused(form, {"anyOf": []}) == [
        ("parameters_json", "'anyOf' cannot be enforced in a call in XML")
    ]
    assert refused(form, {}, "<f>") == [("name", "'<f>' cannot be written as a call in XML")]
    assert refused(form, {"properties": {"<": {}}}) == [
        ("parameters_json", "'<' cannot be a keyword of a call in XML")
    ]
