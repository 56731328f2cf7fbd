"""Properties of the tool-call parsers, over outputs made of calls, of text that resembles calls, of markers
and of words.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.runtime.chat.tool_formats.events import Event, Text
from penstock.runtime.chat.tool_formats.tools import TOOL_FORMS, CallParser
from tests.support.chat import (
    MARKED,
    SOME_FORMS,
    TOOLS,
    UNTYPED,
    calls,
    events_of,
    meant,
    merged,
    pieces_of,
    spelled,
    texts,
)

CUTS = st.lists(st.integers(0, 200), max_size=12)
# No text holds Gemma 4's quote, which that form cannot write. Hypothesis tries constants of the code, too.
WORDS = st.text(max_size=6).filter(lambda text: '<|"|>' not in text)
SCALARS = st.none() | st.booleans() | st.integers(-99, 99) | WORDS | st.sampled_from(
    ["</tool_call>", "<tool_call>", "[TOOL_CALLS]", '"}}', "}]", ")]", "; {", "\\", "\U0001f600\u2028é"]
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    # Gemma 4 does not write members without a name.
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b_2", "city", "für"]), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(TOOLS), ARGUMENTS), min_size=1, max_size=3)
MARKS = sorted({mark for form in TOOL_FORMS.values() for mark in form.markers})
SCRAPS = st.sampled_from([
    *MARKS, *(mark[:-1] for mark in MARKS), *(mark[1:] for mark in MARKS),
    "\n", " ", "{", "}", "[", "]", ";", "f(", ")", "'", '{"name": ', '"f"', ', "arguments": {}', "[f(a=",
    "[g()]", '{"name": "f", "parameters": {}}', "words ", "é",
])  # fmt: skip


def parsed_calls(events: list[Event]) -> list[tuple[str, object]]:
    return [(name, json.loads(arguments)) for name, arguments in calls(events)]


@pytest.mark.parametrize("form", SOME_FORMS)
@settings(max_examples=40, deadline=None)
@given(
    made=CALLS,
    before=st.sampled_from(["", "Let me see.\n", "a < b\n\n"]),
    cuts=CUTS,
    ascii_only=st.booleans(),
)
def test_what_is_written_is_found(form, made, before, cuts, ascii_only) -> None:
    """Calls come back as they were made, in order, and the words before them without the line break at their
    end.
    """
    text = before + spelled(form, made, ascii_only=ascii_only)
    events = events_of(form, pieces_of(text, cuts))
    assert parsed_calls(events) == meant(form, made)
    assert texts(events) == before.rstrip()
    assert events == events_of(form, [text])


@pytest.mark.parametrize("form", SOME_FORMS)
@settings(max_examples=30, deadline=None)
@given(
    parts=st.lists(st.one_of(SCRAPS, CALLS), max_size=8),
    cuts=CUTS,
    is_forced=st.booleans(),
    are_tokens=st.booleans(),
)
def test_pieces_do_not_matter(form, parts, cuts, is_forced, are_tokens) -> None:
    """Pieces of calls, too: joined they are the calls of the whole text."""
    text = "".join(part if isinstance(part, str) else spelled(form, part) for part in parts)
    markup = TOOL_FORMS[form].markers if are_tokens else ()
    whole = events_of(form, [text], markup=markup, is_forced=is_forced)
    assert events_of(form, pieces_of(text, cuts), markup=markup, is_forced=is_forced) == whole
    assert events_of(form, list(text), markup=markup, is_forced=is_forced) == whole


@pytest.mark.parametrize("form", SOME_FORMS)
@settings(max_examples=40, deadline=None)
@given(made=CALLS, at=st.integers(0, 400), is_forced=st.booleans())
def test_a_cut_call_is_a_call_with_a_part_of_its_arguments(form, made, at, is_forced) -> None:
    """Wherever the output ends: of the calls, the first are whole, and the last has the beginning of its
    arguments. Only a piece of a marker is text, if the form has markers.

    Values without quotes hold no tag of a call here: cut off there, it would end this call, or begin one.
    """
    text = spelled(form, made)
    assume(form not in UNTYPED or max(map(text.count, ("<tool_call>", "</tool_call>"))) <= len(made))
    whole = calls(events_of(form, [text]))
    events = events_of(form, [text[:at]], markup=TOOL_FORMS[form].markers, is_forced=is_forced)
    told = calls(events)
    assert told[:-1] == whole[: len(told) - 1 if told else 0]
    for (name, arguments), (whole_name, whole_arguments) in zip(
        told[-1:], whole[len(told) - 1 :], strict=False
    ):
        assert name == whole_name
        assert whole_arguments.startswith(arguments)
    if form in MARKED and (left := texts(events).strip()):
        assert [mark for mark in TOOL_FORMS[form].markers if mark.startswith(left)]


@pytest.mark.parametrize("form", SOME_FORMS)
@settings(max_examples=30, deadline=None)
@given(parts=st.lists(st.one_of(SCRAPS, CALLS), max_size=8))
def test_text_has_no_markers_that_are_tokens(form, parts) -> None:
    """Words stand between the parts, because what is left of two may look like a marker."""
    text = " so ".join(part if isinstance(part, str) else spelled(form, part) for part in parts)
    came = texts(events_of(form, [text], markup=TOOL_FORMS[form].markers))
    assert not [marker for marker in TOOL_FORMS[form].markers if marker in came]


@pytest.mark.parametrize("form", SOME_FORMS)
@settings(max_examples=30, deadline=None)
@given(parts=st.lists(st.one_of(SCRAPS, CALLS), max_size=8))
def test_text_without_calls_is_unchanged(form, parts) -> None:
    """Text that resembles a call but is none comes back unchanged."""
    text = "".join(part if isinstance(part, str) else spelled(form, part)[:-3] for part in parts)
    events = events_of(form, list(text))
    if not calls(events):
        assert texts(events) == text


@pytest.mark.parametrize("form", SOME_FORMS)
@settings(max_examples=30, deadline=None)
@given(words=st.lists(st.text(alphabet="ab\n ;}])'\"é", max_size=8), max_size=6))
def test_text_without_markers_comes_at_once(form, words) -> None:
    """After every piece, all text has come out except white space at its end."""
    parser = CallParser(TOOL_FORMS[form], {name: {} for name in TOOLS})
    came = ""
    for i, word in enumerate(words):
        came += texts(parser.push(word))
        assert came == "".join(words[: i + 1]).rstrip(" \t\r\n")
    assert came + texts(parser.flush()) == "".join(words)


@pytest.mark.parametrize("form", [form for form in MARKED if form != "granite"])
@settings(max_examples=30, deadline=None)
@given(
    parts=st.lists(st.one_of(SCRAPS, CALLS), max_size=5),
    made=CALLS,
    then=st.lists(SCRAPS | CALLS, max_size=4),
)
def test_after_a_call_all_begins_anew(form, parts, made, then) -> None:
    """In forms in which a call may stand anywhere, the text after a call is parsed as if it stood alone. The
    exception is white space at its beginning, which is dropped if nothing else follows. (Granite's calls may
    have a closing tag or not.)
    """
    text = [
        "".join(part if isinstance(part, str) else spelled(form, part) for part in some)
        for some in (parts, then)
    ]
    first = text[0] + spelled(form, made)
    if calls(events_of(form, [first]))[-len(made) :] != [
        (name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in meant(form, made)
    ]:
        return  # the text before the call made it part of something else
    rest = events_of(form, [text[1]])
    if not calls(rest) and not texts(rest).strip(" \n"):
        rest = []
    assert events_of(form, [first + text[1]]) == merged([*events_of(form, [first]), *rest])


@pytest.mark.parametrize("form", SOME_FORMS)
@settings(max_examples=30, deadline=None)
@given(made=CALLS)
def test_unknown_names_are_calls_only_where_the_form_is_explicit(form, made) -> None:
    text = spelled(form, made)
    events = events_of(form, [text], tools=["other"])
    assert parsed_calls(events) == (meant(form, made) if form in MARKED else [])
    if form == "llama3_json":
        assert events == [Text(text)]
        assert parsed_calls(events_of(form, [f"<|python_tag|>{text}"], ["other"])) == made
    if form == "pythonic":
        assert events == [Text(text)]
        assert parsed_calls(events_of(form, [f"<|python_start|>{text}<|python_end|>"], ["other"])) == made
