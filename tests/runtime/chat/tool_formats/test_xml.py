"""What values mean in the forms in XML, where they have no types of their own; and calls written by hand."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.chat.tool_formats.events import CallPiece as Call
from penstock.runtime.chat.tool_formats.events import Event, Text
from penstock.runtime.chat.tool_formats.tools import TOOL_FORMS, CallParser
from tests.support.chat import UNTYPED, calls, events_of, merged, pieces_of, spelled

COLOR = {"$ref": "#/$defs/color"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "number": {"type": "number"},
        "integer": {"type": "integer"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "object": {"type": "object"},
        "either": {"type": ["string", "integer"]},
        "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "optional_number": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "choice": {"enum": ["1", 2, None]},
        "color": COLOR,
        "colors": {"allOf": [{"type": ["array", "string"]}, {"type": "array"}]},
        "unsaid": {"description": "anything"},
        "circle": {"$ref": "#/properties/circle"},
        "outside": {"$ref": "other.json"},
    },
    "$defs": {"color": {"enum": ["red", "blue"], "type": "string"}},
}
MEANINGS = [
    ("text", "5", "5"),
    ("text", "null", "null"),
    ("text", ' "quoted" ', ' "quoted" '),
    ("text", "", ""),
    ("text", "a\n\n<b>é</b>\n", "a\n\n<b>é</b>\n"),
    ("number", " 1.5\n", 1.5),
    ("number", "7", 7),
    ("integer", "-3", -3),
    ("integer", "three", "three"),  # it is told as the model wrote it, and the caller's schema refuses it
    ("flag", "true", True),
    ("flag", "True", True),  # as templates show Python's values
    ("flag", "False", False),
    ("list", "[1, [true]]", [1, [True]]),
    ("list", "['a', None]", ["a", None]),
    ("object", '{"a": {"b": "</parameter>"}}', {"a": {"b": "</parameter>"}}),
    ("object", "{'a': 1}", {"a": 1}),
    ("object", "{a: 1}", "{a: 1}"),
    ("either", "5", 5),
    ("either", "5.5", "5.5"),
    ("either", "five", "five"),
    ("optional", "null", None),
    ("optional", "None", None),
    ("optional", "nothing", "nothing"),
    ("optional", '"null"', '"null"'),
    ("optional_number", "null", None),
    ("optional_number", "0.5", 0.5),
    ("choice", "1", "1"),
    ("choice", "2", 2),
    ("choice", "null", None),
    ("color", "red", "red"),
    ("colors", '["red"]', ["red"]),
    ("unsaid", "5", "5"),
    ("unlisted", "[5]", "[5]"),
    ("circle", "5", "5"),
    ("outside", "5", "5"),
]


def events(form: str, pieces: list[str], schema: dict[str, Any] | None = None) -> list[Event]:
    parser = CallParser(TOOL_FORMS[form], {"f": SCHEMA if schema is None else schema})
    return merged([*(event for piece in pieces for event in parser.push(piece)), *parser.flush()])


def found(form: str, pieces: list[str], schema: dict[str, Any] | None = None) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls(events(form, pieces, schema))]


@pytest.mark.parametrize("form", UNTYPED)
def test_the_schema_says_what_a_value_means(form: str) -> None:
    for name, text, value in MEANINGS:
        whole = spelled(form, [("f", {name: text})])
        assert found(form, [whole]) == [("f", {name: value})], (name, text)
        assert found(form, list(whole)) == [("f", {name: value})]


def test_arguments_that_are_not_listed_may_have_a_schema() -> None:
    text = spelled("glm", [("f", {"a": "5"})])
    assert found("glm", [text], {"additionalProperties": {"type": "integer"}}) == [("f", {"a": 5})]
    assert found("glm", [text], {"additionalProperties": False}) == [("f", {"a": "5"})]
    assert found("glm", [text], {"properties": "wrong"}) == [("f", {"a": "5"})]


def test_numbers_stay_as_they_are_written() -> None:
    (call,) = events("glm", [spelled("glm", [("f", {"number": "1.50e2", "integer": "1" * 40})])])
    assert call == Call("f", f'{{"number": 1.50e2, "integer": {"1" * 40}}}')


JSONS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(
        ["</parameter>", "</parameter>\n</function>", "</arg_value></tool_call>", '"', "\\", "é\n"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
).filter(lambda value: not isinstance(value, str))
TEXTS = st.text(max_size=8) | st.sampled_from([
    "\n", "a <parameter=text", "<parameter></parameter>!", '<parameter name="x"/>', "</function>",
    "</tool_call>", "<tool_call>", "<arg_key>", "a <arg_value></arg_value>!", "null", "[1]",
])  # fmt: skip


@pytest.mark.parametrize("form", [*UNTYPED, "glm, newer"])
@settings(max_examples=60, deadline=None)
@given(
    made=st.lists(st.fixed_dictionaries({}, optional={"text": TEXTS, "data": JSONS}), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 300), max_size=10),
)
def test_typed_values_come_back(form: str, made: list[dict[str, Any]], cuts: list[int]) -> None:
    """Texts exactly, with what looks like tags in them; and JSON even where it holds whole closing tags."""
    schema = {
        "properties": {
            "text": {"type": "string"},
            "data": {"type": ["number", "boolean", "null", "array", "object"]},
        }
    }
    text = spelled(form, [("f", arguments) for arguments in made])
    name = form.partition(",")[0]
    expected = [("f", arguments) for arguments in made]
    assert found(name, pieces_of(text, cuts), schema) == expected
    assert found(name, list(text), schema) == expected


QWEN = "<tool_call>\n<function=f>\n<parameter=text>\nZ\n</parameter>\n</function>\n</tool_call>"
Z = Call("f", '{"text": "Z"}')
SEED = "<seed:tool_call>\n<function=f>\n<parameter=text>Z</parameter>\n</function>\n</seed:tool_call>"
MINIMAX = """<minimax:tool_call>
<invoke name="f">
<parameter name="text">Z</parameter>
</invoke>
<invoke name="g">
</invoke>
</minimax:tool_call>"""
EXAMPLES: dict[str, list[tuple[str, list[Event] | None]]] = {
    "qwen3_coder": [
        (QWEN, [Z]),
        (f"I look.\n\n{QWEN}\n{QWEN}\n", [Text("I look."), Z, Z]),
        ("<tool_call>\n<function=f>\n</function>\n</tool_call>", [Call("f", "{}")]),
        ("<tool_call><function=nobody></function></tool_call> ok", [Call("nobody", "{}"), Text(" ok")]),
        # The closing tag of the block may be missing at the end, and a broken rest is text.
        (QWEN.removesuffix("</tool_call>"), [Z]),
        (QWEN.removesuffix("l_call>"), [Z]),
        (QWEN.removesuffix("</tool_call>") + "so", [Z, Text("\nso")]),
        (QWEN.removesuffix("</function>\n</tool_call>"), [Call("f", '{"text": "Z"')]),
        (QWEN[: QWEN.index("Z") + 1], [Call("f", "")]),
        # A closing tag in a text does not end it, unless another tag follows.
        (
            QWEN.replace("Z", "<parameter=a>\n</parameter>\nZ"),
            [Call("f", '{"text": "<parameter=a>\\n</parameter>\\nZ"}')],
        ),
        (QWEN.replace("Z", f"\n{QWEN[:11]}\n"), [Call("f", '{"text": "\\n<tool_call>\\n"}')]),
        (QWEN.replace("<parameter=text>", "<parameter=>"), None),
        (QWEN.replace("<function=f>", "<function=>"), None),
        (QWEN.replace("<function=f>", '{"name": "f", "arguments": {}}'), None),
        (QWEN.replace("</function>", "<parameter=text>\ny\n</parameter>\n</function>"), None),  # twice
        ("<tool_call>", None),
        ("<tool_cal", None),
        ("a < b, <function=f>", None),
        # Without the opening tag a known name shows that it is a call.
        (f"I look.\n\n{QWEN.removeprefix('<tool_call>')}", [Text("I look."), Z]),
        (QWEN.removeprefix("<tool_call>").replace("=f", "=nobody"), None),
        ("Write <function=f> and then", None),
        # Without its closing tag a value ends where the next one begins, or the function ends.
        (
            QWEN.replace("Z\n</parameter>", "Z\n<parameter=number>\n2\n</parameter>"),
            [Call("f", '{"text": "Z", "number": 2}')],
        ),
        (QWEN.replace("Z\n</parameter>", "Z"), [Z]),
        (QWEN.replace("Z\n</parameter>", "Z") + QWEN, [Z, Z]),
        (QWEN.replace("Z", "Z\n<parameter=unlisted>\n2"), None),
        (QWEN.replace("Z", "Z\n</parameter>\n2"), None),
        (QWEN.replace("Z", "Z <parameter=number>"), [Call("f", '{"text": "Z <parameter=number>"}')]),
        (QWEN.replace("</function>\n", "") + "\n" + QWEN, [Z, Z]),
    ],
    "seed_oss": [
        (SEED, [Z]),
        (
            SEED.replace("Z", "\nZ\n"),
            [Call("f", '{"text": "\\nZ\\n"}')],  # this family's line breaks belong to the text
        ),
        ("<tool_call>\n<function=nobody>\n</function>\n</tool_call>", None),
        (f"Hm.\n{SEED.removeprefix('<seed:tool_call>')}", [Text("Hm."), Z]),
        (SEED.replace("Z</parameter>", "Z"), [Z]),
    ],
    "minimax_m2": [
        (MINIMAX, [Z, Call("g", "{}")]),
        (MINIMAX.removesuffix("</invoke>\n</minimax:tool_call>"), [Z, Call("g", "")]),
        ("<minimax:tool_call>\n<invoke name=f>\n</invoke>\n</minimax:tool_call>", None),
    ],
    "glm": [
        ("<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>Z</arg_value>\n</tool_call>", [Z]),
        ("Hm\n<tool_call>f<arg_key>text</arg_key><arg_value>Z</arg_value></tool_call>", [Text("Hm"), Z]),
        ("<tool_call>f</tool_call><tool_call>g\n</tool_call>", [Call("f", "{}"), Call("g", "{}")]),
        # Without the closing tag more arguments might have come.
        ("<tool_call>f\n", [Call("f", "")]),
        (
            "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>Z</arg_value>\n",
            [Call("f", '{"text": "Z"')],
        ),
        ("<tool_call>f", None),
        ("<tool_call>f\n<arg_key>text</arg_key>\n</tool_call>", None),
        ("<tool_call>f\n<arg_value>Z</arg_value>\n</tool_call>", None),
        ("<tool_call></tool_call>", None),
        ('<tool_call>{"name": "f"}</tool_call>', None),
    ],
}  # fmt: skip
# One tag of such calls is missing, comes twice, or changes places with the next. The values tell whether one
# of them swallowed another. Each row has the tags in their order, with the texts between them.
WEATHER_TOOL: dict[str, Any] = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TEXTS_TOOL: dict[str, Any] = {"properties": {"city": {"type": "string"}, "days": {"type": "string"}}}
TOOLS_OF_FAULTS: dict[str, dict[str, Any]] = {"typed": WEATHER_TOOL, "texts": TEXTS_TOOL, "nothing said": {}}
WRITTEN: dict[str, list[str]] = {
    "qwen3_coder": [
        "Hm.\n", "<tool_call>\n", "<function=f>\n", "<parameter=city>\n", "Paris\n", "</parameter>\n",
        "<parameter=days>\n", "2\n", "</parameter>\n", "</function>\n", "</tool_call>\n", "<tool_call>\n",
        "<function=f>\n", "<parameter=city>\n", "Oslo\n", "</parameter>\n", "</function>\n", "</tool_call>",
    ],
    "seed_oss": [
        "Hm.\n", "<seed:tool_call>\n", "<function=f>\n", "<parameter=city>", "Paris", "</parameter>\n",
        "<parameter=days>", "2", "</parameter>\n", "</function>\n", "</seed:tool_call>\n",
        "<seed:tool_call>\n", "<function=f>\n", "<parameter=city>", "Oslo", "</parameter>\n",
        "</function>\n", "</seed:tool_call>",
    ],
    "minimax_m2": [
        "Hm.\n", "<minimax:tool_call>\n", '<invoke name="f">\n', '<parameter name="city">', "Paris",
        "</parameter>\n", '<parameter name="days">', "2", "</parameter>\n", "</invoke>\n",
        '<invoke name="f">\n', '<parameter name="city">', "Oslo", "</parameter>\n", "</invoke>\n",
        "</minimax:tool_call>",
    ],
    "glm": [
        "Hm.\n", "<tool_call>", "f\n", "<arg_key>", "city", "</arg_key>\n", "<arg_value>", "Paris",
        "</arg_value>\n", "<arg_key>", "days", "</arg_key>\n", "<arg_value>", "2", "</arg_value>\n",
        "</tool_call>\n", "<tool_call>", "f\n", "<arg_key>", "city", "</arg_key>\n", "<arg_value>", "Oslo",
        "</arg_value>\n", "</tool_call>",
    ],
    "glm, newer": [
        "Hm.", "<tool_call>", "f", "<arg_key>", "city", "</arg_key>", "<arg_value>", "Paris", "</arg_value>",
        "<arg_key>", "days", "</arg_key>", "<arg_value>", "2", "</arg_value>", "</tool_call>",
        "<tool_call>", "f", "<arg_key>", "city", "</arg_key>", "<arg_value>", "Oslo", "</arg_value>",
        "</tool_call>",
    ],
}  # fmt: skip


def _faults(parts: list[str]) -> dict[str, str]:
    """Return the text with each of its tags left out, doubled, and exchanged with the next tag."""
    tags = [i for i, part in enumerate(parts) if part.startswith("<")]
    made = {}
    for i in tags:
        made[f"{i} missing"] = "".join([*parts[:i], *parts[i + 1 :]])
        made[f"{i} doubled"] = "".join([*parts[:i], parts[i], *parts[i:]])
    for i, j in itertools.pairwise(tags):
        swapped = list(parts)
        swapped[i], swapped[j] = parts[j], parts[i]
        made[f"{i} and {j} exchanged"] = "".join(swapped)
    return made


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("tool", TOOLS_OF_FAULTS)
def test_no_argument_swallows_another(form: str, tool: str) -> None:
    """With one tag wrong, each call has the arguments that the model meant, or is text. The last one that is
    told may have no end, and so the beginning of what was meant.
    """
    days = 2 if tool == "typed" else "2"
    meant = [("f", {"city": "Paris", "days": days}), ("f", {"city": "Oslo"})]
    cuts = [("f", ""), *(("f", json.dumps(arguments)[:-1]) for _, arguments in meant)]
    name, schema = form.partition(",")[0], TOOLS_OF_FAULTS[tool]
    whole = "".join(WRITTEN[form])
    assert found(name, [whole], schema) == meant
    for fault, text in _faults(WRITTEN[form]).items():
        told = calls(events(name, [text], schema))
        if told and told[-1] in cuts:
            told.pop()
        came = [(function, json.loads(arguments)) for function, arguments in told]
        assert came in ([], meant[:1], meant[1:], meant), (fault, text)
        assert events(name, list(text), schema) == events(name, [text], schema), fault


CASES = [(form, text, expected) for form, examples in EXAMPLES.items() for text, expected in examples]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_examples(form: str, text: str, expected: list[Event] | None) -> None:
    """`expected` None: all of it is text."""
    assert events(form, [text]) == (expected or [Text(text)])
    assert events(form, list(text)) == (expected or [Text(text)])


@pytest.mark.parametrize(
    ("form", "written"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=a>\nthe value\n</tool_call>\nI have called f now.",
        ),
        ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x\n</tool_call>\nDone, it is sent."),
        ("glm", "Use <tool_call> to call. It is great."),
    ],
)
@pytest.mark.parametrize("are_tokens", [False, True])
def test_a_tag_that_is_missing_within_a_whole_output_makes_text(form, written, are_tokens) -> None:
    """It was not cut off: a tag that stands behind a call came, or words that begin no call. So there is no
    call, which would lack arguments, and no word is lost.
    """
    markers = TOOL_FORMS[form].markers
    events = events_of(form, [written], markup=markers if are_tokens else ())
    assert not [event for event in events if isinstance(event, Call)]
    text = "".join(event.text for event in events if isinstance(event, Text))
    for marker in markers if are_tokens else ():
        written = written.replace(marker, "")
    assert text.split() == written.split()
