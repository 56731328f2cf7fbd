"""What may follow: the interface between the engine and whatever restricts a request's next token. No jax.

A mask is a row of packed int32 words: bit `t % 32` of word `t // 32` stands for token t, 1 = allowed; bits
beyond the vocabulary are without meaning. The engine's thread asks for the mask of the next token while the
device computes that token's logits, and tells which token came of it, one request at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]


def mask_words(vocab_size: int) -> int:
    """Length of a mask."""
    return -(-vocab_size // 32)


class TokenConstraint(Protocol):
    """Restricts one output. It has state, so that no two outputs share one; used on one thread at a time."""

    def fill(self, mask: Mask) -> None:
        """Overwrite int32[mask_words(vocab_size)] with what may come next; at least one token may."""
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """These came next."""
        ...

    @property
    def is_complete(self) -> bool:
        """Nothing more may follow: the output ends here, whether or not an end token was made."""
        ...
