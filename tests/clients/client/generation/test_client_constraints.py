"""Constraints and their fields in the contract."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any, cast

import pytest
from google.protobuf import text_format

from penstock.client import Choice, Ebnf, InvalidRequest, JsonObject, JsonSchema, Regex, RequestOptions
from penstock.client.generation.requests import fill_request
from penstock.v1 import inference_pb2, types_pb2


def constraint_of(value):
    request = fill_request(inference_pb2.GenerateRequest(), "p", cast(RequestOptions, {"constraint": value}))
    return request.constraint


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (JsonSchema("{ }"), 'json_schema: "{ }"'),
        (JsonSchema({}), 'json_schema: "{}"'),
        (JsonObject(), "json_object {}"),
        (Regex("a+"), 'regex: "a+"'),
        (Ebnf("start: /a/"), 'ebnf: "start: /a/"'),
        (Choice(["yes", "no"]), 'choice { choices: "yes" choices: "no" }'),
        (Choice([]), "choice {}"),
    ],
)
def test_each_kind(value, text):
    assert constraint_of(value) == text_format.Parse(text, types_pb2.Constraint())


def test_every_kind_of_the_contract_has_a_value():
    kinds = {field.name for field in types_pb2.Constraint.DESCRIPTOR.oneofs_by_name["kind"].fields}
    values = (JsonSchema({}), JsonObject(), Regex(""), Ebnf(""), Choice(()))
    assert {constraint_of(value).WhichOneof("kind") for value in values} == kinds


def test_a_schema_is_sent_with_its_keys_in_order_and_its_letters_as_they_are():
    """The order matters, because properties are generated in it."""
    schema: dict[str, Any] = {"type": "object", "properties": {"z": {"const": "é"}, "a": {"type": "null"}}}
    sent = constraint_of(JsonSchema(MappingProxyType(schema))).json_schema
    assert sent == '{"type": "object", "properties": {"z": {"const": "é"}, "a": {"type": "null"}}}'
    assert json.loads(sent) == schema


def _nested() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("value", "field", "complaint"),
    [
        (JsonSchema({"minimum": float("nan")}), "constraint.json_schema", "not JSON compliant"),
        (JsonSchema(_nested()), "constraint.json_schema", "nested too deeply"),
        (JsonSchema("\ud800"), "constraint.json_schema", "surrogates"),
        (Regex("\ud800"), "constraint.regex", "surrogates"),
        (Ebnf("\ud800"), "constraint.ebnf", "surrogates"),
        (Choice(["a", "\ud800"]), "constraint.choice.choices", "surrogates"),
    ],
)
def test_what_json_or_the_wire_lacks(value, field, complaint):
    with pytest.raises(InvalidRequest, match=complaint) as caught:
        constraint_of(value)
    assert [v.field for v in caught.value.violations] == [field]


def test_one_string_is_no_choice():
    with pytest.raises(TypeError, match="give a sequence of strings"):
        Choice("yes")


def test_values_can_be_compared_and_kept():
    assert Choice(["a", "b"]) == Choice(("a", "b"))
    assert {Regex("a"), Regex("a"), JsonObject(), JsonObject()} == {Regex("a"), JsonObject()}
