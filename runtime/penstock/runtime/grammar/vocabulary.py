"""A model's tokens as llguidance takes them: the bytes of each, and which ones are special.

The bytes are those that `penstock.runtime.text` makes of a token, so what a mask guarantees about bytes is
true of the text that is sent. `tokenizer.json` is not handed to llguidance, because that would read it in its
own way: it takes every added token for a special one, even the runs of spaces that some tokenizers add.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from penstock.runtime.errors import ConfigError
from penstock.runtime.requests.constraint import Mask, mask_words
from penstock.runtime.text.decoder import PieceRule, decoder_state, piece_rule


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens 0 to vocab_size - 1 of a model."""

    tokens: tuple[bytes, ...] = field(repr=False)
    """The bytes that each token stands for; empty for an id that the tokenizer does not have."""
    special: frozenset[int]
    """Markers, which are never part of text and are named `<...>` in a Lark grammar. `tokens` holds their
    names."""
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_tokenizer(
        cls, backend: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]
    ) -> Vocabulary:
        """Take the tokens of a Hugging Face tokenizer (`PreTrainedTokenizerFast.backend_tokenizer`).

        `vocab_size` is the model's, the width of its logits, which may be more or less than the tokenizer's.
        Raises ConfigError if its tokens do not each stand for bytes, or if there is no end token.
        """
        rule, eos = rule_and_ends(backend, vocab_size, eos_token_ids)
        added = backend.get_added_tokens_decoder()
        markers = {i for i, token in added.items() if token.special or _is_marker(token.content)}
        tokens = [b""] * vocab_size
        for name, i in backend.get_vocab(with_added_tokens=True).items():
            if i < vocab_size:
                tokens[i] = name.encode() if i in markers else rule.piece(name)
        special = frozenset(i for i in markers.union(eos) if i < vocab_size)
        return cls(tuple(tokens), special, eos)

    def to_llguidance(self) -> LLTokenizer:
        """Convert this vocabulary for llguidance, which makes an index of it; takes about a second per
        million tokens.
        """
        return LLTokenizer(_Wrapper(self), eos_token=list(self.eos_token_ids))  # type: ignore[arg-type]

    def masks(self) -> tuple[Mask, Mask]:
        """Return two masks: of the tokens that the tokenizer has and that are no end tokens, and of the end
        tokens.
        """
        known = {i for i, token in enumerate(self.tokens) if token}
        return (
            pack(known.difference(self.eos_token_ids), len(self.tokens)),
            pack(self.eos_token_ids, len(self.tokens)),
        )


def rule_and_ends(
    backend: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]
) -> tuple[PieceRule, tuple[int, ...]]:
    """Tell how tokens become bytes, and the end tokens, which is all that must be known to say whether a
    tokenizer can have grammars. The other arguments and the ConfigErrors are those of
    `Vocabulary.from_tokenizer`.
    """
    rule = piece_rule(decoder_state(backend))
    if rule is None:
        raise ConfigError("structured output needs a tokenizer whose tokens stand for bytes")
    eos = tuple(sorted(i for i in set(eos_token_ids) if 0 <= i < vocab_size))
    if not eos:
        raise ConfigError("structured output needs a model with an end token")
    return rule, eos


def pack(token_ids: Collection[int], vocab_size: int) -> Mask:
    """Pack these tokens into a mask, int32[mask_words(vocab_size)]."""
    bits: NDArray[np.uint8] = np.zeros(32 * mask_words(vocab_size), np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def _is_marker(name: str) -> bool:
    """Say whether an added token that is not special stands for more than white space. Such a token, as
    `<think>`, must be asked for by name or id, and is never made of characters. Runs of spaces are text.
    """
    return bool(name.replace("\u2581", " ").strip())


class _Wrapper:
    """What llguidance reads of a tokenizer whose type it does not know; see `llguidance.TokenizerWrapper`."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.tokens: Sequence[bytes] = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special)

    def __call__(self, text: str) -> list[int]:
        # llguidance would call this for forced text only, and nothing is forced (`source`). If something
        # were, it would report that the grammar cannot go on, because there are no tokens for the text.
        return []
