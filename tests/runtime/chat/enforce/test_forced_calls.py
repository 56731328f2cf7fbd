"""Grammars of required calls, tested with llguidance itself.

Random outputs that its masks allow are read back by the parsers and by an independent JSON Schema validator.
The grammars must also allow the calls that a model would write.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import jsonschema
import llguidance.hf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from transformers import AutoTokenizer

from penstock.runtime.chat.enforce.arguments import arguments_schema
from penstock.runtime.chat.enforce.forced_calls import call_grammar
from penstock.runtime.chat.messages import Chat, ChatTurn, Tool
from penstock.runtime.chat.parser import ChatForms
from penstock.runtime.chat.reasoning import REASONING_FORMS
from penstock.runtime.chat.tool_formats.events import CallPiece as Call
from penstock.runtime.chat.tool_formats.events import joined
from penstock.runtime.chat.tool_formats.tools import TOOL_FORMS
from penstock.runtime.errors import InvalidRequest
from penstock.runtime.loading.hub import DEMO_DIRECTORY
from penstock.runtime.text.codec import TextCodec
from tests.support.chat import SOME_FORMS, bytes_tokenizer, spelled
from tests.support.suite.drawing import few

USER = (ChatTurn("user", "hi"),)
FORMS = sorted(TOOL_FORMS)
TOOLS = (
    Tool(
        "get_weather",
        "Look.",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "days": {"type": "integer", "minimum": 0, "maximum": 20},
                "wind": {"type": "boolean"},
            },
            "required": ["city"],
        },
    ),
    Tool(  # its name is the beginning of another tool's name, and its values spell markers
        "get",
        "",
        {
            "type": "object",
            "properties": {
                "key": {"enum": ["a", '"}}</tool_call>', "[/THINK]\\\n", "é\U0001f600"]},
                "at": {"$ref": "#/$defs/point"},
                "any_of": {"type": "array", "items": {"enum": [True, None]}, "maxItems": 2},
            },
            "$defs": {
                "point": {
                    "type": "object",
                    "properties": {
                        "x": {"type": "number", "minimum": -1, "maximum": 1},
                        "ok": {"type": "boolean"},
                    },
                    "required": ["ok"],
                    "additionalProperties": False,
                }
            },
        },
    ),
    Tool("now"),
)
ANYTHING = Tool("anything", "", {"type": "object"})


@dataclass(frozen=True)
class Model:
    """A tokenizer, with our codec and with llguidance's view of it."""

    codec: TextCodec
    guide: LLTokenizer
    eos: int

    def walk(self, grammar: str, seed: int, max_tokens: int = 3000) -> str:
        """Make a random text of the grammar. If it may end, or close something, it often does."""
        rng = np.random.default_rng(seed)
        matcher = LLMatcher(self.guide, LLMatcher.grammar_from_lark(grammar))
        ends = [
            self.eos,
            *(i for text, i in self.codec.added_tokens.items() if text.startswith(("</", "[/", "<channel|"))),
        ]
        out: list[int] = []
        while not matcher.is_stopped():
            assert len(out) < max_tokens
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: self.guide.vocab_size])
            assert allowed.size > 0, matcher.get_error()
            likely = [i for i in ends if i in allowed]
            token = int(rng.choice(likely if likely and rng.random() < 0.4 else allowed))
            assert matcher.consume_token(token), matcher.get_error()
            out.append(token)
        return self.codec.decode([i for i in out if i != self.eos], skip_special_tokens=False)

    def allows(self, grammar: str, text: str) -> bool:
        """Say whether the grammar allows the text, as the tokenizer splits it, as a whole output."""
        matcher = LLMatcher(self.guide, LLMatcher.grammar_from_lark(grammar))
        ids = self.codec.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def model_of(tokenizer: Any) -> Model:
    guide = llguidance.hf.from_tokenizer(tokenizer)
    return Model(TextCodec(tokenizer), guide, guide.eos_token)


@pytest.fixture(scope="module")
def demo() -> Model:
    return model_of(AutoTokenizer.from_pretrained(str(DEMO_DIRECTORY)))


@pytest.fixture(scope="module")
def marked() -> Model:
    """Make a tokenizer that has every marker as a token, some of them special."""
    marks = {mark for tools in TOOL_FORMS.values() for mark in tools.markers}
    marks |= {mark for reasoning in REASONING_FORMS.values() for mark in reasoning.markers}
    ordinary = {"<tool_call>", "</tool_call>", "<think>", "</think>", "[/THINK]"}
    return model_of(bytes_tokenizer(special=sorted(marks - ordinary), ordinary=sorted(ordinary)))


def grammar_of(model: Model, forms: ChatForms, chat: Chat, prompt: str = "") -> str:
    grammar = call_grammar(forms, chat, prompt, model.codec.added_tokens)
    assert grammar is not None
    is_error, messages = LLMatcher.validate_grammar_with_warnings(
        LLMatcher.grammar_from_lark(grammar), model.guide
    )
    assert (is_error, messages) == (False, [])
    return grammar


def parsed(forms: ChatForms, chat: Chat, prompt: str, text: str) -> tuple[str, str, list[Call]]:
    """Return what the parser makes of the text: (words, reasoning, calls)."""
    parser = forms.parser(chat, prompt)
    parts = [parser.push(text), parser.flush()]
    return (
        "".join(p.text for p in parts),
        "".join(p.reasoning for p in parts),
        joined([call for p in parts for call in p.calls]),
    )


CHOICES = ("required", "get", "get_weather", "now")


@pytest.mark.parametrize("choice", few(CHOICES, ("required", "get_weather"), ci=CHOICES))
@pytest.mark.parametrize("form", SOME_FORMS)
@pytest.mark.parametrize(
    ("tokenizer", "reasoning"),
    [
        ("demo", None),
        ("demo", "think"),
        ("marked", None),
        ("marked", "think"),
        ("marked", "magistral"),
        ("marked", "gemma4"),
    ],
)
def test_what_is_enforced_is_parsed_back(tokenizer, reasoning, form, choice, request) -> None:
    """The output consists of calls only, each of a tool that was asked for, with valid arguments."""
    model: Model = request.getfixturevalue(tokenizer)
    forms = ChatForms(TOOL_FORMS[form], REASONING_FORMS[reasoning] if reasoning else None)
    tools = {tool.name: tool for tool in TOOLS}
    chat = Chat(USER, TOOLS, choice)
    for prompt in (
        ("", forms.reasoning.start + forms.reasoning.title + "\n") if forms.reasoning is not None else ("",)
    ):
        grammar = grammar_of(model, forms, chat, prompt)
        for seed in range(2):
            text = model.walk(grammar, seed)
            words, _, calls = parsed(forms, chat, prompt, text)
            assert words == "", text
            assert len(calls) == 1 if choice != "required" else calls, text
            for call in calls:
                assert choice in ("required", call.name)
                jsonschema.validate(json.loads(call.arguments), arguments_schema(tools[call.name]))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(-1e6, 1e6).filter(lambda x: "e" not in repr(x))
    | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)
    | st.sampled_from(["</tool_call>", "<think>", "[TOOL_CALLS]", '"}}\n', "\\"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"é', max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.ci
@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral", "deepseek", "deepseek, older"])
@pytest.mark.parametrize("tokenizer", ["demo", "marked"])
@settings(max_examples=40, deadline=None)
@given(
    arguments=st.lists(
        st.dictionaries(st.text("ab_", max_size=3), VALUES, max_size=3), min_size=1, max_size=3
    )
)
def test_what_a_model_would_write_is_let_through_and_parsed_back(
    tokenizer, form, demo, marked, arguments
) -> None:
    """A tool that takes any arguments may get any arguments. If one call is required, a second is refused."""
    model = marked if tokenizer == "marked" else demo
    forms = ChatForms(TOOL_FORMS[form.removesuffix(", older")])
    newer = ", newer" if tokenizer == "marked" and form in ("mistral", "glm") else ""
    text = spelled(f"{form}{newer}", [("anything", one) for one in arguments])
    for choice in ("required", "anything"):
        chat = Chat(USER, (ANYTHING,), choice)
        grammar = grammar_of(model, forms, chat)
        # The tokenizer would make tokens of markers in strings, where the grammar expects them as text.
        ids = model.codec.encode(text)
        if not any(mark in json.dumps(arguments) for mark in model.codec.added_tokens):
            matcher = LLMatcher(model.guide, LLMatcher.grammar_from_lark(grammar))
            assert (matcher.try_consume_tokens(ids) == len(ids)) == (
                choice == "required" or len(arguments) == 1
            )
    found = parsed(forms, Chat(USER, (ANYTHING,)), "", text)[2]
    assert [json.loads(call.arguments) for call in found] == arguments


@pytest.mark.parametrize(
    ("tools", "arguments", "allowed"),
    [
        # Required keywords must be there and others may be, in the order of the schema.
        (TOOLS[:1], 'city="Paris"', True),
        (TOOLS[:1], 'city="Paris", days=3', True),
        (TOOLS[:1], 'city="Paris", wind=True', True),
        (TOOLS[:1], 'city="Paris", days=3, wind=False', True),
        (TOOLS[:1], 'days=3', False),
        (TOOLS[:1], '', False),
        (TOOLS[:1], 'days=3, city="Paris"', False),
        (TOOLS[:1], 'city="Paris", days=21', False),
        (TOOLS[:1], 'city="Paris", wind=1', False),
        (TOOLS[:1], 'city="Paris", more=1', False),
        ((Tool("get_weather", "", {"properties": {"a": {"type": "null"}, "b": True}}),), "b=[1, {}]", True),
        ((Tool("get_weather", "", {"properties": {"a": {"type": "null"}, "b": True}}),), "a=null, b=2", True),
        ((Tool("get_weather", "", {"required": ["x"]}),), 'x="any"', True),
        ((Tool("get_weather", "", {"required": ["x"]}),), "", False),
        # What cannot be enforced of a tool that is not strict is ignored.
        ((Tool("get_weather", "", {"properties": {"x y": {}, "a": {}}, "required": ["x y"]}),), "a=1", True),
        ((Tool("get_weather", "", {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}),), "a=1", True),
        ((Tool("get_weather", "", {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}),), "b=1", False),
        ((Tool("get_weather", "", {"$ref": "#/$defs/a", "$defs": {"a": {}}}),), 'x=1, y="z"', True),
    ],
)  # fmt: skip
def test_python_keywords(tools, arguments: str, allowed: bool, marked: Model) -> None:
    forms = ChatForms(TOOL_FORMS["pythonic"])
    grammar = grammar_of(marked, forms, Chat(USER, tools, "required"))
    text = f"[get_weather({arguments})]"
    assert marked.allows(grammar, text) is allowed
    assert marked.allows(grammar, f"<|python_start|>{text}<|python_end|>") is allowed
    assert marked.allows(grammar, f"{text[:-1]}, {text[1:]}") is allowed
    assert not marked.allows(grammar, text + text)


@pytest.mark.parametrize(
    ("prompt", "text", "allowed"),
    [
        ("<|assistant|>", "{call}", True),
        ("<|assistant|>", "<think>\nso\n</think>\n\n{call}", True),
        ("<|assistant|>", "<think>so</think>{call}", True),
        ("<|assistant|>", "so</think>{call}", False),
        ("<|assistant|>", "<think>so{call}", False),
        ("<|assistant|>", "Well. {call}", False),
        ("<|assistant|>", "{call} Well.", False),
        ("<|assistant|><think>\n", "so</think>\n\n{call}", True),
        ("<|assistant|><think>\n", "{call}", False),
        ("<|assistant|><think>\n\n</think>\n\n", "{call}", True),
        ("<|assistant|><think>\n\n</think>\n\n", "<think>so</think>{call}", False),
    ],
)
@pytest.mark.parametrize("with_tokens", [True, False])
def test_reasoning_comes_first(
    prompt: str, text: str, allowed: bool, with_tokens: bool, marked: Model
) -> None:
    """This holds if the tags are tokens, and if they are plain text."""
    model = marked if with_tokens else model_of(bytes_tokenizer())
    forms = ChatForms(TOOL_FORMS["hermes"], REASONING_FORMS["think"])
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    grammar = grammar_of(model, forms, Chat(USER, TOOLS, "now"), prompt)
    assert model.allows(grammar, text.replace("{call}", call)) is allowed


def test_schemas_are_closed_unless_they_allow_more() -> None:
    closed = Tool("f", "", {"properties": {"a": {}}})
    assert arguments_schema(closed) == {
        "type": "object",
        "properties": {"a": {}},
        "additionalProperties": False,
    }
    said: list[dict[str, Any]] = [
        {"type": "object"}, {"properties": {}, "allOf": []}, {"properties": {}, "patternProperties": {}},
    ]  # fmt: skip
    for parameters in said:
        assert arguments_schema(Tool("f", "", parameters)) == {**parameters, "type": "object"}


def test_there_is_no_grammar_if_no_call_is_required() -> None:
    for choice in ("auto", "none"):
        assert call_grammar(ChatForms(TOOL_FORMS["hermes"]), Chat(USER, TOOLS, choice), "", {}) is None
    assert call_grammar(ChatForms(), Chat(USER), "", {}) is None


def refused(forms: ChatForms, tools: tuple[Tool, ...]) -> list[tuple[str, str]]:
    with pytest.raises(InvalidRequest) as caught:
        call_grammar(forms, Chat(USER, tools, "required"), "", {})
    return [(v.field, v.description) for v in caught.value.violations]


def test_refusals_of_tools_that_cannot_be_enforced() -> None:
    assert refused(ChatForms(), TOOLS) == [
        (
            "chat.tool_choice",
            "no form of tool calls is known for this model, see the option --tool-call-parser",
        )
    ]
    pythonic = ChatForms(TOOL_FORMS["pythonic"])
    assert refused(
        pythonic,
        (*TOOLS, Tool("a b"), Tool("f", "", {"properties": {"x y": {}}, "anyOf": [False]}, strict=True)),
    ) == [
        ("chat.tools[3].name", "'a b' cannot be written as a Python call"),
        ("chat.tools[4].parameters_json", "'x y' cannot be a keyword of a Python call"),
        ("chat.tools[4].parameters_json", "'anyOf' cannot be enforced in a Python call"),
    ]


def test_mistral_names_that_only_the_older_form_can_spell(marked: Model) -> None:
    """If a name cannot be spelt in the newer form, calls are written in the older one."""
    forms = ChatForms(TOOL_FORMS["mistral"])
    chat = Chat(USER, (Tool('odd "name"{'), Tool("now")), "required")
    text = '[TOOL_CALLS] [{"name": "odd \\"name\\"{", "arguments": {}}]'
    assert marked.allows(grammar_of(marked, forms, chat), text)
    assert parsed(forms, chat, "", text) == ("", "", [Call('odd "name"{', "{}")])
