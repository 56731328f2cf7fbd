"""Grammars of outputs in Harmony, tested with llguidance itself: random outputs that its masks allow are read
back by the parser, and what a model would write is allowed.
"""

from __future__ import annotations

import dataclasses
import functools
import json

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from penstock.runtime.chat.enforce.arguments import arguments_schema
from penstock.runtime.chat.enforce.forced_calls import call_grammar, calls_or_answer, thinking_first
from penstock.runtime.chat.messages import Chat, ChatTurn, Tool
from penstock.runtime.chat.parser import ChatForms
from penstock.runtime.chat.tool_formats.events import CallPiece as Call
from penstock.runtime.chat.tool_formats.events import Parsed, joined
from penstock.runtime.chat.tool_formats.harmony import MARKERS
from penstock.runtime.errors import InvalidRequest
from penstock.runtime.grammar.compile.compiler import CompilerConfig, GrammarCompiler
from penstock.runtime.grammar.vocabulary import Vocabulary
from penstock.runtime.requests.grammar import Grammar
from penstock.runtime.text.codec import TextCodec
from tests.support.chat import bytes_tokenizer

FORMS = ChatForms(is_harmony=True)
USER = (ChatTurn("user", "hi"),)
PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"
NEXT = "<|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Hm.<|end|>{NEXT}"
FINAL = "<|channel|>final<|message|>"
CITY = {"type": "string", "maxLength": 6}
DAYS = {"type": "integer", "minimum": 0, "maximum": 20}
WEATHER = Tool("get_weather", "", {"properties": {"city": CITY, "days": DAYS}, "required": ["city"]})
TOOLS = (WEATHER, Tool("get", "", {"properties": {"key": {"enum": ["<|call|>", '"}']}}}), Tool("now"))
STRICT = tuple(dataclasses.replace(tool, strict=tool.name != "now") for tool in TOOLS)
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'
CALL_2 = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome"}'
WRONG = CALL.replace('"city": "Rome"', '"days": 3')


@dataclasses.dataclass(frozen=True)
class Model:
    """A tokenizer whose tokens are bytes and the markers, with gpt-oss' end tokens."""

    codec: TextCodec
    guide: LLTokenizer
    vocabulary: Vocabulary

    def allows(self, lark: str, text: str, *, by_bytes: bool = False) -> bool:
        matcher = LLMatcher(self.guide, LLMatcher.grammar_from_lark(lark))
        ids = self.codec.encode(text)
        if by_bytes:
            ids = [i for char in text for i in self.codec.encode(char)]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def walk(self, lark: str, seed: int, begin: str = "", most: int = 400) -> str:
        """Make a random text of the grammar that begins so. Where it may end, or end a message, it often
        does.
        """
        rng = np.random.default_rng(seed)
        matcher = LLMatcher(self.guide, LLMatcher.grammar_from_lark(lark))
        out = self.codec.encode(begin)
        assert matcher.try_consume_tokens(out) == len(out)
        ends = [*self.vocabulary.eos_token_ids, *(self.codec.encode(m)[0] for m in ("<|end|>", '"', "}"))]
        while not matcher.is_stopped():
            assert len(out) < most
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: self.guide.vocab_size])
            assert allowed.size > 0, matcher.get_error()
            likely = [i for i in ends if i in allowed]
            token = int(rng.choice(likely if likely and rng.random() < 0.4 else allowed))
            assert matcher.consume_token(token), matcher.get_error()
            out.append(token)
        spoken = [i for i in out if i not in self.vocabulary.eos_token_ids]
        return self.codec.decode(spoken, skip_special_tokens=False)


@functools.cache
def model() -> Model:
    tokenizer = bytes_tokenizer(special=[m for m in MARKERS if m != "<|return|>"], end="<|return|>")
    codec = TextCodec(tokenizer)
    backend = tokenizer.backend_tokenizer
    ends = [codec.encode(marker)[0] for marker in ("<|return|>", "<|call|>")]
    vocabulary = Vocabulary.from_tokenizer(backend, backend.get_vocab_size(), ends)
    return Model(codec, vocabulary.to_llguidance(), vocabulary)


def grammar_of(chat: Chat, prompt: str = PROMPT) -> str:
    lark = call_grammar(FORMS, chat, prompt, model().codec.added_tokens)
    assert lark is not None
    is_error, messages = LLMatcher.validate_grammar_with_warnings(
        LLMatcher.grammar_from_lark(lark), model().guide
    )
    assert (is_error, messages) == (False, [])
    return lark


def parsed(text: str, prompt: str = PROMPT) -> Parsed:
    parser = FORMS.parser(Chat(USER, TOOLS), prompt)
    parts = [parser.push(text), parser.flush()]
    return Parsed(
        "".join(p.text for p in parts),
        "".join(p.reasoning for p in parts),
        tuple(joined([call for p in parts for call in p.calls])),
    )


def check(calls: tuple[Call, ...], tools: tuple[Tool, ...]) -> None:
    """Check that the calls are of the tools, with arguments that the schemas accept."""
    schemas = {tool.name: arguments_schema(tool) for tool in tools}
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


BEGUN = ("", "<|channel|>analysis<|message|>", FINAL)


@pytest.mark.parametrize("choice", ["required", "get", "get_weather", "now"])
@pytest.mark.parametrize("begun", BEGUN)
def test_what_is_enforced_is_parsed_back(choice: str, begun: str) -> None:
    """One call of a tool that was asked for, with valid arguments, after any reasoning, and no text."""
    lark = grammar_of(Chat(USER, TOOLS, choice), PROMPT + begun)
    has_thought = False
    for seed in range(6):
        text = model().walk(lark, seed)
        found = parsed(text, PROMPT + begun)
        assert found.text == ""
        assert len(found.calls) == 1, text
        assert choice in ("required", found.calls[0].name)
        check(found.calls, TOOLS)
        has_thought = has_thought or found.reasoning != ""
    assert has_thought or begun == FINAL


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        (CALL, True),
        (CALL_2, True),
        (f"{THOUGHT}{CALL}", True),
        (f"{THOUGHT}{THOUGHT}{CALL_2}", True),
        (CALL.replace(" <|constrain|>json", ""), True),
        (CALL.replace(" <|constrain|>json", "<|constrain|>json"), True),
        (WRONG, False),
        ("", False),
        ("Hi", False),
        (THOUGHT, False),
        (f"{FINAL}Hi", False),
        (f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}", False),
        (f"{CALL}<|end|>{NEXT}{CALL}", False),
        (CALL.replace("get_weather", "nobody"), False),
        (CALL.replace("functions.", ""), False),
    ],
)
def test_a_call_that_must_be_made(text: str, allowed: bool) -> None:
    """After the arguments the grammar is complete, and so any end token may come, `<|call|>` among them."""
    assert model().allows(grammar_of(Chat(USER, TOOLS, "required")), text) is allowed


@pytest.mark.parametrize("parallel", [True, False])
def test_strict_tools_leave_the_rest_free(parallel: bool) -> None:
    lark = grammar_of(Chat(USER, STRICT, parallel_tool_calls=parallel))
    for text, allowed in (
        (f"{FINAL}Hi <b> {{", True),
        (f"{THOUGHT}{FINAL}Hi", True),
        (THOUGHT.removesuffix(f"<|end|>{NEXT}"), True),
        (f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}", True),
        (CALL_2, True),
        ('<|channel|>commentary to=functions.now<|message|>{"a": [1]}', True),
        (WRONG, False),
        (f"{THOUGHT}{WRONG}", False),
        (CALL.replace("get_weather", "nobody"), False),
        (CALL.replace("functions.", ""), False),
        (f"{FINAL}Hi<|end|>{NEXT}{WRONG}", False),
    ):  # fmt: skip
        assert model().allows(lark, text) is allowed, text
    # What a text spells in other tokens would end the message, so it is not allowed either.
    spelt = f"{FINAL}Hi<|end|>"
    assert not model().allows(lark, spelt, by_bytes=True)


def test_whatever_strict_tools_allow_holds_no_wrong_call() -> None:
    lark = grammar_of(Chat(USER, STRICT))
    found = 0
    for begin in ("", THOUGHT, CALL[:40], CALL_2[:20], f"{FINAL}Hm<|end|>{NEXT} to=functions.g"):
        for seed in range(4):
            calls = parsed(model().walk(lark, seed, begin)).calls
            check(tuple(call for call in calls if call.name != "now"), STRICT[:2])
            found += len(calls)
    assert found >= 12


@pytest.fixture(scope="module")
def compiler():
    compiler = GrammarCompiler(model().vocabulary, CompilerConfig(time_limit_s=60.0))
    yield compiler
    compiler.close()


ANSWER = Grammar.json_schema(
    '{"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}'
)


def accepts(compiler: GrammarCompiler, before: str, text: str) -> bool:
    constraint = compiler.constraint(dataclasses.replace(ANSWER, before=before))
    try:
        constraint.accept(model().codec.encode(text))
        constraint.accept(model().vocabulary.eos_token_ids[:1])
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(
    ("begun", "text", "allowed"),
    [
        ("", f'{THOUGHT}{FINAL}{{"on": true}}', True),
        ("", f'{FINAL}{{"on": true}}', True),
        ("", f"{THOUGHT}{FINAL}yes", False),
        ("", '{"on": true}', False),
        ("", f'<|channel|>commentary<|message|>So.<|end|>{NEXT}{FINAL}{{"on": true}}', False),
        ("<|channel|>analysis<|message|>", f'{{"no"<|end|>{NEXT}{FINAL}{{"on": true}}', True),
        ("<|channel|>analysis<|message|>", f'{FINAL}{{"on": true}}', False),
        (FINAL, '{"on": true}', True),
        (FINAL, f'{FINAL}{{"on": true}}', False),
    ],
)
def test_a_constraint_is_for_the_message_of_the_final_channel(
    begun: str, text: str, allowed: bool, compiler: GrammarCompiler
) -> None:
    prompt = PROMPT + begun
    before = thinking_first(FORMS, prompt, model().codec.added_tokens)
    assert accepts(compiler, before, text) is allowed
    chat = Chat(USER, STRICT)
    either = calls_or_answer(FORMS, chat, prompt, model().codec.added_tokens)
    assert accepts(compiler, either, text) is allowed
    assert accepts(compiler, either, CALL) is (begun == "")
    assert not accepts(compiler, before, CALL)
    assert not accepts(compiler, either, WRONG)


def test_what_cannot_be_enforced_is_refused() -> None:
    tokens = model().codec.added_tokens
    chat = Chat(USER, (Tool("a b"), Tool("ok")), "required")
    with pytest.raises(InvalidRequest) as caught:
        call_grammar(FORMS, chat, PROMPT, tokens)
    assert [(v.field, v.description) for v in caught.value.violations] == [
        ("chat.tools[0].name", "'a b' cannot be written as a recipient in Harmony")
    ]
    lacks = "<|start|>, <|channel|>, <|message|>, <|end|>"
    told = f"grammars for Harmony need tokens that the tokenizer does not have: {lacks}"
    for field, write in (
        ("chat.tool_choice", lambda: call_grammar(FORMS, chat, PROMPT, {})),
        ("constraint", lambda: thinking_first(FORMS, PROMPT, {})),
    ):
        with pytest.raises(InvalidRequest) as caught:
            write()
        assert [(v.field, v.description) for v in caught.value.violations] == [(field, told)]


def test_a_tool_that_no_header_can_name_does_not_stand_in_the_way() -> None:
    """Where it is not strict: the model could not call it anyway."""
    assert model().allows(grammar_of(Chat(USER, (Tool("a b"), STRICT[0]))), CALL)
