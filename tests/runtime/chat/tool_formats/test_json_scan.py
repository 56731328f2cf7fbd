"""The scanner of JSON that comes in pieces, compared with Python's json."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.chat.tool_formats.events import CallPiece as Call
from penstock.runtime.chat.tool_formats.events import Draft, joined
from penstock.runtime.chat.tool_formats.json_scan import MAX_DEPTH, call_object, json_value
from penstock.runtime.chat.tool_formats.reader import Reader, Wait
from tests.support.chat import Scan, pieces_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
CUTS = st.lists(st.integers(0, 60), max_size=6)


def refuse(name: str) -> None:
    raise ValueError(name)


def scanner(*known: str) -> Callable[[Reader], Wait[Call | None]]:
    """Scan a call's object, and return the call; None if it is none."""

    def scan(r: Reader) -> Wait[Call | None]:
        pieces: list[Call] = []
        draft = Draft(pieces.append, is_certain=False)
        is_call = yield from call_object(r, draft, known or None)
        draft.close()
        return joined(pieces)[0] if is_call else None

    return scan


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


@settings(max_examples=200, deadline=None)
@given(value=VALUES, cuts=CUTS, indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
def test_json_is_consumed_to_its_end(value, cuts, indent, ascii_only) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    scan = Scan(json_value, pieces_of(text + " x", cuts))
    assert (scan.result, scan.left) == (True, " x")


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet='{}[]",:0123456789.eE+-\\ \ntruefalsn"u\x01é', max_size=24), cuts=CUTS)
def test_what_json_refuses_is_refused(text, cuts) -> None:
    scan = Scan(json_value, pieces_of(text, cuts))
    assert (scan.result and not scan.left.strip(" \t\r\n")) == is_json(text)


@settings(max_examples=200, deadline=None)
@given(value=VALUES, at=st.integers(0, 80), char=st.sampled_from('{}[]",:0-.e\\ x'), cuts=CUTS)
def test_json_with_a_character_changed(value, at, char, cuts) -> None:
    text = json.dumps(value)
    at = min(at, len(text) - 1)
    text = text[:at] + char + text[at + 1 :]
    scan = Scan(json_value, pieces_of(text, cuts))
    assert (scan.result and not scan.left.strip(" ")) == is_json(text)


@pytest.mark.parametrize(
    ("text", "known_after"),
    [
        ("{x", 2),
        ('{"a" 1', 6),
        ('{"a": tru3', 10),
        ("[1, ]", 5),
        ('"a\n', 3),
        (r'"\x', 3),
        (r'"\u12g', 6),
        ("{]", 2),
        ("01,", None),  # the value is 0 and ends at the 1
        ("-x", 2),
        ("NaN", 1),
    ],
)
def test_refusals_are_prompt(text: str, known_after: int | None) -> None:
    scan = Scan(json_value, list(text))
    if known_after is not None:
        assert (scan.result, scan.known_after) == (False, known_after)


def test_depth_is_bounded() -> None:
    assert Scan(json_value, ["[" * MAX_DEPTH + "]" * MAX_DEPTH]).result is True
    assert Scan(json_value, ["[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)]).result is False
    assert Scan(json_value, ["[" * 100_000]).result is False


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}', Call("f", '{"a": [1, {"b": "}"}]}')),
        ('{"arguments" :{ "a":1 } ,"name":"f"}', Call("f", '{ "a":1 }')),
        ('{"name": "f", "parameters": {}}', Call("f", "{}")),
        ('{"name": "f"}', Call("f", "{}")),
        ('{"id": "x", "name": "f", "more": [1]}', Call("f", "{}")),
        (r'{"name": "\u0066\"", "arguments": {"\u0061": 1}}', Call('f"', r'{"\u0061": 1}')),
        ('{"name": "other", "arguments": {}}', Call("other", "{}")),
    ],
)
def test_call_objects(text: str, call: Call) -> None:
    assert Scan(scanner(), list(text)).result == call


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": {}, "parameters": {}}',
        '{"name": "f", "name": "g"}',
        '{"name": "f", "arguments": {}',
        '{"name": "f" "arguments": {}}',
        r'{"name": "\ud800", "arguments": {}}',  # half of a surrogate pair cannot be sent
        '["name"]',
    ],
)
def test_what_is_no_call_object(text: str) -> None:
    assert Scan(scanner(), list(text)).result is None


@pytest.mark.parametrize(
    ("text", "known_after"),
    [
        ('{"name": "f", "arguments": {}}', None),
        ('{"type": "function", "name": "f", "parameters": {}}', None),
        ('{"city": "Paris"}', 7),
        ('{"name": "other", "parameters": {}}', 16),
        ('{"name": "f"}', 13),
    ],
)
def test_bare_objects_are_judged_strictly_and_promptly(text: str, known_after: int | None) -> None:
    scan = Scan(scanner("f"), list(text))
    if known_after is None:
        assert scan.result == Call("f", "{}")
    else:
        assert (scan.result, scan.known_after) == (None, known_after)
