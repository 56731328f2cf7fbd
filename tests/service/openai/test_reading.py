"""Bodies that are no JSON, or hold what they should not: each is refused, and quickly."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from penstock.openai import reading
from penstock.openai.failures import ApiError
from penstock.openai.schemas.base import Body, OnlyFalse, RequestBody


class Part(Body):
    type: Literal["text"]
    text: str


class Chat(RequestBody):
    model: str
    content: str | list[Part] | list[int] = ""
    part: Part | None = None
    temperature: float | None = None
    n: int = 1
    some: list[int] = Field(default=[1], min_length=1)
    free: dict[str, Any] | None = None
    only: OnlyFalse | None = None


def refused(data: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        reading._parsed(data, Chat)
    return caught.value


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"[]", "must be an object"),
        (b'"a"', "must be an object"),
        (b"null", "must be an object"),
        (b'{"a": 1} x', "Extra data"),
        (b'{"a": NaN}', "no NaN"),
        (b'{"a": -Infinity}', "no -Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": 1' + b"0" * 30 + b"}", "too large"),
        (b'{"a": 1' + b"0" * 9000 + b"}", "too large"),
        (b'{"model": "a", "model": "b"}', "'model' stands twice"),
        (b'{"model": "\xff"}', "not UTF-8"),
        (b'{"model": "\\ud800"}', "surrogate"),
        (b'{"model": "a", "free": {"\\udc00": 1}}', "surrogate"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "levels"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "levels"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_what_is_no_json_object_is_refused(data: bytes, why: str) -> None:
    error = refused(data)
    assert (error.status, error.code, error.param) == (400, "invalid_json", None)
    assert why in error.message
    assert len(error.message) < 300


def test_a_body_with_too_many_values_is_refused_before_it_is_parsed() -> None:
    error = refused(b'{"a": [' + b"0," * reading.MAX_PARTS + b"0]}")
    assert (error.status, error.code) == (413, "body_too_large")


def test_pairs_of_surrogates_are_characters() -> None:
    assert reading._parsed(b'{"model": "\\ud83d\\ude00"}', Chat).model == "\U0001f600"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"content": [True] * 30_000}, "content[0]", "invalid_type"),
        ({"content": [{"type": "text"}] * 10_000}, "content[0].text", "missing_required_parameter"),
        ({"n": True}, "n", "invalid_type"),
        ({"n": 1.0}, "n", "invalid_type"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"temperature": "1"}, "temperature", "invalid_type"),
        ({"only": True}, "only", "unsupported_value"),
        ({f"x{number}": 1 for number in range(50_000)}, None, "invalid_value"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
def test_fields_that_do_not_match(fields: dict[str, Any], param: str | None, code: str) -> None:
    error = refused(json.dumps({"model": "m"} | fields).encode())
    assert (error.status, error.param, error.code) == (400, param, code)
    assert len(error.message) < 500


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"some": []}, "Invalid value for 'some': list must have at least 1 item, not 0."),
        ({"some": "x"}, "Invalid type for 'some': must be an array."),
        ({"only": True}, "Unsupported value: 'only': must be false."),
        ({"only": 0}, "Invalid type for 'only': must be a valid boolean."),
        ({"part": "x"}, "Invalid type for 'part': must be an object."),
        ({"content": 5}, "Invalid type for 'content': must be a valid string or must be an array."),
        ({"free": 5}, "Invalid type for 'free': must be an object."),
    ],
)
def test_messages_speak_of_json_and_not_of_how_it_is_checked(fields: dict[str, Any], message: str) -> None:
    assert refused(json.dumps({"model": "m"} | fields).encode()).message == message


def test_a_list_is_not_looked_at_further_once_an_item_is_wrong() -> None:
    """A list of many wrong items would take seconds otherwise, while nobody else is served."""
    with pytest.raises(ValidationError) as caught:
        Chat.model_validate({"model": "m", "content": [True] * 1000})
    assert caught.value.error_count() < 10


def test_nulls_are_left_out_but_not_in_free_objects() -> None:
    data = {"model": "m", "n": None, "store": None, "user": None, "free": {"a": None}}
    body = reading._parsed(json.dumps(data).encode(), Chat)
    assert (body.n, body.free) == (1, {"a": None})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from([*Chat.model_fields, "user", "other"]), JSON))
def test_any_object_is_read_or_refused(value: dict[str, Any]) -> None:
    data, error = json.dumps(value).encode(), None
    try:
        reading._parsed(data, Chat)
    except ApiError as caught:
        error = caught
    assert error is None or (400 <= error.status < 500 and error.message)


@given(st.binary())
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    assert refused(data).status == 400
