"""The interface between the engine and whatever restricts a request's next token. No jax.

A mask is a row of packed int32 words: bit `t % 32` of word `t // 32` says whether token t is allowed; bits
beyond the vocabulary have no meaning. While the device computes the logits of the next token, the mask for it
is made. Then the engine's thread tells the constraint which token was sampled, one request at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]


def mask_words(vocab_size: int) -> int:
    """Length of a mask, in int32 words."""
    return -(-vocab_size // 32)


class TokenConstraint(Protocol):
    """Restricts one output. It has state, so no two outputs share one. It is used on one thread at a time."""

    def fill(self, mask: Mask) -> None:
        """Overwrite `mask`, int32[mask_words(vocab_size)], with the tokens that may come next. At least one
        may.
        """
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that came next."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing more may follow: the output ends here, even without an end token."""
        ...
