"""One output under a grammar: llguidance's matcher as a `TokenConstraint`."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher

from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.grammar.budget import Account, Budget, request_budget
from penstock.runtime.grammar.vocabulary import Vocabulary
from penstock.runtime.requests.constraint import Mask

SHARED_S = 1.0
SHARED_PER_TOKEN_S = 0.02
"""How slow the calls that fill masks of several outputs may be: see `GrammarConstraint.shared`."""
QUICK_S = 0.002
"""A mask that takes less time than this is quick."""
_PROVEN = 64
_MOST_TEXTS = 1024
_TOO_MANY_ITEMS = "Too many items"
"""llguidance's words for a mask that takes more than `build_matcher.STEP_ITEMS`."""

_MAX_LINE_CHARS = 160
_MAX_MESSAGE_CHARS = 600


class TokenBits:
    """What every matcher of a vocabulary shares: masks, which are read only, and tokens of texts."""

    def __init__(
        self, vocabulary: Vocabulary, encode: Callable[[str], Sequence[int]] = lambda text: ()
    ) -> None:
        """`encode`: the tokens in which a model writes a text; none where nobody knows."""
        self.eos_token_ids = frozenset(vocabulary.eos_token_ids)
        self.text, self.eos = vocabulary.masks()
        self._vocabulary = vocabulary
        self._encode = encode
        self._known: OrderedDict[bytes, Sequence[int]] = OrderedDict()

    def tokens_of(self, text: bytes) -> Sequence[int]:
        """Return the tokens in which a model writes this text within another, or none. Those of the texts
        that were asked for last are kept. Used on one thread.
        """
        known = self._known.pop(text, None)
        if known is None:
            pieces = self._vocabulary.tokens
            known = self._encode(text.decode("utf-8", "ignore"))
            # A tokenizer may put a space before every text.
            if b"".join(pieces[token] for token in known if token < len(pieces)) != text:
                known = ()
        self._known[text] = known
        if len(self._known) > _MOST_TEXTS:
            self._known.popitem(last=False)
        return known


class Lexer:
    """What is known about a lexer of llguidance's that several outputs share. It is locked while in use, so
    making a mask with it waits for masks that others are making with it.
    """

    def __init__(self, *, is_proven: bool = False) -> None:
        """`is_proven`: whether another lexer of the same grammar was proven."""
        self._num_quick = _PROVEN if is_proven else 0

    @property
    def is_proven(self) -> bool:
        """Whether the last few dozen masks were quick."""
        return self._num_quick >= _PROVEN

    def took(self, seconds: float) -> None:
        """Note that a mask took this long."""
        self._num_quick = self._num_quick + 1 if seconds < QUICK_S else 0


class GrammarConstraint:
    """The tokens that may follow in one output. `GrammarCompiler` makes it.

    An end token is allowed exactly where the grammar may end; there every end token is, whatever the grammar
    itself says about them. Ids that the tokenizer does not have are never allowed.

    `fill` and `accept` raise InvalidRequest, on the field that held the grammar, if no token can follow, if
    llguidance gives up because the grammar is too complex, or if its budget of time is spent: this output
    cannot go on, others can. `accept` raises RuntimeError for a token that the mask did not allow, which is a
    bug of the caller.

    The processor time of `fill` and `accept` is counted on `account`. If masks of several outputs are filled
    in parallel, nobody knows which one took long: then the time of the call is taken from a budget of its
    own, and an output that has spent that budget is filled alone from then on. So only outputs that really
    are slow end.
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
        """`on_error` is called if llguidance gives up; `clock` returns the CPU time of the calling thread, in
        seconds. `account`, `lexer`: None for new ones.
        """
        self._matcher = matcher
        self._bits = bits
        self._field = field
        self._on_error = on_error
        self._ended = False
        """Whether an end token was accepted."""
        self._complete = False
        self._clock = clock
        self._account = account or Account(request_budget())
        self._shared = Budget(SHARED_S, SHARED_PER_TOKEN_S)
        self.lexer = lexer or Lexer()
        self.expected_s = 0.0
        """How long the next mask will take, in seconds, if it takes as long as the last one; 0 before the
        first."""

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows nothing more, or an end token was accepted."""
        return self._complete

    def fill(self, mask: Mask) -> None:
        """Overwrite `mask`, int32[mask_words(vocab_size)], contiguous, with the tokens that may come
        next.
        """
        if not mask.flags.c_contiguous:
            raise ValueError("the mask must be contiguous")
        address, num_bytes = mask.ctypes.data, mask.nbytes
        # Nothing is allocated from here on until the clock is read again, which might start a collection.
        started = self._clock()
        if not self._complete:
            self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
        self.expected_s = self._clock() - started
        self.lexer.took(self.expected_s)
        self._charge(self.expected_s)
        self.finish(mask)

    def to_share(self) -> LLMatcher | None:
        """Return the matcher, if its raw mask may be filled beside those of other outputs before `finish` is
        called; None if it needs no mask, or is to be filled alone. See `fill.MaskFiller`.
        """
        return None if self._complete or self._shared.is_spent else self._matcher

    def shared(self, seconds: float) -> None:
        """Note that its mask was filled with others in a call that took this long."""
        self._shared.use(seconds)

    def finish(self, mask: Mask) -> None:
        """Post-process llguidance's raw mask: remove special tokens, and allow end tokens where the grammar
        may end. If the output is complete, there is no raw mask, and only end tokens are allowed. Raises
        InvalidRequest if no token is left.
        """
        if self._complete:
            mask[:] = self._bits.eos
            return
        # When llguidance fails it fills the mask with end tokens.
        if self._matcher.is_error():
            raise self._stuck()
        np.bitwise_and(mask, self._bits.text, out=mask)
        if self._matcher.is_accepting():
            np.bitwise_or(mask, self._bits.eos, out=mask)
        elif not mask.any():
            raise self._stuck("no token can follow")

    def fill_ahead(self, masks: Mask, token_ids: Sequence[int]) -> None:
        """See `ForesightedConstraint`. A copy of the matcher goes ahead, because an error would end the
        matcher itself. This is done for grammars whose masks are quick, and only for QUICK_S and one mask
        more, so nobody is charged for it.
        """
        if self._complete or self.expected_s >= QUICK_S:
            return
        started, matcher = self._clock(), self._matcher.deep_copy()
        for mask, token in zip(masks, token_ids, strict=True):
            if token in self._bits.eos_token_ids or not matcher.try_consume_tokens([token]):
                return
            if matcher.is_stopped() or self._clock() - started > QUICK_S:
                return
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if matcher.is_error():
                mask[:] = 0
                return
            np.bitwise_and(mask, self._bits.text, out=mask)
            if matcher.is_accepting():
                np.bitwise_or(mask, self._bits.eos, out=mask)
            if not mask.any():
                return

    def forced(self) -> Sequence[int]:
        """See `ForesightedConstraint`. The last token is left out, because what comes behind the text may
        become a part of it.
        """
        if self._complete or self.expected_s >= QUICK_S:
            return ()
        text = self._matcher.deep_copy().compute_ff_bytes()
        return self._bits.tokens_of(text)[:-1] if len(text) > 1 else ()

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that came next."""
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
        tokens = [token]
        started = self._clock()
        consumed = self._matcher.try_consume_tokens(tokens)
        if not consumed and not self._matcher.is_error():
            # If another output that shares the lexer ran into a limit, every token is refused, and only the
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
        """Count the time that was used. Raises InvalidRequest if the grammar, which is then very ambiguous,
        has no time left.
        """
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
    """Return llguidance's message without the dump of its state, and with long lines, which repeat the
    source, cut.
    """
    message = _UNSUPPORTED.sub(r"JSON Schema keywords that are not supported here: \1", message)
    message = _ADDED.sub("", re.split(r"\n<(?:state|non-verbose|backtrace)\b", message)[0])
    lines = message.strip().splitlines()
    text = "\n".join(map(_shorten_line, lines))
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[: _MAX_MESSAGE_CHARS - 3] + "..."


def _shorten_line(line: str) -> str:
    half = (_MAX_LINE_CHARS - 5) // 2
    return line if len(line) <= _MAX_LINE_CHARS else f"{line[:half]} ... {line[-half:]}"
