"""One output under a grammar: llguidance's matcher as a `TokenConstraint`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher

from penstock.runtime.constraint import Mask
from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.grammar.vocabulary import Vocabulary

BUDGET_S = 1.0
BUDGET_PER_TOKEN_S = 0.02
"""Time that one output may take: so much at first and at most, and what was used of it comes back by so much
with each token. Masks take some 20 us, those in new territory up to a few ms; a very ambiguous grammar's take
hundreds, while all other rows wait."""

_MAX_LINE_CHARS = 160
_MAX_MESSAGE_CHARS = 600


class TokenBits:
    """Masks that every matcher of a vocabulary shares; read only."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_ids = frozenset(vocabulary.eos_token_ids)
        self.text, self.eos = vocabulary.masks()


class Budget:
    """Time that may be used; see BUDGET_S. It is spent once over some T tokens more than
    BUDGET_S + T * BUDGET_PER_TOKEN_S was used.
    """

    def __init__(self) -> None:
        self._left_s = BUDGET_S

    def earn(self) -> None:
        """A token was made."""
        self._left_s = min(BUDGET_S, self._left_s + BUDGET_PER_TOKEN_S)

    def use(self, seconds: float) -> None:
        self._left_s -= seconds

    @property
    def is_spent(self) -> bool:
        return self._left_s < 0


class GrammarConstraint:
    """What may follow in one output. `GrammarCompiler` makes them.

    An end token is allowed exactly where the grammar may end, and then every one is, whatever the grammar
    itself says of them. Ids that the tokenizer lacks are never allowed.

    `fill` and `accept` raise InvalidRequest, on the field that held the grammar, where it leads nowhere or
    llguidance gives up on it as too complex, or where it has spent its budget of time: that output cannot go
    on, others can. `accept` raises RuntimeError for a token that the mask did not allow: a bug of the caller.

    There are two budgets. The CPU time of `fill` and `accept` is taken from the output's own. Where masks of
    several outputs are filled in parallel nobody knows whose took long: the call is taken from a second
    budget of each, and who has spent that is filled alone from then on, which ends those only who are slow. A
    grammar costs the others at most two BUDGET_S, BUDGET_PER_TOKEN_S a token, and two calls.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        bits: TokenBits,
        field: str,
        on_error: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`on_error` is called where llguidance gives up; `clock` is the CPU time of the calling thread."""
        self._matcher = matcher
        self._bits = bits
        self._field = field
        self._on_error = on_error
        self._ended = False
        """An end token was accepted."""
        self._complete = False
        self._clock = clock
        self._own, self._shared = Budget(), Budget()

    @property
    def is_complete(self) -> bool:
        """The grammar allows nothing more, or an end token was accepted."""
        return self._complete

    def fill(self, mask: Mask) -> None:
        """Overwrite int32[mask_words(vocab_size)], contiguous, with what may come next."""
        if not mask.flags.c_contiguous:
            raise ValueError("the mask must be contiguous")
        started = self._clock()
        if not self._complete:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.finish(mask)
        self._charge(started)

    def to_share(self) -> LLMatcher | None:
        """The matcher whose mask may be filled beside those of others, before `finish`; None if it needs
        none, or is to be filled alone. See `fill.MaskFiller`.
        """
        return None if self._complete or self._shared.is_spent else self._matcher

    def shared(self, seconds: float) -> None:
        """Its mask was one of those filled in a call that took so long."""
        self._shared.use(seconds)

    def finish(self, mask: Mask) -> None:
        """Make the mask that llguidance filled, unless the output is complete, into that of `fill`."""
        if self._complete:
            mask[:] = self._bits.eos
            return
        # llguidance answers with end tokens where it fails.
        if self._matcher.is_error():
            raise self._stuck()
        np.bitwise_and(mask, self._bits.text, out=mask)
        if self._matcher.is_accepting():
            np.bitwise_or(mask, self._bits.eos, out=mask)
        elif not mask.any():
            raise self._stuck("no token can follow")

    def accept(self, token_ids: Sequence[int]) -> None:
        """These came next."""
        for token in token_ids:
            if self._ended:
                raise RuntimeError(f"token {token} came after an end token")
            if token in self._bits.eos_token_ids:
                if not (self._complete or self._matcher.is_accepting()):
                    raise RuntimeError(f"end token {token} came where the grammar does not end")
                self._ended = self._complete = True
            else:
                self._consume(token)

    def _consume(self, token: int) -> None:
        if self._complete:
            raise RuntimeError(f"token {token} came after the end")
        started = self._clock()
        consumed = self._matcher.try_consume_tokens([token])
        if not consumed and not self._matcher.is_error():
            # Where an output that shares the lexer ran into a limit, every token is refused, and only the
            # next mask says why.
            self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise self._stuck()
        if not consumed:
            raise RuntimeError(f"token {token} came where the grammar does not allow it")
        self._complete = self._matcher.is_stopped()
        self._own.earn()
        if not self._shared.is_spent:
            self._shared.earn()
        self._charge(started)

    def _charge(self, started: float) -> None:
        """Take the time since `started` from its own budget, which a very ambiguous grammar may exhaust."""
        self._own.use(self._clock() - started)
        if self._own.is_spent:
            raise self._stuck("it takes too long to follow; make it less ambiguous")

    def _stuck(self, message: str = "") -> InvalidRequest:
        reason = message or shorten(self._matcher.get_error())
        if not message:
            self._on_error()
        if reason == "NoExtensionBias":
            reason = "no token can follow"
        return InvalidRequest([Violation(self._field, f"the grammar cannot go on: {reason}")])


def shorten(message: str) -> str:
    """llguidance's message without the dump of its state, and long lines, which repeat the source, cut."""
    lines = re.split(r"\n<(?:state|non-verbose|backtrace)\b", message)[0].strip().splitlines()
    text = "\n".join(map(_shorten_line, lines))
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[: _MAX_MESSAGE_CHARS - 3] + "..."


def _shorten_line(line: str) -> str:
    half = (_MAX_LINE_CHARS - 5) // 2
    return line if len(line) <= _MAX_LINE_CHARS else f"{line[:half]} ... {line[-half:]}"
