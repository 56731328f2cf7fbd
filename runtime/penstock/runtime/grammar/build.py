"""From a grammar to a matcher, without limits of time: both the trial and the real thing (`sandbox`)."""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock.runtime.errors import InvalidRequest
from penstock.runtime.grammar.matcher import GrammarConstraint, TokenBits, shorten
from penstock.runtime.grammar.narrowing import GrammarError


def build_matcher(tokenizer: LLTokenizer, bits: TokenBits, text: str, max_lexer_states: int) -> LLMatcher:
    """The matcher, at the beginning, of a grammar that `source.to_llguidance` wrote. Raises GrammarError."""
    limits = LLParserLimits(max_lexer_states=max_lexer_states, verbose_errors=False)
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(shorten(matcher.get_error()))
    # The first mask here, once for all outputs: it builds the first states of the lexer, and shows a grammar
    # that no output matches.
    try:
        GrammarConstraint(matcher, bits, "").fill(np.zeros_like(bits.text))
    except InvalidRequest as error:
        raise GrammarError(error.violations[0].description) from error
    return matcher
