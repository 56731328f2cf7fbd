"""Keywords of JSON Schema that ask for nothing. jsonschema, an independent validator, is the witness that
they do: it accepts every value with them and without them alike.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator

from penstock.runtime.requests.grammar import Grammar
from penstock.runtime.schemas.json_schema import read_schema
from penstock.runtime.schemas.narrowing import GrammarError
from penstock.runtime.schemas.neutral import without_neutral

NEUTRAL = [
    {"uniqueItems": False},
    {"minLength": 0},
    {"minItems": 0},
    {"minItems": 0.0},
    {"minProperties": 0},
    {"minContains": 0},
    {"maxContains": 1},
    {"contains": {"type": "null"}, "minContains": 0},
    {"propertyNames": {"type": "string"}},
    {"propertyNames": {"type": ["string", "null"], "minLength": 0, "minItems": 0}},
    {"propertyNames": True},
    {"propertyNames": {}},
    {"unevaluatedProperties": True},
    {"unevaluatedProperties": {}},
    {"unevaluatedItems": True},
    {"unevaluatedItems": {"title": "any"}},
    {"items": {}, "unevaluatedItems": False},
    {"additionalProperties": True, "unevaluatedProperties": False},
    {"dependentRequired": {}},
    {"dependentRequired": {"a": []}},
    {"dependentSchemas": {}},
    {"dependentSchemas": {"a": True, "b": {}}},
    {"dependencies": {"a": [], "b": {}}},
    {"patternProperties": {}},
    {"patternProperties": {"(?=a)": {}, "b": True}},
    {"not": False},
    {"not": {"not": {}}},
    {"if": {"type": "string"}},
    {"then": False},
    {"else": False},
    {"if": {"type": "string"}, "then": True, "else": {}},
    {"additionalItems": True},
    {"items": True},
    {"prefixItems": []},
    {"properties": {}},
    {"required": []},
    {"additionalProperties": {}},
    {"$comment": "x"},
    {"title": "x", "description": "y"},
    {"examples": [1, "(?=a)"], "default": 7},
    {"deprecated": True, "readOnly": True, "writeOnly": False},
    {"contentMediaType": "application/json", "contentEncoding": "base64"},
    {"contentMediaType": "application/json", "contentSchema": {"not": {}, "minProperties": 2}},
    {"$anchor": "a"},
    {"$dynamicAnchor": "a"},
    {"$recursiveAnchor": True},
    {"$id": "https://example.com/a"},
    {"$vocabulary": {}},
    {"$defs": {"a": {"not": {}, "minProperties": 2, "const": 2**60}}},
    {"definitions": {"a": {"pattern": "(?=a)", "multipleOf": 0.123456789}}},
    # What follows is about values of other types than the one that the schema admits.
    {"type": "string", "uniqueItems": True, "contains": {}, "propertyNames": False},
    {"type": "array", "format": "regex", "unevaluatedProperties": False, "dependentRequired": {"a": ["b"]}},
    {"type": ["integer", "null"], "unevaluatedItems": False, "dependentSchemas": {"a": False}},
    {"type": "array", "maxItems": 1, "uniqueItems": True},
    {"type": "object", "required": ["b"], "dependentRequired": {"a": ["b"]}},
]  # fmt: skip
ASSERTIONS = {"type", "maxItems", "required"}
"""The only keywords in NEUTRAL that ask for something."""
VALUES = [
    None, True, 0, -1.5, "", "a", [], [None], [1, 1], {}, {"a": 1}, {"b": "x", "a": []}, [[{"": {}}], "b"],
]  # fmt: skip


@pytest.mark.parametrize("schema", NEUTRAL, ids=json.dumps)
def test_they_ask_for_nothing_indeed(schema):
    rest = {key: value for key, value in schema.items() if key in ASSERTIONS}
    for draft in (Draft202012Validator, *([] if "minContains" in schema else [Draft7Validator])):
        for value in VALUES:
            assert draft(schema).is_valid(value) == draft(rest).is_valid(value)


@pytest.mark.parametrize("schema", NEUTRAL, ids=json.dumps)
def test_they_are_honoured_by_doing_nothing(schema, compiler):
    """They may stand anywhere in a schema."""
    for whole in (
        schema,
        {"type": "object", "properties": {"a": schema}, "required": ["a"]},
        {"type": "array", "items": {"anyOf": [schema, {"type": "null"}]}},
        {"$ref": "#/$defs/one", "$defs": {"one": {"allOf": [schema]}}},
    ):
        if whole is schema or not {"$defs", "definitions"} & schema.keys():
            compiler.compile(Grammar.json_schema(json.dumps(whole)))


KEYWORDS = {
    "type": st.sampled_from(["string", "array", "object", "integer", ["array", "object"]]),
    "uniqueItems": st.booleans(),
    "minContains": st.integers(0, 2),
    "maxContains": st.integers(0, 2),
    "maxItems": st.integers(0, 2),
    "required": st.lists(st.sampled_from("ab"), unique=True),
    "dependentRequired": st.dictionaries(
        st.sampled_from("ab"), st.lists(st.sampled_from("abc"), unique=True)
    ),
    "minLength": st.integers(0, 1),
}


def schemas(inner):
    branches = dict.fromkeys(
        ("contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems", "not", "if", "then",
         "else", "additionalProperties", "items"),
        inner,
    )  # fmt: skip
    maps = dict.fromkeys(
        ("properties", "patternProperties", "dependentSchemas"), st.dictionaries(st.sampled_from("ab"), inner)
    )
    return st.fixed_dictionaries({}, optional={**KEYWORDS, **branches, **maps})


SCHEMAS = st.recursive(st.booleans() | st.just({}) | schemas(st.booleans()), schemas, max_leaves=6)
DOCUMENTS = st.recursive(
    st.none() | st.integers(0, 1) | st.sampled_from(["", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=5,
)


@pytest.mark.parametrize("draft", [Draft202012Validator, Draft7Validator])
@given(schema=SCHEMAS.filter(lambda one: isinstance(one, dict)), value=DOCUMENTS)
def test_leaving_them_out_changes_no_verdict(draft, schema, value):
    less = without_neutral(schema, counts_contained=draft is Draft202012Validator)
    assert draft(less).is_valid(value) == draft(schema).is_valid(value)


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        ({"contains": {}, "minContains": 0, "maxContains": 2}, {"contains", "minContains", "maxContains"}),
        ({"uniqueItems": True, "maxItems": 2}, {"uniqueItems", "maxItems"}),
        ({"propertyNames": {"pattern": "^a"}}, {"propertyNames"}),
        ({"unevaluatedProperties": False}, {"unevaluatedProperties"}),
        ({"dependentRequired": {"a": ["b"]}}, {"dependentRequired"}),
        ({"patternProperties": {"^a": {}}, "additionalProperties": False},
         {"patternProperties", "additionalProperties"}),
        ({"if": {}, "then": {"minLength": 1}, "else": {}}, {"if", "then", "else"}),
        ({"not": {"type": "null"}}, {"not"}),
    ],
)  # fmt: skip
def test_what_asks_for_something_stays(schema, kept):
    assert without_neutral(schema).keys() == kept


def test_draft_7_knows_no_min_contains():
    """There, "contains" asks for an item whatever stands beside it."""
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "contains": {}, "minContains": 0}
    assert not Draft7Validator(schema).is_valid([])
    assert read_schema(json.dumps(schema)).keys() >= {"contains"}


def test_counts_may_be_written_as_decimals():
    """JSON Schema's integers are all numbers without a fraction."""
    schema = read_schema('{"minLength": 1.0, "maxItems": 2e0, "minProperties": 1.0, "maxLength": 1.5}')
    assert (schema["minLength"], schema["maxItems"], schema["minProperties"]) == (1, 2, 1)
    assert all(type(schema[key]) is int for key in ("minLength", "maxItems", "minProperties"))
    with pytest.raises(GrammarError, match="minProperties"):
        read_schema('{"minProperties": 2.0}')


@pytest.mark.parametrize("format", ["regex", "int32", "json-pointer", "idn-email", ""])
def test_a_format_that_is_not_known_is_a_remark_if_asked(format, compiler):
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": format}}}
    asked = schema | {"x-guidance": {"ignore_unknown_formats": True}}
    compiler.compile(Grammar.json_schema(json.dumps(asked)))
    read = read_schema(json.dumps(asked))
    assert read["properties"] == {"format": {"type": "string"}}
    assert read["x-guidance"] == read_schema("{}")["x-guidance"]
    assert read_schema(json.dumps(schema))["properties"] == schema["properties"]


def test_a_format_that_is_known_is_none():
    asked = {"format": "date", "x-guidance": {"ignore_unknown_formats": True}}
    assert read_schema(json.dumps(asked))["format"] == "date"
