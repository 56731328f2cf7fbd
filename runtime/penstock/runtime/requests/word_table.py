"""Words of several tokens that outputs must not contain, sorted for a look-up after each token. No jax.

The table is made once for all outputs of a request, because it may have a thousand words, and a mask as long
as the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.requests.constraint import Mask, mask_words


class WordTable:
    """The words. The table never changes, so outputs may share it."""

    def __init__(self, words: Sequence[Sequence[int]], vocab_size: int) -> None:
        """`words` have at least two ids each, else ValueError. A word that ends in an id outside the
        vocabulary never occurs.
        """
        if any(len(word) < 2 for word in words):
            raise ValueError("a word of one token is a matter of the logit bias")
        by_before: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for *head, before, last in words:
            if last < vocab_size:
                by_before.setdefault(before, []).append((tuple(head), last))
        self.by_before: Mapping[int, Sequence[tuple[tuple[int, ...], int]]] = by_before
        """The last id but one of a word to pairs of the ids before it and the last id."""
        self.longest = max(map(len, words), default=2)
        bits: NDArray[np.uint8] = np.zeros(32 * mask_words(vocab_size), np.uint8)
        bits[:vocab_size] = 1
        self.everything: Mask = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
        """The mask that allows every token."""
