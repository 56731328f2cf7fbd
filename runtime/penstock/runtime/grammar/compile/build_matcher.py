"""Makes a matcher of a grammar, without a time limit of its own. Both the trial and the real compile use it
(`trials`).
"""

from __future__ import annotations

import math

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock.runtime.errors import InvalidRequest
from penstock.runtime.grammar.budget import Account, Budget
from penstock.runtime.grammar.matcher import GrammarConstraint, TokenBits, shorten
from penstock.runtime.schemas.narrowing import GrammarError

STEP_ITEMS = 20_000
"""Most parser items that one mask may take. An object of 300 optional properties takes 12,000 with a
vocabulary of 152k; llguidance's default is 50,000."""
STEP_LEXER_FUEL = 200_000
"""Most work of the lexer that one mask may take, 10 to 22 ms. A choice among 5,000 texts takes up to 50,000,
text that may hold calls of strict tools in Llama's form up to 130,000. It is llguidance's default."""

_UNLIMITED = Account(Budget(math.inf))
"""For compiling, which has a limit of its own."""


def build_matcher(tokenizer: LLTokenizer, bits: TokenBits, text: str, max_lexer_states: int) -> LLMatcher:
    """Build the matcher of a grammar that `source.to_llguidance` wrote, at its beginning. Raises
    GrammarError.
    """
    limits = LLParserLimits(
        max_lexer_states=max_lexer_states,
        step_max_items=STEP_ITEMS,
        step_lexer_fuel=STEP_LEXER_FUEL,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(shorten(matcher.get_error()))
    # The first mask is made here, once for all outputs: it builds the first states of the lexer, and fails
    # for a grammar that no output matches.
    try:
        GrammarConstraint(matcher, bits, "", account=_UNLIMITED).fill(np.zeros_like(bits.text))
    except InvalidRequest as error:
        raise GrammarError(error.violations[0].description) from error
    return matcher
