"""`parse_object` reads JSON objects of callers, and checks their bounds before it parses them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.chat import json_object
from penstock.runtime.chat.json_object import MAX_JSON_CHARS, MAX_JSON_DEPTH, MAX_JSON_VALUES, parse_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=5), below, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=5))
def test_what_is_within_bounds_is_read(value):
    text = json.dumps(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_object, "MAX_JSON_VALUES", text.count(",") + text.count("{") + text.count("["))
        assert parse_object(text) == value


def test_brackets_and_commas_in_strings_are_text():
    for text in ("[" * 500_000, "," * 500_000, "{[" * 1000 + '\\"' + "," * 60_000, '\\\\"'[:-1] + "[" * 200):
        value = {"a": text, "b": ['"', "\\"]}
        assert parse_object(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a": "' + "x" * (MAX_JSON_CHARS - 9) + '"}', True),
        ('{"a": "' + "x" * (MAX_JSON_CHARS - 8) + '"}', False),
        ('{"a": ' + "[" * (MAX_JSON_DEPTH - 1) + "]" * (MAX_JSON_DEPTH - 1) + "}", True),
        ('{"a": ' + "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH + "}", False),
        ('{"a": ' + '{"a":' * MAX_JSON_DEPTH + "1" + "}" * MAX_JSON_DEPTH + "}", False),
        ('{"a": [' + "1," * (MAX_JSON_VALUES - 2) + "1]}", True),
        ('{"a": [' + "1," * (MAX_JSON_VALUES - 1) + "1]}", False),
        ('{"a": [' + "[[]]," * (MAX_JSON_DEPTH) + "1]}", True),  # lists side by side are not deep
    ],
)
def test_bounds(text, fits):
    if fits:
        assert parse_object(text) == json.loads(text)
    else:
        with pytest.raises(ValueError, match=r"at most|too deeply|more than"):
            parse_object(text)


@pytest.mark.parametrize("text", ['{"a": "' + "\\" * 100_001, '"' * 100_001 + "[" * 200, "{" * 200])
def test_what_is_no_json_is_refused_too(text):
    with pytest.raises(ValueError, match="must be a JSON object"):
        parse_object(text)
