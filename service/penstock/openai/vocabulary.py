"""What tokens look like, so that log-probabilities can be shown without a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of all tokens of the served model."""

    pieces: Sequence[bytes]
    """The bytes of each token, by its id. A special token has the bytes of its name."""
    special: frozenset[int]
    """The special tokens, which are left out of a text."""

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id that the tokenizer does not have."""
        return self.pieces[token_id] if token_id < len(self.pieces) else b""
