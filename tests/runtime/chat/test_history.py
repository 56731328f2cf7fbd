"""What a server hands out it takes back: every call that a parser finds can stand in the history of the next
request, which the model's template renders.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.chat.json_object import MAX_JSON_DEPTH
from penstock.runtime.chat.messages import Chat, ChatTurn, Tool, ToolCall
from penstock.runtime.chat.parser import ChatForms, choose_forms
from penstock.runtime.chat.tool_formats.events import CallPiece as Call
from penstock.runtime.chat.tool_formats.events import joined
from penstock.runtime.text.codec import TextCodec
from tests.support.chat import LLAMA3, MISTRAL, QWEN, bytes_tokenizer, spelled
from tests.support.suite.drawing import few

TEMPLATES = Path(__file__).parent / "templates"
WRITTEN = {
    "hermes": QWEN,
    "llama3_json": LLAMA3,
    "mistral": MISTRAL,
    "mistral, newer": MISTRAL,
    # No template of these models is here. Theirs write arguments like Qwen's.
    "pythonic": QWEN,
    "qwen3_coder": "qwen3_coder",
    "seed_oss": "seed_oss",
    "minimax_m2": "minimax_m2",
    "glm": "glm_4_6",
    "glm, newer": "glm_4_6",
    "deepseek": "deepseek_v3_1",
    "deepseek, older": "deepseek_r1",
    "granite": QWEN,
    "olmo3": "olmo3",
    "gemma4": "gemma4",
    "harmony": "gpt_oss",
}
"""A way of writing calls to a template that renders them."""
FORMS = few(WRITTEN, ("hermes", "qwen3_coder", "harmony"), ci=WRITTEN)
CODECS = {
    form: TextCodec(
        bytes_tokenizer(
            chat_template=template if "{" in template else (TEMPLATES / f"{template}.jinja").read_text()
        )
    )
    for form, template in WRITTEN.items()
}
USER = ChatTurn("user", "Weather?")
SCHEMA: dict[str, Any] = {"properties": {"data": {"type": ["array", "object"]}, "number": {"type": "number"}}}
TOOL = Tool("f", "Look.", SCHEMA)


def forms_of(form: str) -> ChatForms:
    name = form.partition(",")[0]
    return choose_forms("", tools=name, reasoning=name if name == "harmony" else "none")


def spelled_values(form: str, values: dict[str, str]) -> str:
    """Make a call of "f" with values that are written just as these texts, which are JSON or nearly so."""
    if form == "harmony":
        inner = ", ".join(f'"{key}": {value}' for key, value in values.items())
        return f"<|channel|>commentary to=functions.f <|message|>{{{inner}}}<|call|>"
    text = spelled(form, [("f", {key: f"@{key}@" for key in values})])
    for key, value in values.items():
        for quoted in (f'<|"|>@{key}@<|"|>', f'"@{key}@"', f"'@{key}@'", f"@{key}@"):
            text = text.replace(quoted, value)
    return text


def handed_out(form: str, text: str) -> tuple[Call, ...]:
    parser = forms_of(form).parser(Chat((USER,), (TOOL,)), "<|start|>assistant")
    parts = [parser.push(text), parser.flush()]
    return tuple(joined([call for part in parts for call in part.calls]))


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def check_return(form: str, text: str) -> tuple[Call, ...]:
    """Check the calls of this output, each of which has come back in a history, and return them. Arguments
    that are no JSON object were shown as a text.
    """
    calls = handed_out(form, text)
    for call in calls:
        call.arguments.encode()
        made = ToolCall("abcdefghi", call.name, call.arguments)
        chat = Chat((USER, ChatTurn("assistant", "", (made,)), made.result("18"), USER), (TOOL,))
        shown = CODECS[form].render_chat(chat)
        shown.encode()
        if call.arguments.strip() and not is_object(call.arguments):
            assert form.startswith("deepseek") or "invalid_json" in shown
    return calls


def nested(depth: int) -> str:
    """Make a list of lists, as deep as this."""
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("form", FORMS)
def test_deep_nesting_comes_back(form: str) -> None:
    """Arguments are an object, which is the first level."""
    (call,) = check_return(form, spelled_values(form, {"data": nested(MAX_JSON_DEPTH - 1)}))
    assert call.arguments.count("[") == MAX_JSON_DEPTH - 1
    for more in range(3):
        check_return(form, spelled_values(form, {"data": nested(MAX_JSON_DEPTH + more)}))


@pytest.mark.parametrize("form", FORMS)
def test_numbers_that_python_does_not_read_come_back(form: str) -> None:
    """Python reads no integer of more than 4300 digits."""
    assert len(check_return(form, spelled_values(form, {"number": "1" * 4300}))) == 1
    check_return(form, spelled_values(form, {"number": "1" * 4301}))


HALVES = {
    r"\ud83d": "�",
    r"a\uDE00b": "a�b",
    r"\ude00\ud83d": "��",
    r"\ud83d\ud83d\ude00": "�😀",
    r"\\ud83d": r"\ud83d",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("escaped", HALVES)
def test_half_a_pair_is_a_replacement_character(form: str, escaped: str) -> None:
    """In a string within a list, where also the forms in XML have escapes. Gemma 4's strings have none."""
    text = spelled_values(form, {"data": f'["{escaped}"]'})
    calls = check_return(form, text if form != "gemma4" else text.replace('"', '<|"|>'))
    (call,) = calls
    assert json.loads(call.arguments) == {"data": [escaped if form == "gemma4" else HALVES[escaped]]}


@pytest.mark.parametrize("form", FORMS)
def test_half_a_pair_from_elsewhere_is_rendered_too(form: str) -> None:
    """Other servers may have made the history."""
    call = ToolCall("abcdefghi", "f", r'{"city": "\ud83d", "\udc00": 1}')
    chat = Chat((USER, ChatTurn("assistant", "", (call,)), call.result("18"), USER), (TOOL,))
    shown = CODECS[form].render_chat(chat)
    assert "�" in shown or r"\ufffd" in shown


SCRAPS = st.sampled_from([
    r"\ud83d", r"\udc00", r"\u0000", "\\", '"', "'", "[", "]", "{", "}", ",", ":", "1e999", "-0", "NaN",
    "Infinity", "1" * 4301, "[" * 99, "]" * 99, "[" * 101, "]" * 101, "a", " ", "\n", "é", "null", "None",
    '"a": 1', r"'\ud800'", r"\N{BULLET}", r"\x00", "</parameter>", "<parameter=number>", "<arg_key>", '<|"|>',
    "{}", "[]",
])  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30, deadline=None)
@given(data=st.lists(SCRAPS, max_size=6), number=st.lists(SCRAPS, min_size=1, max_size=2), name=SCRAPS)
def test_every_call_can_come_back(form: str, data: list[str], number: list[str], name: str) -> None:
    inside = "".join(data)
    for value in (inside, f'"{inside}"', f"'{inside}'", f'["{inside}"]', f"[{inside}]"):
        text = spelled_values(form, {"data": value, "number": "".join(number)})
        check_return(form, text)
        check_return(form, text[: len(text) * 2 // 3])
        check_return(form, text.replace("data", name))
        check_return(form, text.replace("f", name, 1))
