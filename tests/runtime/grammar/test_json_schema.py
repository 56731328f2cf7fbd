"""JSON Schemas that are refused, and schemas that are narrowed because llguidance would not follow them
exactly.
"""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.runtime.errors import InvalidRequest
from penstock.runtime.requests.grammar import Grammar
from penstock.runtime.schemas.json_schema import read_schema
from penstock.runtime.schemas.narrowing import GrammarError
from tests.runtime.grammar.test_languages import accepts
from tests.support.schemas import violations


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ('{"not": {}}', 'JSON Schema keywords that are not supported here: "not"'),
        (
            '{"type": "array", "uniqueItems": true}',
            'JSON Schema keywords that are not supported here: "uniqueItems"',
        ),
        (
            '{"properties": {"a": {"if": {"minLength": 1}, "else": false}}}',
            'JSON Schema keywords that are not supported here: "else", "if"',
        ),
        ('{"type": "string", "format": "regex"}', "Unknown format: regex"),
        ('{"type": "strin"}', "Invalid type: strin"),
        ('{"$ref": "#/$defs/nowhere"}', "does not exist"),
        ('{"$ref": "file:///etc/passwd"}', "does not fetch"),
        ('{"$ref": "http://localhost/x"}', "does not fetch"),
        ('{"oneOf": [{"minimum": 3}, {"maximum": 5}]}', "oneOf"),
        ('{"pattern": "a(?=b)"}', "look-around"),
        ('{"pattern": "("}', "unclosed group"),
        ('{"type": "integer", "minimum": 5, "maximum": 3}', "minimum (5) is greater than maximum (3)"),
        ('{"enum": []}', "Unsatisfiable schema"),
        ('{"minLength": -1}', "Expected positive integer"),
    ],
)
def test_refused_with_the_message_of_llguidance(schema, part, compiler):
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(Grammar.json_schema(schema))
    (violation,) = caught.value.violations
    assert violation.field == "constraint.json_schema"
    assert part in violation.description


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ("{", "not JSON"),
        ("NaN", "not JSON"),
        ('{"minimum": Infinity}', "not JSON"),
        ("[]", "an object or true"),
        ("false", "an object or true"),
        ('{"type": "null", "type": "string"}', "'type' twice"),
        ('{"properties": {"a": {}, "a": {}}}', "'a' twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"$schema": "http://json-schema.org/draft-03/schema#"}', "$schema must be one of"),
        ('{"$schema": 7}', "$schema must be one of"),
        ('{"x-guidance": []}', "must be an object"),
        ('{"x-guidance": {"lenient": true}}', "'lenient' is not one of"),
        ('{"x-guidance": {"whitespace_pattern": ".*"}}', "'whitespace_pattern' is not one of"),
        ('{"x-guidance": {"coerce_one_of": 1}}', "must be true or false"),
        ('{"const": 9007199254740993}', "is not exact"),
        ('{"enum": [[{"a": -9223372036854775808}]]}', "is not exact"),
        ('{"const": 0.1234567890123456}', "is not exact"),
        ('{"const": 1e400}', "is not exact"),
        ('{"const": 1e16}', "is not exact"),
        ('{"const": 1e99999999999999999999}', "exponent"),
        ('{"minimum": 1e300}', "minimum: 1e+300 is too large"),
        ('{"exclusiveMaximum": -1e17}', "too large"),
        ('{"maximum": 1e-300}', "too close to 0"),
        ('{"multipleOf": 0}', "above 0"),
        ('{"multipleOf": 4294967295}', "at most 8 digits"),
        ('{"multipleOf": 1e-9, "maximum": 1.5e-40}', "too close to 0"),
        ('{"minProperties": 2}', "minProperties"),
        ('{"minProperties": 4, "required": ["a", "b", "b"]}', "minProperties"),
    ],
)
def test_refused_before_llguidance_sees_it(schema, part):
    with pytest.raises(GrammarError, match=r".*") as caught:
        read_schema(schema)
    assert part in str(caught.value)


def test_options_of_the_server():
    whitespace = read_schema("{}")["x-guidance"]
    assert whitespace["lenient"] is False
    assert whitespace["coerce_one_of"] is False
    assert "whitespace_pattern" in whitespace
    compact = read_schema('{"x-guidance": {"whitespace_flexible": false, "coerce_one_of": true}}')
    assert compact == {"x-guidance": {"lenient": False, "coerce_one_of": True, "whitespace_flexible": False}}
    assert read_schema("true") == read_schema("{}")


def test_bounds_are_rounded_inwards():
    schema = read_schema(
        '{"minimum": 0.1234567890123456, "maximum": 0.30000000000000004, '
        '"exclusiveMinimum": -9223372036854775808, "exclusiveMaximum": 1e300}'
    )
    assert schema["minimum"] == 0.123456789012346
    assert schema["maximum"] == 0.3
    assert schema["exclusiveMinimum"] == -(2**53)
    assert schema["exclusiveMaximum"] == 2**53
    assert read_schema('{"minimum": 3.0, "maximum": 5, "exclusiveMinimum": true}') == {
        **read_schema("{}"), "minimum": 3, "maximum": 5, "exclusiveMinimum": True
    }  # fmt: skip


def test_seconds_of_formats_end_at_59():
    schema = read_schema(
        json.dumps({
            "properties": {"format": {"format": "time"}, "const": {"format": "date-time", "allOf": [{}]}},
            "items": [{"anyOf": [{"format": "time"}]}],
            "const": {"format": "time"},
            "default": {"format": "time"},
            "$defs": {"enum": {"format": "date"}},
            "anyOf": [{"$ref": "#/$defs/enum"}],
        })
    )  # fmt: skip
    short = {"pattern": "^[^:]*:[^:]*:[0-5]"}
    assert schema["properties"]["format"] == {"format": "time", "allOf": [short]}
    assert schema["properties"]["const"] == {"format": "date-time", "allOf": [{}, short]}
    assert schema["items"] == [{"anyOf": [{"format": "time", "allOf": [short]}]}]
    assert schema["const"] == {"format": "time"}
    assert schema["$defs"] == {"enum": {"format": "date"}}


@pytest.mark.parametrize(
    ("schema", "bound", "inside"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "0", "0.001"),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 2e-22}, "0", "0.00000000000000000000015"),
        ({"exclusiveMinimum": 3, "exclusiveMaximum": 3.5}, "3", "3.0001"),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, "-0", "-0.001"),
        ({"exclusiveMaximum": -3, "exclusiveMinimum": -3.5}, "-3", "-3.0001"),
        ({"minimum": 0, "exclusiveMinimum": 0, "maximum": 0.75, "multipleOf": 0.25}, "0", "0.25"),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, "0", "0.001"),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, "0", "0.001"),
        ({"exclusiveMinimum": 0, "$ref": "#/$defs/a", "$defs": {"a": {"maximum": 0.5}}}, "0", "0.001"),
        (
            {"exclusiveMinimum": 99999999999999, "maximum": 99999999999999.5},
            "99999999999999",
            "99999999999999.5",
        ),
    ],
)
def test_an_exclusive_bound_is_excluded_however_near_the_other_one_is(
    compiler, backend, schema, bound, inside
):
    grammar = Grammar.json_schema(json.dumps({"type": "number", **schema}))
    assert not accepts(compiler, backend, grammar, bound)
    assert accepts(compiler, backend, grammar, inside)


def test_an_exclusive_bound_far_from_others_stays_as_it_is():
    schema = read_schema('{"exclusiveMinimum": 0, "maximum": 1, "anyOf": [{"minimum": 2.5}]}')
    assert schema["exclusiveMinimum"] == 0
    schema = read_schema('{"minimum": 3, "exclusiveMaximum": 3, "maximum": 3.5, "exclusiveMinimum": -3}')
    assert (schema["minimum"], schema["exclusiveMaximum"], schema["exclusiveMinimum"]) == (3, 3, -3)


FLOATS = (
    st.integers(-(10**15) + 1, 10**15 - 1)
    .flatmap(lambda digits: st.integers(-22, 1).map(lambda exponent: float(f"{digits}e{exponent}")))
    .filter(lambda value: abs(value) <= 2**53)
)
CONSTANTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | FLOATS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(value=CONSTANTS)
def test_constants_are_written_exactly(compiler, vocabulary, writer, value):
    """Every reader of JSON takes the text for the same double."""
    walk = writer.write(compiler.constraint(Grammar.json_schema(json.dumps({"const": value}))), 0)
    assert walk.complete
    spoken = [i for i in walk.token_ids if i not in vocabulary.eos_token_ids]
    assert json.loads(b"".join(vocabulary.tokens[i] for i in spoken)) == value


NUMBERS = st.integers(-(2**70), 2**70) | st.integers(-30, 30) | st.floats(-100, 100) | st.floats(-1e20, 1e20)
NUMERIC = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number"])},
    optional={
        **dict.fromkeys(("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"), NUMBERS),
        "multipleOf": st.sampled_from([1, 2, 3, 7, 10, 100, 0.5, 0.1, 0.01, 2.5, 1e-3]),
    },
)

QUARTERS = st.integers(-16, 16).map(lambda quarters: quarters / 4)
CLOSE = st.fixed_dictionaries(
    {"type": st.just("number")},
    optional=dict.fromkeys(("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"), QUARTERS),
)


@settings(max_examples=60, deadline=None)
@given(schema=NUMERIC | CLOSE, seed=st.integers(0, 2**32))
@example(schema={"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, seed=0)
def test_numbers_keep_to_their_bounds(compiler, vocabulary, writer, schema, seed):
    try:
        constraint = compiler.constraint(Grammar.json_schema(json.dumps(schema)))
    except InvalidRequest:
        return
    walk = writer.write(constraint, seed, max_tokens=60, calm=5)
    if walk.complete:
        spoken = [i for i in walk.token_ids if i not in vocabulary.eos_token_ids]
        text = b"".join(vocabulary.tokens[i] for i in spoken).decode()
        assert violations(schema, text) == [], text
