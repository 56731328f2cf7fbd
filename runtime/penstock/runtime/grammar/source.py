"""Writes a `Grammar` in llguidance's own format: its JSON list of grammars.

All of them set `no_forcing`. By default, where only one text can follow, llguidance allows just the tokens
that the tokenizer makes of it. That text may spell a special token (a constant "<|im_end|>"), and then the
mask allows the token itself, which ends the output in the middle. With `no_forcing` a mask allows every token
that spells the text, and never a special one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from penstock.runtime.requests.grammar import ANSWER, Grammar, GrammarKind
from penstock.runtime.schemas.json_schema import any_object, read_schema
from penstock.runtime.schemas.narrowing import GrammarError

_NO_FORCING = '\n%llguidance {"no_forcing": true}'
_START_SCHEMA = "start: @schema" + _NO_FORCING
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def to_llguidance(grammar: Grammar) -> str:
    """Write the text that `llguidance.LLMatcher` takes. Raises GrammarError; most mistakes are found only by
    llguidance itself.
    """
    if isinstance(grammar.source, tuple):
        text = _lark(_choice(grammar.source))
    else:
        text = _WRITERS[grammar.kind](grammar.source)
    return _after(grammar.before, text) if grammar.before else text


def _after(before: str, text: str) -> str:
    """Put `before` in front of the grammars in `text`. The first of these is where an answer begins; it gets
    the name by which `before` refers to it.
    """
    first, *others = json.loads(text)["grammars"]
    return json.dumps(
        {"grammars": [{"lark_grammar": before + _NO_FORCING}, {"name": ANSWER, **first}, *others]}
    )


def _lark(text: str) -> str:
    # At the end it overrides what the text sets, and does not change the line numbers in messages.
    return json.dumps({"grammars": [{"lark_grammar": text + _NO_FORCING}]})


def _schema(schema: Mapping[str, Any]) -> str:
    return json.dumps(
        {"grammars": [{"lark_grammar": _START_SCHEMA}, {"name": "schema", "json_schema": schema}]}
    )


def _regex(source: str) -> str:
    quoted: str = json.loads(LLMatcher.grammar_from_regex(source))["grammars"][0]["lark_grammar"]
    return _lark(quoted)


def _ebnf(source: str) -> str:
    """Read Lark, or llama.cpp's GBNF, which is recognised by its `name ::=` rules."""
    if not _GBNF_RULE.search(source):
        return _lark(source)
    try:
        return _lark(gbnf_to_lark(source))
    except RecursionError as error:
        raise GrammarError("the grammar is nested too deeply") from error
    except Exception as error:  # gbnf_to_lark raises a plain Exception if a rule is missing
        raise GrammarError(f"GBNF: {error}") from error


def _choice(choices: tuple[str, ...]) -> str:
    # With one terminal, unlike a rule of alternatives, the lexer has one automaton for all choices.
    return f"start: CHOICE\nCHOICE: {' | '.join(map(_quote, dict.fromkeys(choices)))}"


def _quote(text: str) -> str:
    """Write the text as a literal: like JSON's, but with an escape for DEL, which JSON leaves as it is and
    Lark refuses.
    """
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


_WRITERS: Mapping[GrammarKind, Callable[[str], str]] = {
    GrammarKind.JSON_SCHEMA: lambda source: _schema(read_schema(source)),
    GrammarKind.JSON_OBJECT: lambda source: _schema(any_object()),
    GrammarKind.REGEX: _regex,
    GrammarKind.EBNF: _ebnf,
}
