"""Grammars that begin where a model's reasoning ends, as the chat package writes them, under the grammar
package's masks.

They are tested with tags that are tokens, as the demo model's are, and with tags that are plain text. Outputs
are split by chat's parser, and answers are judged by Python's own JSON and regular expressions.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from penstock.runtime.chat.enforce.forced_calls import thinking_first
from penstock.runtime.chat.messages import Chat, ChatTurn
from penstock.runtime.chat.parser import ChatForms
from penstock.runtime.chat.reasoning import REASONING_FORMS
from penstock.runtime.errors import InvalidRequest
from penstock.runtime.grammar.compile.compiler import CompilerConfig, GrammarCompiler
from penstock.runtime.grammar.vocabulary import Vocabulary
from penstock.runtime.requests.constraint import mask_words
from penstock.runtime.requests.grammar import Grammar
from tests.support.chat import bytes_tokenizer
from tests.support.schemas import RandomWriter, allowed_ids

CHAT = Chat((ChatTurn("user", "hi"),))
FORMS = ChatForms(None, REASONING_FORMS["think"])
OPENED, SILENT, CLOSED = "<|assistant|><think>\n", "<|assistant|>", "<|assistant|><think>\n\n</think>\n\n"
SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "of": {"enum": ["tea", "</think>"]}},
    "required": ["on", "of"],
    "additionalProperties": False,
}


def is_json(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


KINDS: Mapping[str, tuple[Grammar, str, Callable[[str], object]]] = {
    "json_schema": (Grammar.json_schema(json.dumps(SCHEMA)), '{"on": true, "of": "tea"}', is_json),
    "json_object": (
        Grammar.json_object(),
        '{"a": 1}',
        lambda text: isinstance(json.loads(text), dict),
    ),
    "regex": (Grammar.regex("[m-p]{3}x?"), "mop", lambda text: re.fullmatch("[m-p]{3}x?", text)),
    "lark": (
        Grammar.ebnf('start: "<" thinking ">"\nthinking: "c" | "d" thinking\n%ignore / /'),
        "<ddc>",
        lambda text: re.fullmatch("<d*c>", text.replace(" ", "")),
    ),
    "gbnf": (Grammar.ebnf('root ::= "c" [0-9] "."'), "c7.", lambda text: re.fullmatch(r"c\d\.", text)),
    "choice": (Grammar.choice(["no", "yes"]), "yes", lambda text: text in ("no", "yes")),
}


@dataclass(frozen=True)
class Model:
    """A tokenizer, and the compiler of grammars for it."""

    backend: Tokenizer
    vocabulary: Vocabulary
    compiler: GrammarCompiler

    def after(self, grammar: Grammar, prompt: str, forms: ChatForms = FORMS) -> Grammar:
        added = {token.content: i for i, token in self.backend.get_added_tokens_decoder().items()}
        return dataclasses.replace(grammar, before=thinking_first(forms, prompt, added))

    def allows(self, grammar: Grammar, text: str) -> bool:
        """Say whether the grammar allows the text, as the tokenizer splits it, as a whole output."""
        constraint = self.compiler.constraint(grammar)
        try:
            constraint.accept(self.backend.encode(text, add_special_tokens=False).ids)
            constraint.accept(self.vocabulary.eos_token_ids[:1])
        except RuntimeError:
            return False
        return True


@pytest.fixture(scope="module", params=["tokens", "text"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    if request.param == "tokens":
        fixtures = (request.getfixturevalue(name) for name in ("backend", "vocabulary", "compiler"))
        yield Model(*fixtures)
        return
    backend = bytes_tokenizer().backend_tokenizer
    vocabulary = Vocabulary.from_tokenizer(backend, 257, [256])
    compiler = GrammarCompiler(vocabulary, CompilerConfig(time_limit_s=60.0))
    yield Model(backend, vocabulary, compiler)
    compiler.close()


def parsed(text: str, prompt: str) -> tuple[str, str]:
    """(answer, reasoning), as chat's parser splits the text."""
    parser = FORMS.parser(CHAT, prompt)
    parts = [parser.push(text), parser.flush()]
    return "".join(part.text for part in parts), "".join(part.reasoning for part in parts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("prompt", "before", "allowed"),
    [
        (OPENED, "so { <b>\n</think>\n\n", True),
        (OPENED, "</think>", True),
        (OPENED, "so</thin k></think>\n", True),
        (OPENED, "", False),
        (OPENED, "so</think>\n\n\n\n", False),
        (SILENT, "", True),
        (SILENT, "<think>\nso\n</think>\n\n", True),
        (SILENT, "so</think>", False),
        (SILENT, "<think>so", False),
        (CLOSED, "", True),
        (CLOSED, "<think>so</think>", False),
    ],
)
def test_the_grammar_binds_the_answer_and_not_the_reasoning(model, kind, prompt, before, allowed):
    grammar, answer, _ = KINDS[kind]
    wrapped = model.after(grammar, prompt)
    assert model.allows(wrapped, before + answer) is allowed
    assert not model.allows(wrapped, before + "?"), "an answer that the grammar does not know must be refused"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [OPENED, SILENT])
def test_whatever_is_written_the_answer_matches(model, kind, prompt):
    """Models of random logits write reasoning and answer. If the closing tag is plain text, they would never
    write it, so their reasoning is written for them.
    """
    grammar, _, matches = KINDS[kind]
    wrapped = model.after(grammar, prompt)
    writer = RandomWriter(model.vocabulary.tokens, model.vocabulary.eos_token_ids)
    begun = "hm</think>\n" if prompt == OPENED and not model.backend.token_to_id("</think>") else ""
    found = []
    for seed in range(8):
        constraint = model.compiler.constraint(wrapped)
        constraint.accept(model.backend.encode(begun, add_special_tokens=False).ids)
        walk = writer.write(constraint, seed)
        spoken = [i for i in walk.token_ids if i not in model.vocabulary.eos_token_ids]
        text = begun + b"".join(model.vocabulary.tokens[i] for i in spoken).decode(errors="replace")
        if walk.complete:
            found.append(parsed(text, prompt))
            assert matches(found[-1][0]), text
    assert found
    assert prompt == SILENT or any(reasoning for _, reasoning in found)


def test_no_end_token_is_allowed_within_the_reasoning(model):
    """Of all special tokens only the closing tag is allowed there; all other tokens that are text are."""
    constraint = model.compiler.constraint(model.after(KINDS["choice"][0], OPENED))
    constraint.accept(model.backend.encode("hm", add_special_tokens=False).ids)
    mask = np.zeros(mask_words(len(model.vocabulary.tokens)), np.int32)
    constraint.fill(mask)
    allowed = set(allowed_ids(mask, len(model.vocabulary.tokens)).tolist())
    special = model.vocabulary.special
    tokens = dict(enumerate(model.vocabulary.tokens))
    assert {tokens[i] for i in allowed & special} == {b"</think>"} & {tokens[i] for i in special}
    assert {i for i, token in tokens.items() if is_text(token) and i not in special} <= allowed


def is_text(token: bytes) -> bool:
    """Say whether the token stands for whole characters."""
    try:
        return token.decode() != ""
    except UnicodeDecodeError:
        return False


def test_without_reasoning_the_grammar_is_unchanged(model):
    grammar = KINDS["regex"][0]
    assert model.after(grammar, OPENED, ChatForms()) == grammar
    assert model.after(grammar, CLOSED) == grammar
    assert model.after(grammar, OPENED) != grammar, "with reasoning it is another grammar"


def test_errors_are_those_of_the_grammar_alone(model):
    """The words and the field are the same as without reasoning."""
    for grammar in (
        Grammar.regex("(a"),
        Grammar.ebnf('start: "a" nowhere'),
        Grammar.json_schema('{"not": {}}'),
    ):
        told = []
        for each in (grammar, model.after(grammar, OPENED)):
            with pytest.raises(InvalidRequest) as caught:
                model.compiler.compile(each)
            (violation,) = caught.value.violations
            told.append((violation.field, violation.description))
        assert told[0] == told[1]
