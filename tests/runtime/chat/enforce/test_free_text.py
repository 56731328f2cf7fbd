"""Grammars of outputs in which the model is free to call strict tools, tested with llguidance itself.

Whatever the grammar allows, the parsers find no call in it but of known tools, with arguments that an
independent JSON Schema validator accepts for strict tools. Words, and calls that a model would write, are
allowed.
"""

from __future__ import annotations

import dataclasses
import functools
import json

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from penstock.runtime.chat.enforce.arguments import arguments_schema
from penstock.runtime.chat.enforce.forced_calls import call_grammar
from penstock.runtime.chat.messages import Chat, Tool
from penstock.runtime.chat.parser import ChatForms
from penstock.runtime.chat.reasoning import REASONING_FORMS
from penstock.runtime.chat.tool_formats.tools import TOOL_FORMS
from penstock.runtime.errors import InvalidRequest
from tests.runtime.chat.enforce.test_forced_calls import (
    FORMS,
    TOOLS,
    USER,
    Model,
    grammar_of,
    model_of,
    parsed,
)
from tests.support.chat import SOME_FORMS, bytes_tokenizer, spelled

STRICT = tuple(dataclasses.replace(tool, strict=tool.name != "now") for tool in TOOLS)
"""Two strict tools, and "now", which is not."""
BEGUN = {
    "hermes": "<tool_call>",
    "llama3_json": '{"name": "',
    "mistral": "[TOOL_CALLS]",
    "pythonic": "[get_weather(",
    "qwen3_coder": "<tool_call>",
    "seed_oss": "<seed:tool_call>",
    "minimax_m2": "<minimax:tool_call>",
    "glm": "<tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜>",
    "granite": "<|tool_call|>",
    "olmo3": "<function_calls>",
    "gemma4": "<|tool_call>",
}
NOW = ("now", {"a": [1, None]})
WEATHER = ("get_weather", {"city": "Rome", "days": 3})
CALLED = {form: [spelled(form, [NOW]), spelled(form, [WEATHER])] for form in FORMS}
CALLED["olmo3"] = [
    "<function_calls>\nnow(a=[1, null])\n</function_calls>",
    '<function_calls>\nget_weather(city="Rome", days=3)\n</function_calls>',
]
CALLED["pythonic"] = ["[now(a=[1, null])]", '[get_weather(city="Rome", days=3)]']
NEWER = [spelled("mistral, newer", [NOW]), spelled("mistral, newer", [WEATHER])]
"""As Mistral's models write calls whose tokenizer has [ARGS]."""
WRONG = {form: spelled(form, [("get_weather", {"days": 3})]) for form in FORMS}


ENDS_OF_TEXTS = ("\n</parameter>", "</arg_value>", '<|"|>')


def called(tokenizer: str, form: str) -> list[str]:
    return NEWER if (form, tokenizer) == ("mistral", "marked") else CALLED[form]


@functools.cache
def plain() -> Model:
    """Make a tokenizer that knows no marker as a token."""
    return model_of(bytes_tokenizer())


@functools.cache
def marked() -> Model:
    """Make a tokenizer that has every marker as a token, some of them special."""
    marks = {mark for tools in TOOL_FORMS.values() for mark in tools.markers}
    marks |= {mark for reasoning in REASONING_FORMS.values() for mark in reasoning.markers}
    ordinary = {"<tool_call>", "</tool_call>", "<think>", "</think>", "[/THINK]"}
    return model_of(bytes_tokenizer(special=sorted(marks - ordinary), ordinary=sorted(ordinary)))


MODELS = {"plain": plain, "marked": marked}


@functools.cache
def grammar(tokenizer: str, form: str, *, parallel: bool = True, reasoning: str = "") -> str:
    forms = ChatForms(TOOL_FORMS[form], REASONING_FORMS.get(reasoning))
    return grammar_of(MODELS[tokenizer](), forms, Chat(USER, STRICT, parallel_tool_calls=parallel))


def allows(model: Model, lark: str, ids: list[int]) -> bool:
    matcher = LLMatcher(model.guide, LLMatcher.grammar_from_lark(lark))
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def check(form: str, text: str) -> int:
    """Check that the calls that are found in the text are as they should be. Returns their number."""
    _, _, calls = parsed(ChatForms(TOOL_FORMS[form]), Chat(USER, STRICT), "", text)
    tools = {tool.name: tool for tool in STRICT}
    for call in calls:
        assert call.name in tools, text
        schema = arguments_schema(tools[call.name]) if tools[call.name].strict else {"type": "object"}
        jsonschema.validate(json.loads(call.arguments), schema)
    return len(calls)


@pytest.mark.parametrize("form", SOME_FORMS)
@pytest.mark.parametrize("tokenizer", MODELS)
def test_a_call_that_a_random_model_begins_follows_the_schema(tokenizer: str, form: str) -> None:
    """After some words and the beginning of a call the tokens are drawn from all that are allowed."""
    model, lark = MODELS[tokenizer](), grammar(tokenizer, form)
    found = 0
    for begin in (BEGUN[form], f"I look.\n{BEGUN[form]}", f"{called(tokenizer, form)[1]}\n{BEGUN[form]}"):
        for seed in range(3):
            text = walked(model, lark, model.codec.encode(begin, add_special_tokens=False), seed)
            found += check(form, text)
    assert found >= 9


def walked(model: Model, lark: str, ids: list[int], seed: int, most: int = 3000) -> str:
    """Make a random text of the grammar that begins so. It often ends, or closes something, where it may."""
    rng = np.random.default_rng(seed)
    matcher = LLMatcher(model.guide, LLMatcher.grammar_from_lark(lark))
    assert matcher.try_consume_tokens(ids) == len(ids)
    closing = [model.eos, *(i for text, i in model.codec.added_tokens.items() if text.startswith("</"))]
    closing += model.codec.encode('"}])', add_special_tokens=False)
    out = list(ids)
    while not matcher.is_stopped():
        assert len(out) < most
        for tag in ENDS_OF_TEXTS if rng.random() < 0.1 else ():  # which a random model would never write
            spelling = model.codec.encode(tag, add_special_tokens=False)
            out += spelling[: matcher.try_consume_tokens(spelling)]
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: model.guide.vocab_size])
        assert allowed.size > 0, matcher.get_error()
        likely = [i for i in closing if i in allowed]
        token = int(rng.choice(likely if likely and rng.random() < 0.5 else allowed))
        assert matcher.consume_token(token), matcher.get_error()
        out.append(token)
    return model.codec.decode([i for i in out if i != model.eos], skip_special_tokens=False)


PIECES = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>"),
    *("<|python_end|>", "{", "}", "[", "]", "(", ")", ":", ",", ";", " ", "\n", '"', "\\", "words"),
    *('"name"', '"type": "function"', '"id": 1', '"parameters"', '"arguments": {}', '"get"', '"now"'),
    *('"nobody"', '"n\\u0061me": "get"', '"name": "g\\u0065t"', '{"name": "', '{ "name": "get", '),
    *('"name": "now"', "now(", "get(", "[get(", "[ now(", "nobody(", 'key="a"', "key=1", '{"days": 3}'),
    *(call for calls in CALLED.values() for call in calls),
    *(*NEWER, *WRONG.values()),
]


@pytest.mark.parametrize("form", SOME_FORMS)
@pytest.mark.parametrize("tokenizer", MODELS)
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=8), by_bytes=st.booleans())
def test_what_is_allowed_holds_no_wrong_call(
    tokenizer: str, form: str, pieces: list[str], by_bytes: bool
) -> None:
    """Whatever is put together of what calls are made of; also where the text of a marker is spelt."""
    text = "".join(pieces)
    model = MODELS[tokenizer]()
    ids = plain().codec.encode(text) if by_bytes else model.codec.encode(text, add_special_tokens=False)
    if allows(model, grammar(tokenizer, form), ids):
        check(form, text)


@pytest.mark.parametrize("form", SOME_FORMS)
@pytest.mark.parametrize("tokenizer", MODELS)
def test_calls_and_words_are_allowed_and_wrong_calls_are_not(tokenizer: str, form: str) -> None:
    model, lark, one = (
        MODELS[tokenizer](),
        grammar(tokenizer, form),
        grammar(tokenizer, form, parallel=False),
    )
    calls = called(tokenizer, form)
    wrong = '[TOOL_CALLS]get_weather[ARGS]{"days": 3}' if calls is NEWER else WRONG[form]
    for text, many in (
        ("", False),
        ("Hello!", False),
        (calls[0], False),
        (f"I look.\n{calls[1]}", False),
        (f"{calls[0]}\n{calls[1]}", True),
        (f"One\n{calls[0]} two\n{calls[1]}\n", True),
    ):
        ids = model.codec.encode(text, add_special_tokens=False)
        assert allows(model, lark, ids), text
        assert check(form, text) == ("now" in text) + ("get_weather" in text)
        assert allows(model, one, ids) is not many, text
    for text in (wrong, f"I look.\n{wrong}", f"{calls[0]}\n{wrong}", wrong.replace("get_weather", "nobody")):
        if form != "pythonic" or "nobody" not in text:  # a list with an unknown name is text, without tags
            assert not allows(model, lark, model.codec.encode(text, add_special_tokens=False)), text


BAD = '"parameters": {"days": 3}'
OTHERWISE = [
    ("llama3_json", f'{{ "name": "get_weather", {BAD}}}'),
    ("llama3_json", f'  {{"name" : "get_weather", {BAD}}}'),
    ("llama3_json", f'{{\n  "name": "get_weather",\n  {BAD}\n}}'),
    ("llama3_json", f'{{"type": "function", "name": "get_weather", {BAD}}}'),
    ("llama3_json", f'{{{BAD}, "name": "get_weather"}}'),
    ("llama3_json", f'{{"\\u006eame": "get_weather", {BAD}}}'),
    ("llama3_json", f'{{"id": {{}}, "\\u006eame": "get_weather", {BAD}}}'),
    ("llama3_json", f'{{"name": "get\\u005fweather", {BAD}}}'),
    ("llama3_json", f'{{"name": "now", "parameters": {{}}}} ; {{ "name": "get_weather", {BAD}}}'),
    # A good call within an object that turns out to be a bad one.
    ("llama3_json", f'{{"id":\n{{"name": "now", "parameters": {{}}}}, "name": "get_weather", {BAD}}}'),
    ("llama3_json", f'<|python_tag|>{{"name": "get_weather", {BAD}}}'),
    ("pythonic", "[ get_weather(days=3)]"),
    ("pythonic", "  [\n get_weather(days=3)]"),
    ("pythonic", "[get_weather( days=3)]"),
    ("pythonic", "[now(), get_weather(days=3)]"),
    ("pythonic", "[now()] [get_weather(days=3)]"),
    ("pythonic", "<|python_start|>[get_weather(days=3)]<|python_end|>"),
    ("pythonic", "<|tool_call_start|>[nobody()]<|tool_call_end|>"),
    ("hermes", '<tool_call>{"arguments": {"days": 3}, "name": "get_weather"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "nobody"}</tool_call>'),
    ("mistral", '[TOOL_CALLS]get_weather{"days": 3}'),
    ("deepseek", spelled("deepseek, older", [("get_weather", {"days": 3})])),
    ("deepseek", spelled("deepseek", [("now", {}), ("get_weather", {})])),
    ("deepseek", spelled("deepseek", [("nobody", {})])),
    ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "get_weather"}]'),
    # Without the tag that announces the call, and with an argument within a text.
    ("qwen3_coder", WRONG["qwen3_coder"].removeprefix("<tool_call>")),
    ("seed_oss", WRONG["seed_oss"].removeprefix("<seed:tool_call>")),
    ("minimax_m2", WRONG["minimax_m2"].removeprefix("<minimax:tool_call>")),
    ("qwen3_coder", spelled("qwen3_coder", [("get_weather", {"city": "Rome\n<parameter=days>\nmany"})])),
    ("seed_oss", spelled("seed_oss", [("get_weather", {"city": "Rome<parameter=days>many"})])),
    ("minimax_m2", spelled("minimax_m2", [("get_weather", {"city": 'Rome<parameter name="days">many'})])),
    (
        "glm",
        spelled("glm", [("get_weather", {"city": "Rome<arg_key>days</arg_key><arg_value>many"})]),
    ),
]


@pytest.mark.parametrize(("form", "text"), OTHERWISE)
@pytest.mark.parametrize("by_bytes", [False, True])
@pytest.mark.parametrize("tokenizer", MODELS)
def test_a_wrong_call_in_another_spelling_is_not_allowed(
    tokenizer: str, by_bytes: bool, form: str, text: str
) -> None:
    """The parser would take it for a call. No other words save it."""
    model, forms = MODELS[tokenizer](), ChatForms(TOOL_FORMS[form])
    for whole in (text, f"Words.\n{text}", f"{text}\nWords."):
        calls = parsed(forms, Chat(USER, STRICT), "", whole)[2]
        assert any(call.name != "now" for call in calls), "the parser sees it"
        encode = plain().codec.encode if by_bytes else model.codec.encode
        assert not allows(model, grammar(tokenizer, form), encode(whole, add_special_tokens=False))


TEXTS = [
    'int main(void)\n{\n  return f("{");\n}',
    'As JSON:\n{"city": "Rome", "name": 3}\n[1, 2]\n{}',
    '{"id": 1}',
    "[a link](https://example.org) and [get_weather] and\n  [x(1)]",
    'Say "name": "get" or { or [ now ( or ; {',
    "<tool_cal> [TOOL_CALL] é\U0001f600\t\\",
    "a\n\n\n  b;\n;",
    "<functions> <invoker <parameter=a>1</parameter> </function>",
]


@pytest.mark.parametrize("form", SOME_FORMS)
@pytest.mark.parametrize("tokenizer", MODELS)
def test_words_that_are_no_calls_are_free(tokenizer: str, form: str) -> None:
    model, lark = MODELS[tokenizer](), grammar(tokenizer, form)
    for text in TEXTS:
        assert allows(model, lark, model.codec.encode(text, add_special_tokens=False)), text
        words, _, calls = parsed(ChatForms(TOOL_FORMS[form]), Chat(USER, STRICT), "", text)
        assert (words, calls) == (text, [])


@pytest.mark.parametrize("form", SOME_FORMS)
@pytest.mark.parametrize("tokenizer", MODELS)
def test_reasoning_may_come_first(tokenizer: str, form: str) -> None:
    """It is optional where the prompt has not opened it, and must end where it has."""
    model, forms = MODELS[tokenizer](), ChatForms(TOOL_FORMS[form], REASONING_FORMS["think"])
    call = called(tokenizer, form)[1]
    for prompt, text, allowed in (
        ("", "<think>\nhm\n</think>\n\nHi.", True),
        ("", f"<think>hm</think>\n{call}", True),
        ("", f"Hi.\n{call}", True),
        ("<think>\n", f"hm\n</think>\n\n{call}", True),
        ("<think>\n", "hm\n</think>", True),
        ("<think>\n", f"hm\n{call}", False),
        ("<think>\n", f"hm\n</think>{WRONG[form]}", False),
        ("<think>\n\n</think>\n\n", "Hi.", True),
    ):
        lark = grammar_of(model, forms, Chat(USER, STRICT), prompt)
        ids = model.codec.encode(text, add_special_tokens=False)
        assert allows(model, lark, ids) is allowed, (prompt, text)


def test_nothing_is_enforced_without_strict_tools_or_where_none_are_offered() -> None:
    forms = ChatForms(TOOL_FORMS["hermes"])
    assert call_grammar(forms, Chat(USER, TOOLS), "", {}) is None
    assert call_grammar(forms, Chat(USER, STRICT, "none"), "", {}) is None


def refusal(form: str, tool: Tool, choice: str) -> list[tuple[str, str]]:
    with pytest.raises(InvalidRequest) as caught:
        call_grammar(ChatForms(TOOL_FORMS.get(form)), Chat(USER, (Tool("a"), tool), choice), "", {})
    return [(v.field, v.description) for v in caught.value.violations]


def test_what_cannot_be_enforced_is_refused() -> None:
    """In every form where calls need a grammar; the tool that is not strict is never the reason."""
    odd = Tool("f", "", {"properties": {"a": {"multipleOf": 1e-30}}}, strict=True)
    for form in FORMS:
        for choice in ("auto", "required", "f"):
            ((field, told),) = refusal(form, odd, choice)
            assert field == "chat.tools[1].parameters_json"
            assert "multipleOf" in told
    none = "no form of tool calls is known for this model, see the option --tool-call-parser"
    assert refusal("", odd, "auto") == [("chat.tools[1].strict", none)]
    assert refusal("", odd, "required") == [("chat.tool_choice", none)]
    for key, value in (
        ("anyOf", [{"required": ["a"]}]),
        ("maxProperties", 1),
        ("dependentRequired", {"a": ["b"]}),
        ("propertyNames", {"pattern": "^a"}),
    ):
        whole = Tool("f", "", {"properties": {"a": {}}, key: value}, strict=True)
        assert refusal("pythonic", whole, "auto") == [
            ("chat.tools[1].parameters_json", f"'{key}' cannot be enforced in a Python call")
        ]
    neutral = {"properties": {"a": {"uniqueItems": False}}, "propertyNames": {"type": "string"}, "if": {}}
    for form in FORMS:
        chat = Chat(USER, (Tool("f", "", neutral, strict=True),), "required")
        assert call_grammar(ChatForms(TOOL_FORMS[form]), chat, "", {}) is not None
    assert refusal("pythonic", Tool("a b", strict=True), "auto") == [
        ("chat.tools[1].name", "'a b' cannot be written as a Python call")
    ]


def test_a_tool_that_python_cannot_spell_does_not_stand_in_the_way() -> None:
    """Where it is not strict: the model could not call it anyway."""
    chat = Chat(USER, (Tool("a b"), STRICT[0]))
    lark = grammar_of(plain(), ChatForms(TOOL_FORMS["pythonic"]), chat)
    assert allows(plain(), lark, plain().codec.encode(CALLED["pythonic"][1]))
