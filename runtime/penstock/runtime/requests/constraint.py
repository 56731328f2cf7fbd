"""The interface between the engine and whatever restricts a request's next token. No jax.

A mask is a row of packed int32 words: bit `t % 32` of word `t // 32` says whether token t is allowed; bits
beyond the vocabulary have no meaning. While the device computes the logits of the next token, the mask for it
is made. Then the engine's thread tells the constraint which token was sampled, one request at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]


def mask_words(vocab_size: int) -> int:
    """Return the length of a mask, in int32 words."""
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


@runtime_checkable
class ForesightedConstraint(TokenConstraint, Protocol):
    """A constraint that also says what may follow tokens that it has not taken in, so that tokens may be
    proposed for its output.
    """

    def fill_ahead(self, masks: Mask, token_ids: Sequence[int]) -> None:
        """Overwrite row i of `masks`, int32[len(token_ids), mask_words(vocab_size)], with the tokens that may
        come behind the first i + 1 of these tokens. It may leave rows as they are: it must from the first
        token on that may not follow, or behind which nothing more follows, and it may from any row on. Behind
        a row that allows nothing, none is filled. The constraint itself stays where it is, and no answer of
        it changes.
        """
        ...

    def forced(self) -> Sequence[int]:
        """Guess the tokens in which a model writes what must come next, none if nothing must. It need not be
        right, and the constraint itself stays where it is.
        """
        ...
