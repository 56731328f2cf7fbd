"""The parsers of tool calls in each form, on outputs written by hand."""

from __future__ import annotations

import sys

import pytest

from penstock.runtime.chat.tool_formats.events import CallPiece as Call
from penstock.runtime.chat.tool_formats.events import Event, Text
from penstock.runtime.chat.tool_formats.tools import TOOL_FORMS, CallParser
from tests.support.chat import calls, events_of, spelled

HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WEATHER = Call("get_weather", '{"city": "Paris"}')
CALL = Call("f", "{}")
CALL_G = Call("g", "{}")
EXAMPLES: dict[str, list[tuple[str, list[Event] | None]]] = {
    "hermes": [
        (HERMES, [WEATHER]),
        (f"{HERMES}\n{HERMES}\n", [WEATHER, WEATHER]),
        (f"Let me see.\n{HERMES}", [Text("Let me see."), WEATHER]),
        (f" Let me see. \n\n{HERMES}\n\nDone.\n", [Text(" Let me see."), WEATHER, Text("\n\nDone.\n")]),
        ('<tool_call>{"arguments":{"a":{"b":[{}]}},"name":"f"}</tool_call>', [Call("f", '{"a":{"b":[{}]}}')]),
        # A closing tag in a string does not end the call, and an escaped quote does not end the string.
        (
            '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>\\"}"}}\n</tool_call>x',
            [Call("f", '{"a": "</tool_call>\\"}"}'), Text("x")],
        ),
        ('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', [Call("nobody", "{}")]),
        ('<tool_call>{"name": "f"}</tool_call>', [CALL]),
        # A whole call without its closing tag counts as a call at the output's end, and nowhere else.
        ('<tool_call>\n{"name": "f", "arguments": {}}', [CALL]),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool', [CALL]),
        # From the beginning of its arguments on it is a call, whatever follows.
        ('<tool_call>\n{"name": "f", "arguments": {}', [CALL]),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "b', [Call("f", '{"a": "b')]),
        ('<tool_call>\n{"name": "f", "argu', [Call("f", "")]),
        ('<tool_call>\n{"name": "f', None),
        ('<tool_call>{"name": "f", "arguments": {}} and', [CALL, Text(" and")]),
        ('<tool_call>{"name": "f", "arguments": {}, "arguments": {}}</tool_call> ok', [CALL, Text(" ok")]),
        ('<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>', [CALL]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": b}}\n</tool_call> ok',
            [Call("f", '{"a": b}'), Text(" ok")],
        ),
        ("<tool_call>\nno JSON\n</tool_call>", None),
        ("<tool_call>", None),
        ("<tool_cal", None),
        ("a < b, <tool>, </tool_call>", None),
        ('<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>', [Call("f", '{"a": "\n"}')]),
        (f"<tool_call>oops {HERMES}", [Text("<tool_call>oops"), WEATHER]),
        (f"<tool_call>{HERMES}", [Text("<tool_call>"), WEATHER]),
    ],
    "llama3_json": [
        ('{"name": "get_weather", "parameters": {"city": "Paris"}}', [WEATHER]),
        ('\n\n{"name": "get_weather", "parameters": {"city": "Paris"}}', [WEATHER]),
        ('{"type": "function", "name": "f", "parameters": {}}', [CALL]),
        (
            '{"name":"f","parameters":{"a": ";"}}; {"name":"g","arguments":{}} ;{"name":"f","parameters":{}}',
            [Call("f", '{"a": ";"}'), Call("g", "{}"), CALL],
        ),
        (
            '{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}',
            [CALL, CALL_G],
        ),
        ('{"name": "f", "parameters": {}}; or so', [CALL, Text("; or so")]),
        ('{"name": "f", "parameters": {}}; {"a": 1}', [CALL, Text('; {"a": 1}')]),
        ('<|python_tag|>{"name": "nobody", "parameters": {}}', [Call("nobody", "{}")]),
        (
            'I call <|python_tag|>{"name": "x", "parameters": {}}; {"name": "y", "parameters": {}}',
            [Text("I call"), Call("x", "{}"), Call("y", "{}")],
        ),
        ('Here:\n  {"name": "f", "parameters": {}}', [Text("Here:"), CALL]),
        ('Use {"name": "f", "parameters": {}}', None),
        ('{"name": "nobody", "parameters": {}}', None),
        ('{"name": "f"}', None),
        ('{"name": "f", "parameters": {}, "why": 1}', None),
        ('{"city": "Paris"}', None),
        ('{"name": "f", "parameters": {"a', [Call("f", '{"a')]),
        ('{"name": "f", "parameters": ', None),
        ('{"name": "f", "parameters": {"a": b}}', None),
        ('<|python_tag|>{"name": "f", "parameters": {"a": b}}', [Call("f", '{"a": b}}')]),
        ('<|python_tag|>brave_search.call(query="x")', None),
        ('{"answer": 1}\n{"name": "f", "parameters": {}}', [Text('{"answer": 1}'), CALL]),
    ],
    "mistral": [
        ('[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]', [WEATHER]),
        (
            'Well. [TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}, "id": "abcdefghi"} , {"name": "g"}]',
            [Text("Well."), Call("f", '{"a": "]"}'), Call("g", "{}")],
        ),
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', [WEATHER]),
        (
            '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]ns.tool-2[CALL_ID]a1[ARGS]{"b": []}',
            [WEATHER, Call("ns.tool-2", '{"b": []}')],
        ),
        (
            '[TOOL_CALLS]nobody{"a": "[TOOL_CALLS]"} ok',
            [Call("nobody", '{"a": "[TOOL_CALLS]"}'), Text(" ok")],
        ),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"no": 1}]', [CALL, Text(', {"no": 1}]')]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}}', [CALL]),
        ("[TOOL_CALLS] []", None),
        ("[TOOL_CALLS] and so on", None),
        ("[TOOL_CALLS]f[ARGS]", [Call("f", "")]),
        ("[TOOL_CALLS]f", None),
        ('[TOOL_CALLS]f[ARGS]{"a" 1}[TOOL_CALLS]g{}', [Call("f", '{"a" 1}'), CALL_G]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": b}}]', [Call("f", '{"a": b}}]')]),
        ("[TOOL_CALLS]f[ARGS][]", None),
        ("[TOOL_CALLS][ARGS]{}", None),
        ("[TOOL_CALL", None),
        ("[1] [f] [TOOLS]", None),
    ],
    "pythonic": [
        ("[get_weather(city='Paris')]", [WEATHER]),
        ('[f(a=1, b="x, )]"), g( )]', [Call("f", '{"a": 1, "b": "x, )]"}'), Call("g", "{}")]),
        (
            "[f(a=[1, (2,), {'k': None}], b=-1.5, c=True, d='\u00e9\\n')]",
            [Call("f", '{"a": [1, [2], {"k": null}], "b": -1.5, "c": true, "d": "\u00e9\\n"}')],
        ),
        ("Sure:\n[ns.tool-2(\n  a = 1,\n)]", [Text("Sure:"), Call("ns.tool-2", '{"a": 1}')]),
        ("<|python_start|>[nobody(a=1)]<|python_end|>", [Call("nobody", '{"a": 1}')]),
        ("Hm <|tool_call_start|>[f()]<|tool_call_end|> ok", [Text("Hm"), CALL, Text(" ok")]),
        ("<|tool_call_start|>[f()]", [CALL]),
        # A model may write a list for each call, and forget the closing tag between two calls.
        ("<|tool_call_start|>[f()]\n[nobody(a=1)]<|tool_call_end|>", [CALL, Call("nobody", '{"a": 1}')]),
        ("<|python_start|>[f()]\n<|python_start|>[g()]<|python_end|>", [CALL, CALL_G]),
        ("<|python_start|>[f()]\n[g(] so<|python_end|>", [CALL, Text("\n[g(] so<|python_end|>")]),
        ("[nobody(a=1)]", None),
        ("[f(a=1), nobody()]", None),
        ("see [f(a=1)]", None),
        ("[f(1)]", None),
        ("[f(a=b)]", None),
        ("[f(a=1, a=2)]", None),
        ("[f(a=1]", None),
        ("[f", None),
        ("[f(a=1)", [Call("f", '{"a": 1}')]),
        ('[f(a=1), g(a=2, b="x', [Call("f", '{"a": 1}'), Call("g", '{"a": 2')]),
        ("[f(a=1) is it]", None),
        ("[]", None),
        ("[f]", None),
        ("[1] A footnote, [get_] and\n[get_weather]", None),
        ("<|python_start|>print(1)<|python_end|>", None),
    ],
}
EXAMPLES |= {
    "granite": [
        ('<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]', [WEATHER]),
        ('<|tool_call|> [{"name": "f", "arguments": {}}, {"name": "g"}]\n', [CALL, CALL_G]),
        (
            'Hm <|tool_call|>[{"name": "f", "arguments": {"a": "<|/tool_call|>"}}]<|/tool_call|> ok',
            [Text("Hm"), Call("f", '{"a": "<|/tool_call|>"}'), Text(" ok")],
        ),
        ('<|tool_call|>{"name": "f", "arguments": {}}<|/tool_call|>', [CALL]),
        ('<|tool_call|>[{"name": "f", "arguments": {}}', [CALL]),
        ('<|tool_call|>[{"name": "f", "arguments": {}}, 1]', [CALL, Text(", 1]")]),
        ("<|tool_call|>[]", None),
        ('<|tool_call|>[{"arguments": {}}]', None),
    ],
    "olmo3": [
        ("<function_calls>get_weather(city='Paris')</function_calls>", [WEATHER]),
        ("Hm\n<function_calls>\nf()\ng( )\n</function_calls>\nok", [Text("Hm"), CALL, CALL_G, Text("\nok")]),
        (
            '<function_calls>\nf(a=null, b=[true, "x\ty"])\n</function_calls>',
            [Call("f", '{"a": null, "b": [true, "x\\ty"]}')],
        ),
        ("<function_calls>\nf()", [CALL]),
        ("<function_calls>\nf()\n</function_c", [CALL]),
        ("<function_calls>\nf()\ng(a=1,", [CALL, Call("g", '{"a": 1')]),
        ("<function_calls>\nf(1)\n</function_calls>", None),
        ("<function_calls>\n</function_calls>", None),
        ("<functions>f()</functions>", None),
    ],
    "gemma4": [
        ('<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>', [WEATHER]),
        ("<|tool_call>call:f{}<tool_call|><|tool_call>call:g{}<tool_call|>", [CALL, CALL_G]),
        (
            '<|tool_call>call:f{a:[1,-2.5e3,{b:<|"|>{"}\\<|"|>,<|"|>c d<|"|>:None}],e:true}<tool_call|> ok',
            [
                Call("f", '{"a": [1, -2.5e3, {"b": "{\\"}\\\\", "c d": null}], "e": true}'),
                Text(" ok"),
            ],
        ),
        ("<|tool_call>call:f{ a : 1 , b : [ ] }", [Call("f", '{"a": 1, "b": []}')]),
        ("<|tool_call>call:f{a:1}<tool_", [Call("f", '{"a": 1}')]),
        ("<|tool_call>call:f{a:1", [Call("f", "")]),
        ('<|tool_call>call:f{a:1,b:<|"|>x', [Call("f", '{"a": 1')]),
        ("<|tool_call>call:f{a:x}<tool_call|>", None),
        ("<|tool_call>call:f{a:1,a:2}<tool_call|>", None),
        ("<|tool_call>call:f{a:1,}<tool_call|>", None),
        ("<|tool_call>call:f<tool_call|>", None),
        ("<|tool_call>f{}<tool_call|>", None),
        ("<|tool_call|>call:f{}", None),
    ],
}
CASES = [(form, text, found) for form, examples in EXAMPLES.items() for text, found in examples]


@pytest.mark.parametrize(("form", "text", "found"), CASES)
def test_examples(form: str, text: str, found: list[object] | None) -> None:
    """Each output is parsed as a whole and character by character. `found` None: all of it is text."""
    expected = [Text(text)] if found is None else found
    assert events_of(form, [text]) == expected
    assert events_of(form, list(text)) == expected


@pytest.mark.parametrize(
    ("form", "pieces"),
    [
        ("hermes", ["Hi there", " <", "b> <tool", "s>"]),
        ("llama3_json", ["{", '"answer"', ": 1}"]),
        ("mistral", ["[", "1] [TOOL", "S]"]),
        ("pythonic", ["[", "1] or [", "f("]),
    ],
)
def test_text_is_held_no_longer_than_needed(form: str, pieces: list[str]) -> None:
    """The text that comes out after each piece is worked out by hand."""
    expected = {
        "hermes": [["Hi there"], [], [" <b>"], [" <tools>"]],
        "llama3_json": [[], ['{"answer"'], [": 1}"]],
        "mistral": [[], ["[1]"], [" [TOOLS]"]],
        "pythonic": [[], ["[1] or ["], ["f("]],
    }[form]
    parser = CallParser(TOOL_FORMS[form], {"f": {}})
    assert [[e.text for e in parser.push(piece) if isinstance(e, Text)] for piece in pieces] == expected
    assert parser.flush() == []


PIECES: list[tuple[str, bool, list[tuple[str, list[Event]]]]] = [
    (
        "hermes",
        False,
        [
            ('<tool_call>\n{"name": "f", "arguments": ', []),
            ('{"a', [Call("f", '{"a', is_last=False)]),
            ('": 1}}\n', [Call("", '": 1}', is_last=False)]),
            ("</tool_call>", [Call("", "")]),
        ],
    ),
    # Half a pair may become whole.
    (
        "hermes",
        False,
        [
            ('<tool_call>{"name": "f", "arguments": {"a": "\\ud83d', [Call("f", '{"a": "', is_last=False)]),
            ('\\ude00", "b": 1', [Call("", '\\ud83d\\ude00", "b": 1', is_last=False)]),
            ("}}</tool_call>", [Call("", "}")]),
        ],
    ),
    (
        "mistral",
        False,
        [('[TOOL_CALLS]f[ARGS]{"a"', [Call("f", '{"a"', is_last=False)]), (":1}", [Call("", ":1}")])],
    ),
    # Only the whole object shows that it is a call, if the model may also write something else.
    ("llama3_json", False, [('{"name": "f", "parameters": {"a": 1}', []), ("}", [Call("f", '{"a": 1}')])]),
    (
        "llama3_json",
        True,
        [
            ('{"name": "f", "parameters": {"a": 1', [Call("f", '{"a": 1', is_last=False)]),
            ("}}", [Call("", "}")]),
        ],
    ),
    ("pythonic", False, [("[f(a='x', b=2)", []), ("]", [Call("f", '{"a": "x", "b": 2}')])]),
    (
        "pythonic",
        True,
        [
            ("[f(", [Call("f", "", is_last=False)]),
            ("a='x', b=2", [Call("", '{"a": "x"', is_last=False)]),
            (")", [Call("", ', "b": 2}')]),
        ],
    ),
    (
        "qwen3_coder",
        True,
        [
            ("<tool_call>\n<function=f>\n", [Call("f", "", is_last=False)]),
            ("<parameter=a>\n1\n</parameter>\n", []),
            ("<parameter=b>\n2\n</parameter>\n</function>", [Call("", '{"a": "1", "b": "2"}')]),
        ],
    ),
    (
        "gemma4",
        True,
        [
            ("<|tool_call>call:f{a:1,", [Call("f", '{"a": 1', is_last=False)]),
            ("b:[2]}<tool_call|>", [Call("", ', "b": [2]}')]),
        ],
    ),
]


@pytest.mark.parametrize(("form", "is_forced", "steps"), PIECES)
def test_when_pieces_come(form: str, is_forced: bool, steps: list[tuple[str, list[Event]]]) -> None:
    """A call is told in pieces from the moment that it is certain to be one."""
    parser = CallParser(TOOL_FORMS[form], {"f": {}}, is_forced=is_forced)
    assert [parser.push(text) for text, _ in steps] == [events for _, events in steps]


STRAYS: dict[str, list[tuple[str, list[Event]]]] = {
    "hermes": [
        ("a </tool_call> b", [Text("a  b")]),
        ("Ask me.\n}}</tool_call>", [Text("Ask me.\n}}")]),
        (f"{HERMES}\n</tool_call>", [WEATHER]),
        ("<tool_call>\nno JSON\n</tool_call>", [Text("\nno JSON\n")]),
        ('ok <tool_call>\n{"na', [Text("ok")]),
        ("ok <tool_call>", [Text("ok")]),
        ("a </tool", [Text("a </tool")]),
    ],
    "mistral": [("[TOOL_CALLS]f", []), ("[ARGS] hm", [Text(" hm")])],
    "glm": [("a<arg_key>b</arg_key></tool_call>", [Text("ab")])],
    "deepseek": [("<｜tool▁calls▁begin｜> hm<｜tool▁calls▁end｜>", [Text(" hm")])],
}


@pytest.mark.parametrize(
    ("form", "text", "found"), [(f, *case) for f, cases in STRAYS.items() for case in cases]
)
def test_markers_that_are_tokens_are_no_text(form: str, text: str, found: list[Event]) -> None:
    markers = TOOL_FORMS[form].markers
    assert events_of(form, [text], markup=markers) == found
    assert events_of(form, list(text), markup=markers) == found


def test_long_arguments_in_small_pieces() -> None:
    """100,000 characters come one by one. The parser must not scan again what it has scanned, or this takes
    forever.
    """
    long = "x" * 100_000
    text = f'<tool_call>\n{{"name": "f", "arguments": {{"a": "{long}"}}}}\n</tool_call>'
    assert events_of("hermes", list(text)) == [Call("f", f'{{"a": "{long}"}}')]


def test_markers_that_lead_to_no_call_are_not_tried_without_end() -> None:
    """Each of 5,000 functions begins a value that has no end. The parser must not look through the rest of
    the text for each of them, or this takes forever. The last one may have been cut off by the end.
    """
    begun = "<tool_call><function=f><parameter=a>"
    assert events_of("qwen3_coder", [begun * 5_000]) == [Text(begun * 4_999), Call("f", "")]


BROKEN = {
    "glm": ("<tool_call>f<arg_key>a</arg_key><arg_value>x", "</arg_value>"),
    "qwen3_coder": ("<tool_call><function=f><parameter=a>x", "</parameter>"),
    "seed_oss": ("<seed:tool_call><function=f><parameter=a>x", "</parameter>"),
    "minimax_m2": ('<minimax:tool_call><invoke name="f"><parameter name="a">x', "</parameter>"),
}
"""The beginning of a call and a closing tag, of which each call needs one."""


@pytest.mark.parametrize("form", BROKEN)
def test_work_grows_with_the_text_where_calls_are_broken_behind(form: str) -> None:
    """Each call is read up to the tags behind the last one, where it is seen to be broken. What is counted
    are calls of functions, which no other process can make more.
    """

    def work(num_calls: int) -> int:
        begin, end = BROKEN[form]
        text = begin * num_calls + end * (num_calls + 1) + " z"
        count = 0

        def counts(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(counts)
        try:
            found = events_of(form, [text])
        finally:
            sys.setprofile(None)
        assert found == [Text(text)]
        return count

    assert work(480) < 3 * work(240)


@pytest.mark.parametrize("form", BROKEN)
def test_a_call_is_found_behind_many_that_are_broken(form: str) -> None:
    begin, end = BROKEN[form]
    call = spelled(form, [("f", {"a": "1"})])
    text = begin * 20 + end * 21 + " z"
    assert calls(events_of(form, [text + "\n" + call])) == [("f", '{"a": "1"}')]
    assert events_of(form, list(text + "\n" + call)) == events_of(form, [text + "\n" + call])
