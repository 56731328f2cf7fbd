"""Grammars of required calls in Gemma 4's form: what of a schema they obey, and what they refuse."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from penstock.runtime.chat.enforce.forced_calls import call_grammar
from penstock.runtime.chat.messages import Chat, Tool
from penstock.runtime.chat.parser import ChatForms
from penstock.runtime.chat.tool_formats.gemma4 import MARKERS
from penstock.runtime.chat.tool_formats.tools import TOOL_FORMS
from penstock.runtime.errors import InvalidRequest
from tests.runtime.chat.enforce.test_forced_calls import USER, Model, grammar_of, model_of, parsed
from tests.support.chat import bytes_tokenizer, spelled

FORM = ChatForms(TOOL_FORMS["gemma4"])
MEMBERS = ["a b", 1, None, [True], {"k": 2}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "Text": {"type": "string", "minLength": 1, "maxLength": 3},
        "at": {"$ref": "#/$defs/point"},
        "list": {"type": "array", "items": {"enum": MEMBERS}, "minItems": 1, "maxItems": 2},
        "number": {"type": ["number", "null"], "minimum": 0},
        "tree": {"$ref": "#/$defs/tree"},
        "z": {},
    },
    "required": ["Text"],
    "$defs": {
        "point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        "tree": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/tree"}}]},
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=["plain", "marked"])
def model(request: pytest.FixtureRequest) -> Model:
    return model_of(bytes_tokenizer(special=MARKERS if request.param == "marked" else []))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ({"Text": "a"}, True),
        ({"Text": '"\n{'}, True),
        ({"Text": ""}, False),
        ({"Text": "abcd"}, False),
        ({}, False),
        ({"at": {"x": 5}, "Text": "a"}, True),
        ({"at": {}, "Text": "a"}, False),
        ({"Text": "a", "list": ["a b", 1]}, True),
        ({"Text": "a", "list": [[True], {"k": 2}]}, True),
        ({"Text": "a", "list": []}, False),
        ({"Text": "a", "list": [1, 1, 1]}, False),
        ({"Text": "a", "list": [2]}, False),
        ({"Text": "a", "number": 0.5}, True),
        ({"Text": "a", "number": None}, True),
        ({"Text": "a", "number": -1}, False),
        ({"Text": "a", "number": "1"}, False),
        ({"Text": "a", "tree": [None, [[], [None]]]}, True),
        ({"Text": "a", "tree": [1]}, False),
        ({"Text": "a", "z": {"any": ["thing", {"b": True}]}}, True),
        ({"Text": "a", "zz": 1}, False),
    ],
)
def test_what_the_grammar_allows(
    model: Model, strict: bool, arguments: dict[str, Any], allowed: bool
) -> None:
    """What it allows, the parser reads as values that the schema accepts."""
    chat = Chat(USER, (Tool("f", "", SCHEMA, strict=strict),), "required")
    ordered = {key: arguments[key] for key in sorted(arguments, key=str.lower)}  # as the template does
    text = spelled("gemma4", [("f", ordered)])
    assert model.allows(grammar_of(model, FORM, chat), text) is allowed, text
    (call,) = parsed(FORM, chat, "", text)[2]
    if allowed:
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
        assert json.loads(call.arguments) == arguments
    if len(arguments) > 1:
        other_way = spelled("gemma4", [("f", dict(reversed(ordered.items())))])
        assert not model.allows(grammar_of(model, FORM, chat), other_way)


def test_several_calls_or_one(model: Model) -> None:
    two = spelled("gemma4", [("f", {}), ("f", {})])
    for choice, allowed in (("required", True), ("f", False)):
        assert model.allows(grammar_of(model, FORM, Chat(USER, (Tool("f"),), choice)), two) is allowed


def test_refusals() -> None:
    def refused(schema: dict[str, Any]) -> str:
        with pytest.raises(InvalidRequest) as caught:
            call_grammar(FORM, Chat(USER, (Tool("f", "", schema, strict=True),), "required"), "", {})
        (violation,) = caught.value.violations
        assert violation.field == "chat.tools[0].parameters_json"
        return violation.description

    for key, schema in (
        ("pattern", {"type": "string", "pattern": "^x$"}),
        ("uniqueItems", {"type": "array", "uniqueItems": True}),
        ("maxProperties", {"type": "object", "maxProperties": 1}),
        ("minItems", {"minItems": 1}),
        ("type", {"anyOf": [{"type": "string"}], "type": "string"}),
        ("maxLength", {"type": "string", "maxLength": 9999}),
    ):
        assert refused({"properties": {"a": schema}}) == f"{key!r} cannot be enforced in a call of Gemma 4"
    assert refused({"anyOf": [{}]}) == "'anyOf' cannot be enforced in a call of Gemma 4"
