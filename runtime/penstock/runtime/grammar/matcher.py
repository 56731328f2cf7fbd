"""One output under a grammar: llguidance's matcher as a `TokenConstraint`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher

from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.grammar.budget import Account, Budget, request_budget
from penstock.runtime.grammar.vocabulary import Vocabulary
from penstock.runtime.requests.constraint import Mask

SHARED_S = 1.0
SHARED_PER_TOKEN_S = 0.02
"""How slow calls may be in which masks of several outputs are filled: see `GrammarConstraint.shared`."""
QUICK_S = 0.002
"""A mask that takes less is a quick one."""
_PROVEN = 64
_TOO_MANY_ITEMS = "Too many items"
"""llguidance's words where a mask takes more than `build_matcher.STEP_ITEMS`."""

_MAX_LINE_CHARS = 160
_MAX_MESSAGE_CHARS = 600


class TokenBits:
    """Masks that every matcher of a vocabulary shares; read only."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_ids = frozenset(vocabulary.eos_token_ids)
        self.text, self.eos = vocabulary.masks()


class Lexer:
    """What outputs that share one of llguidance's lexers know of it. It locks while in use: who waits for a
    mask of it waits for those that others are having made.
    """

    def __init__(self, *, is_proven: bool = False) -> None:
        """`is_proven`: another lexer of the same grammar was."""
        self._num_quick = _PROVEN if is_proven else 0

    @property
    def is_proven(self) -> bool:
        """Whether the last few dozen masks were quick."""
        return self._num_quick >= _PROVEN

    def took(self, seconds: float) -> None:
        """A mask took so long."""
        self._num_quick = self._num_quick + 1 if seconds < QUICK_S else 0


class GrammarConstraint:
    """What may follow in one output. `GrammarCompiler` makes them.

    An end token is allowed exactly where the grammar may end, and then every one is, whatever the grammar
    itself says of them. Ids that the tokenizer lacks are never allowed.

    `fill` and `accept` raise InvalidRequest, on the field that held the grammar, where it leads nowhere or
    llguidance gives up on it as too complex, or where it has spent its budget of time: that output cannot go
    on, others can. `accept` raises RuntimeError for a token that the mask did not allow: a bug of the caller.

    The processor time of `fill` and `accept` is booked on `account`. Where masks of several outputs are
    filled in parallel nobody knows whose took long: the call is taken from a budget of its own, and who has
    spent that is filled alone from then on, which ends those only who are slow.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        bits: TokenBits,
        field: str,
        on_error: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.thread_time,
        account: Account | None = None,
        lexer: Lexer | None = None,
    ) -> None:
        """`on_error` is called where llguidance gives up; `clock` is the CPU time of the calling thread.
        None: an account, a lexer of its own.
        """
        self._matcher = matcher
        self._bits = bits
        self._field = field
        self._on_error = on_error
        self._ended = False
        """An end token was accepted."""
        self._complete = False
        self._clock = clock
        self._account = account or Account(request_budget())
        self._shared = Budget(SHARED_S, SHARED_PER_TOKEN_S)
        self.lexer = lexer or Lexer()
        self.expected_s = 0.0
        """What the next mask will take, if it takes as long as the last; 0 before the first."""

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
        self.expected_s = self._clock() - started
        self.lexer.took(self.expected_s)
        self._charge(self.expected_s)
        self.finish(mask)

    def to_share(self) -> LLMatcher | None:
        """The matcher whose mask may be filled beside those of others, before `finish`; None if it needs
        none, or is to be filled alone. See `fill.MaskFiller`.
        """
        return None if self._complete or self._shared.is_spent else self._matcher

    def shared(self, seconds: float) -> None:
        """Its mask was one of those filled in a call that took so long."""
        self._shared.use(seconds)

    def finish(self, mask: Mask) -> None:
        """Turn the mask that llguidance filled (nothing, if the output is complete) into the one of `fill`:
        without special tokens, and with end tokens where the grammar may end.
        """
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
        self._account.earn()
        if not self._shared.is_spent:
            self._shared.earn()
        self._charge(self._clock() - started)

    def _charge(self, seconds: float) -> None:
        """Book that it took so long, which may be more than a very ambiguous grammar has left."""
        if not self._account.use(seconds):
            raise self._stuck("it takes too long to follow; make it less ambiguous")

    def _stuck(self, message: str = "") -> InvalidRequest:
        reason = message or shorten(self._matcher.get_error())
        if not message:
            self._on_error()
        if _TOO_MANY_ITEMS in reason:
            self._account.refuse()
        if reason == "NoExtensionBias":
            reason = "no token can follow"
        return InvalidRequest([Violation(self._field, f"the grammar cannot go on: {reason}")])


_ADDED = re.compile(r'\n *\d+ \| %llguidance \{"no_forcing": true\}')
_UNSUPPORTED = re.compile(r"Unimplemented keys: \[(.*)\]")


def shorten(message: str) -> str:
    """llguidance's message as its caller can use it: without the dump of its state, without the line that
    `source` added to the grammar, and with long lines, which repeat the source, cut.
    """
    message = _UNSUPPORTED.sub(r"JSON Schema keywords that are not supported here: \1", message)
    message = _ADDED.sub("", re.split(r"\n<(?:state|non-verbose|backtrace)\b", message)[0])
    lines = message.strip().splitlines()
    text = "\n".join(map(_shorten_line, lines))
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[: _MAX_MESSAGE_CHARS - 3] + "..."


def _shorten_line(line: str) -> str:
    half = (_MAX_LINE_CHARS - 5) // 2
    return line if len(line) <= _MAX_LINE_CHARS else f"{line[:half]} ... {line[-half:]}"
