"""The scanner that turns Python literals, which come in pieces, into JSON, compared with Python's
ast.literal_eval.
"""

from __future__ import annotations

import ast
import json
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.chat.tool_formats.python_scan import python_value
from tests.support.chat import Scan, pieces_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)
CUTS = st.lists(st.integers(0, 60), max_size=6)


def evaluated(source: str) -> object:
    with warnings.catch_warnings(action="ignore"):  # warnings about unknown escapes
        return ast.literal_eval(source)


def whole(text: str) -> str:
    """Return the text with the halves of surrogate pairs joined, as in JSON."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


@settings(max_examples=200, deadline=None)
@given(value=VALUES, cuts=CUTS)
def test_literals_are_what_they_mean(value, cuts) -> None:
    scan = Scan(python_value, pieces_of(repr(value) + " )", cuts))
    assert json.loads(scan.result) == json.loads(json.dumps(value))  # tuples are arrays
    assert scan.left == " )"


ESCAPES = ["\\" + c for c in "\n\\'\"abfnrtvxuUN078dé"]
ATOMS = st.sampled_from([*ESCAPES, "\\x41", "\\u00e9", "\\ud83d", "\\ude00", "\\U0001f600", "\\U00110000",
                         "\\N{BULLET}", "\\N{NONE}", *"a0f{} é\U0001f600#"])  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(atoms=st.lists(ATOMS, max_size=8), quote=st.sampled_from(["'", '"', "'''", '"""']), cuts=CUTS)
def test_strings_are_what_they_mean(atoms, quote, cuts) -> None:
    """Each source is one literal, because no atom is a quote or a line break without a backslash."""
    source = f"{quote}{''.join(atoms)}{quote}"
    scan = Scan(python_value, pieces_of(source, cuts))
    try:
        expected = whole(str(evaluated(source)))
    except SyntaxError:
        assert scan.result is None
    else:
        assert (json.loads(scan.result), scan.left) == (expected, "")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("1", "1"),
        ("-2.50e+3", "-2.50e+3"),
        ("1_000", "1000"),
        (".5", "0.5"),
        ("+7", "7"),
        ("true", "true"),
        ("null", "null"),
        ("None", "null"),
        ("(1)", "1"),
        ("(1,)", "[1]"),
        ("(1, 2)", "[1, 2]"),
        ("()", "[]"),
        ("[1, 2,]", "[1, 2]"),
        ("{'a': {'b': []},}", '{"a": {"b": []}}'),
        ("'it\\'s'", '"it\'s"'),
        ('"""a\n"b"""', '"a\\n\\"b"'),
        ("'\\ud83d\\ude00'", '"\U0001f600"'),
        ("'\\ud83d'", '"\\ud83d"'),  # half of a pair stays an escape: it could not be sent
        ("'\\d'", '"\\\\d"'),
    ],
)
def test_examples(source: str, text: str) -> None:
    assert Scan(python_value, list(source)).result == text


@pytest.mark.parametrize(
    "source",
    ["x", "", "{1, 2}", "{1: 2}", "[1 2]", "[,]", "1e", "1if", "--1", "b'x'", "f'x'", "'a\nb'", "'a",
     "'\\N{no such name}'", "'\\x1'", "'\\U00110000'", "nan", "+inf", "[1", "{'a'}", "{'a': }", "Truely"],
)  # fmt: skip
def test_what_is_no_literal(source: str) -> None:
    assert Scan(python_value, list(source)).result is None


def test_depth_is_bounded() -> None:
    assert Scan(python_value, ["[" * 10_000]).result is None
