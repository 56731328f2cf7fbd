"""Grammars of tool calls, as the chat package writes them, under the grammar package's masks and limits."""

import json

import jsonschema
import numpy as np
import pytest

from penstock.runtime.chat.enforce.forced_calls import call_grammar
from penstock.runtime.chat.messages import Chat, ChatTurn, Tool
from penstock.runtime.chat.parser import ChatForms
from penstock.runtime.chat.reasoning import REASONING_FORMS
from penstock.runtime.chat.tool_formats.events import joined
from penstock.runtime.chat.tool_formats.tools import TOOL_FORMS
from penstock.runtime.requests.constraint import mask_words
from penstock.runtime.requests.grammar import Grammar, GrammarKind
from tests.runtime.chat.enforce.test_free_text import CALLED, STRICT

KNOWN = {
    "city": {"type": "string", "maxLength": 8},
    "days": {"type": "integer", "minimum": 1, "maximum": 14},
}
WEATHER = {
    "type": "object",
    "properties": {**KNOWN, "days": {**KNOWN["days"], "not": {"const": 13}}},
    "required": ["city"],
    "additionalProperties": False,
}
"""A schema with a keyword that llguidance does not know, because the grammar of a call may ignore such
keywords.
"""


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("form", sorted(TOOL_FORMS))
def test_what_is_written_is_a_call(form, thinks, compiler, backend, vocabulary, writer):
    chat = Chat((ChatTurn("user", "hi"),), (Tool("get_weather", "", WEATHER),), tool_choice="get_weather")
    forms = ChatForms(TOOL_FORMS[form], REASONING_FORMS["think"] if thinks else None)
    added = {token.content: i for i, token in backend.get_added_tokens_decoder().items()}
    prompt = "<think>\n" if thinks else ""
    lark = call_grammar(forms, chat, prompt, added)
    assert lark is not None
    grammar = Grammar(GrammarKind.EBNF, lark, field="chat.tool_choice")
    walks = [writer.write(compiler.constraint(grammar), seed) for seed in range(6)]
    written = [walk.token_ids for walk in walks if walk.complete]
    assert len(written) >= 4
    for token_ids in written:
        spoken = [i for i in token_ids if i not in vocabulary.eos_token_ids]
        parser = forms.parser(chat, prompt)
        text = b"".join(vocabulary.tokens[i] for i in spoken).decode()
        parsed = [parser.push(text), parser.flush()]
        (call,) = joined([call for part in parsed for call in part.calls])
        assert call.name == "get_weather"
        jsonschema.validate(json.loads(call.arguments), {**WEATHER, "properties": KNOWN})
        assert "".join(part.text for part in parsed) == ""


@pytest.mark.parametrize("form", sorted(CALLED))
def test_text_with_calls_stays_within_the_limits(form, compiler, backend, vocabulary):
    """The masks of texts, calls and what resembles them are made in new lexers, which know nothing yet."""
    added = {token.content: i for i, token in backend.get_added_tokens_decoder().items()}
    lark = call_grammar(ChatForms(TOOL_FORMS[form]), Chat((ChatTurn("user", "hi"),), STRICT), "", added)
    mask = np.zeros(mask_words(len(vocabulary.tokens)), np.int32)
    texts = ("\n".join(["I look.", *CALLED[form]]), 'é\n{"id": "\\u0061"', '{\n  "type": [1, "a"]', "[ x(1)")
    for number, text in enumerate(texts):
        # Each text has a grammar of its own, because outputs of the same one share a lexer.
        grammar = Grammar(GrammarKind.EBNF, f"{lark}\n// {number}", field="chat.tools")
        constraint = compiler.constraint(grammar)
        for token in backend.encode(text, add_special_tokens=False).ids:
            constraint.fill(mask)
            assert mask[token // 32] >> (token % 32) & 1, (text, vocabulary.tokens[token])
            constraint.accept([token])
        constraint.fill(mask)
