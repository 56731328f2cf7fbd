"""DeepSeek's calls, on outputs written by hand after the chat templates of V3, R1 and V3.1."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.runtime.chat.messages import Chat, ChatTurn, Tool
from penstock.runtime.chat.parser import choose_forms
from penstock.runtime.chat.tool_formats.events import CallPiece as Call
from penstock.runtime.chat.tool_formats.events import Text, joined
from penstock.runtime.chat.tool_formats.tools import TOOL_FORMS, CallParser
from tests.support.chat import events_of

ONE = '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
OLDER = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>'
)
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
WEATHER = Call("get_weather", '{"city": "Paris"}')
EXAMPLES = [
    (f"{BEGIN}{ONE}{END}", [WEATHER]),
    (f"{BEGIN}{ONE}{ONE}{END}", [WEATHER, WEATHER]),
    (f"I look.\n\n{BEGIN}{ONE}{END}\n", [Text("I look."), WEATHER]),
    (f"{BEGIN}{OLDER}\n{OLDER}{END}", [WEATHER, WEATHER]),
    (f"{BEGIN}{OLDER}", [WEATHER]),  # R1's template writes no closing marker after one call
    (f"{BEGIN}{OLDER}\n{ONE}{END} Done.", [WEATHER, WEATHER, Text(" Done.")]),
    (f"{BEGIN}\n{ONE}\n{END}", [WEATHER]),
    (
        f'{BEGIN}<｜tool▁call▁begin｜>f-2<｜tool▁sep｜>{{"a": "<｜tool▁call▁end｜>```"}}<｜tool▁call▁end｜>',
        [Call("f-2", '{"a": "<｜tool▁call▁end｜>```"}')],
    ),
    (f"{BEGIN}<｜tool▁call▁begin｜>nobody<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>{END}", [Call("nobody", "{}")]),
    # What closes the call may be missing at the end of the output, and nothing of the arguments.
    (f"{BEGIN}{ONE.removesuffix('<｜tool▁call▁end｜>')}", [WEATHER]),
    (f"{BEGIN}{OLDER.removesuffix('```<｜tool▁call▁end｜>')}", [WEATHER]),
    (f"{BEGIN}{ONE[:-24]}", [Call("get_weather", '{"city": "')]),
    (f"{BEGIN}{OLDER.replace('```json', 'json')}{END}", None),
    (f"{BEGIN}{ONE.replace('get_weather', '')}{END}", None),
    # Broken arguments go on to the marker after them.
    (
        f"{BEGIN}{ONE.replace('Paris', 'Pa<').replace('}', '')}{END}",
        [Call("get_weather", '{"city": "Pa<"')],
    ),
    (f"{BEGIN}{OLDER.replace(': ', ' ')}{END}", [Call("get_weather", '{"city" "Paris"}\n```')]),
    (f"{BEGIN}{END}", None),
    (f"{ONE}", None),
    (BEGIN[:-1], None),
    (f"{BEGIN}{ONE}oops{END}", [WEATHER, Text(f"oops{END}")]),
    (f"{BEGIN}oops{BEGIN}{ONE}{END}", [Text(f"{BEGIN}oops"), WEATHER]),
]


@pytest.mark.parametrize(("text", "found"), EXAMPLES)
def test_examples(text: str, found: list[object] | None) -> None:
    """Each output is parsed as a whole and character by character. `found` None: all of it is text."""
    expected = [Text(text)] if found is None else found
    assert events_of("deepseek", [text]) == expected
    assert events_of("deepseek", list(text)) == expected


def test_a_call_comes_with_its_last_character() -> None:
    for one in (ONE, OLDER):
        parser = CallParser(TOOL_FORMS["deepseek"], {})
        came = joined([event for char in f"{BEGIN}{one}"[:-1] for event in parser.push(char)])
        assert came == [dataclasses.replace(WEATHER, is_last=False)]
        assert parser.push(one[-1]) == [Call("", "")]


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning"),
    [
        ("<｜User｜>Hi<｜Assistant｜><think>\n", f"Hm.\n</think>\n\nI look.{BEGIN}{ONE}{END}", "Hm."),
        ("<｜User｜>Hi<｜Assistant｜><think>", f"Hm.</think>I look.{BEGIN}{ONE}{END}", "Hm."),
        ("<｜User｜>Hi<｜Assistant｜></think>", f"I look.{BEGIN}{ONE}{END}", ""),
    ],
)
def test_the_prompt_opens_the_reasoning_or_ends_it(prompt: str, text: str, reasoning: str) -> None:
    """V3.1 is asked for no thoughts by a closing tag."""
    forms = choose_forms(f"{BEGIN}<think></think>")
    parser = forms.parser(Chat((ChatTurn("user", "Hi"),), (Tool("get_weather"),)), prompt)
    parts = [*map(parser.push, text), parser.flush()]
    assert "".join(part.reasoning for part in parts) == reasoning
    assert "".join(part.text for part in parts) == "I look."
    assert joined([call for part in parts for call in part.calls]) == [WEATHER]
