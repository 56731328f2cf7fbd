"""Sequences of tokens that an output must not contain. Single tokens are forbidden by the sampler's bias
instead.

As in Hugging Face's `NoBadWordsLogitsProcessor` and in vLLM, a word is one or two exact sequences of tokens,
and the last token of a sequence is forbidden after all the others. The same text in other tokens is not
detected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from llguidance import LLMatcher

from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.grammar.matcher import GrammarConstraint
from penstock.runtime.requests.constraint import ForesightedConstraint, Mask, TokenConstraint
from penstock.runtime.requests.word_table import WordTable

MAX_BAD_WORDS = 1_000
MAX_BAD_WORD_CHARS = 1_000


class Encoder(Protocol):
    """Encodes text to token ids; `penstock.runtime.text.codec.TextCodec` is one."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


def bad_word_ids(codec: Encoder, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the sequences of token ids that stand for `words`. Each word is encoded alone and with one space
    before it, without special tokens; spaces at the word's own beginning are dropped.

    Hugging Face leaves both spellings to the caller. vLLM takes the one with a space only if it has as many
    tokens as the other and begins with a different one, so it misses " word" where the space changes the
    number of tokens. With a tokenizer that puts a space before every text (SentencePiece), neither finds a
    word in the middle of another one.

    Raises InvalidRequest on `sampling.bad_words`.
    """
    check_bad_words(words)
    spellings = (prefix + word.lstrip(" ") for word in words for prefix in ("", " "))
    ids = (tuple(codec.encode(text, add_special_tokens=False)) for text in spellings)
    return tuple(dict.fromkeys(sequence for sequence in ids if sequence))


def check_bad_words(words: Sequence[str]) -> None:
    """Raise InvalidRequest on `sampling.bad_words`. If there are too many words, none of them is checked."""
    if len(words) > MAX_BAD_WORDS:
        described = f"at most {MAX_BAD_WORDS} words, not {len(words)}"
        raise InvalidRequest([Violation("sampling.bad_words", described)])
    bad = [
        Violation(
            f"sampling.bad_words[{i}]",
            f"must have 1 to {MAX_BAD_WORD_CHARS} characters besides spaces, and no more spaces than that",
        )
        for i, word in enumerate(words)
        if not (0 < len(word.strip()) <= MAX_BAD_WORD_CHARS and len(word) <= 2 * MAX_BAD_WORD_CHARS)
    ]
    if bad:
        raise InvalidRequest(bad)


class BadWords:
    """Forbids the last token of each word where the tokens so far end in the word's other tokens.

    Only generated tokens count, not the prompt. The tokens that `inner` allows are narrowed; without `inner`,
    all others are allowed. If no token would be left, `inner` decides alone: the grammar wins over the words.
    An output is complete when `inner` says so. Errors are those of `inner`.
    """

    def __init__(
        self, words: Sequence[Sequence[int]] | WordTable, inner: TokenConstraint | None, vocab_size: int
    ) -> None:
        """`words` have at least two ids each (else ValueError), or are a table of such words, which outputs
        share.
        """
        self._inner = inner
        self._table = words if isinstance(words, WordTable) else WordTable(words, vocab_size)
        self._recent: deque[int] = deque(maxlen=self._table.longest - 1)

    @property
    def is_complete(self) -> bool:
        return self._inner is not None and self._inner.is_complete

    def fill(self, mask: Mask) -> None:
        """Overwrite `mask`, int32[mask_words(vocab_size)], contiguous, with the tokens that may come
        next.
        """
        if self._inner is None:
            mask[:] = self._table.everything
        else:
            self._inner.fill(mask)
        self._forbid(mask)

    @property
    def grammar(self) -> GrammarConstraint | None:
        """The grammar that it narrows, if there is one."""
        return self._inner if isinstance(self._inner, GrammarConstraint) else None

    def to_share(self) -> LLMatcher | None:
        """See `GrammarConstraint.to_share`."""
        return self._inner.to_share() if isinstance(self._inner, GrammarConstraint) else None

    def shared(self, seconds: float) -> None:
        """See `GrammarConstraint.shared`."""
        if isinstance(self._inner, GrammarConstraint):
            self._inner.shared(seconds)

    def finish(self, mask: Mask) -> None:
        """See `GrammarConstraint.finish`."""
        if not isinstance(self._inner, GrammarConstraint):
            self.fill(mask)
            return
        self._inner.finish(mask)
        self._forbid(mask)

    def fill_ahead(self, masks: Mask, token_ids: Sequence[int]) -> None:
        """See `ForesightedConstraint`. An `inner` without foresight says nothing, and so nothing is said."""
        if self._inner is None:
            masks[:] = self._table.everything
        elif isinstance(self._inner, ForesightedConstraint):
            self._inner.fill_ahead(masks, token_ids)
        recent = self._recent.copy()
        for mask, token in zip(masks, token_ids, strict=True):
            recent.append(token)
            if mask.any():
                self._forbid(mask, recent)

    def forced(self) -> Sequence[int]:
        """See `ForesightedConstraint`: what `inner` forces."""
        return self._inner.forced() if isinstance(self._inner, ForesightedConstraint) else ()

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that came next."""
        if self._inner is not None:
            self._inner.accept(token_ids)
        self._recent.extend(token_ids)

    def _forbid(self, mask: Mask, recent: deque[int] | None = None) -> None:
        """Forbid what would complete a word behind these tokens, or behind those that were taken in."""
        last = self._forbidden(self._recent if recent is None else recent)
        if not last:
            return
        before = mask.copy()
        for token in last:
            # As unsigned words, because bit 31 of an int32 is its sign.
            mask.view(np.uint32)[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
        if not np.bitwise_and(mask, self._table.everything).any():
            mask[:] = before

    def _forbidden(self, recent: deque[int]) -> set[int]:
        """Return the ids that would complete a word behind these tokens."""
        if not recent:
            return set()
        *earlier, before = recent
        return {
            last
            for head, last in self._table.by_before.get(before, ())
            if len(head) <= len(earlier) and tuple(earlier[len(earlier) - len(head) :]) == head
        }
