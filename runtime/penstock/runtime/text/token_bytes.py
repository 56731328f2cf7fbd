"""The bytes that single tokens stand for, for those who show tokens or join them without a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class TokenBytes:
    """What tokens of one tokenizer stand for."""

    of: Callable[[int], bytes]
    """The bytes of a token: of a special one those of its name, and none of an id that the tokenizer does not
    have.
    """
    special: frozenset[int]
    """The tokens that a text may leave out, as end tokens."""
    is_exact: bool
    """Whether the bytes of any tokens, joined, are their text, but for `dropped_leading_spaces`. Else a token
    has the bytes of the text that it has alone.
    """
    dropped_leading_spaces: int = 0
    """How many spaces a text loses at its start, if it begins with so many."""
