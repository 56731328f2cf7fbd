"""Images of a prompt, as the model's encoder takes them, and the positions of its tokens. No jax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import prod

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """One image of a prompt. Its embeddings take the places of `num_tokens` tokens from `start` on, but for
    those of text among them.
    """

    patches: NDArray[np.float32] = field(repr=False)
    """float32[N, P]: the image cut into patches, in the order in which the model's encoder wants them; a
    patch is channels * frames * height * width values."""
    grid: tuple[int, int, int]
    """How many patches the image has in time, height and width; their product is N."""
    digest: bytes
    """See `digest_of`. Equal digests mean equal embeddings, as long as the weights are the same."""
    start: int
    """Position in the prompt of the image's first token."""
    num_tokens: int
    """How many tokens of the prompt stand for the image, at least 1."""
    row_tokens: int | None = None
    """If given, these tokens are rows of so many embeddings, behind each of which is one token of text, such
    as a break of lines. None: each has an embedding."""

    @property
    def end(self) -> int:
        """The position behind the image's last token."""
        return self.start + self.num_tokens

    @property
    def num_embeddings(self) -> int:
        """How many of its tokens have an embedding of the image."""
        return self.num_tokens - (0 if self.row_tokens is None else self.num_tokens // (self.row_tokens + 1))

    def are_embedded(self, first: int, count: int) -> NDArray[np.bool_]:
        """Tell which of its tokens [first, first + count) have an embedding, bool[count]; the others are
        text.
        """
        if self.row_tokens is None:
            return np.ones(count, np.bool_)
        embedded: NDArray[np.bool_] = (
            np.arange(first, first + count) % (self.row_tokens + 1) != self.row_tokens
        )
        return embedded

    @property
    def num_patches(self) -> int:
        """What encoding the image costs."""
        return len(self.patches)


@dataclass(frozen=True, slots=True, eq=False)
class RotaryPositions:
    """The positions by which the model rotates queries and keys, where a prompt has images."""

    positions: NDArray[np.int32]
    """int32[3, number of prompt tokens]: time, height and width of each token."""
    delta: int
    """What is added to the position of a token behind the prompt, in all three numbers."""


def digest_of(patches: NDArray[np.float32], grid: tuple[int, int, int]) -> bytes:
    """Return the BLAKE2b of grid and patches, DIGEST_BYTES long: images that the encoder cannot tell apart
    have the same.
    """
    digest = blake2b(np.asarray(grid, "<i8").tobytes(), digest_size=DIGEST_BYTES)
    digest.update(np.ascontiguousarray(patches, "<f4").data)
    return digest.digest()


def media_problem(media: Sequence[MediaItem], rotary: RotaryPositions | None, num_prompt: int) -> str | None:
    """Say what is wrong with the images of a prompt of `num_prompt` tokens; None if nothing is. They must
    be in order of their places, apart, and within the prompt.
    """
    end = 0
    for i, item in enumerate(media):
        if item.num_tokens < 1 or item.start < end or item.end > num_prompt:
            return f"image {i} has the tokens from {item.start} to {item.end} of a prompt of {num_prompt}"
        if item.patches.ndim != 2 or item.num_patches != prod(item.grid):
            return f"image {i} has patches {item.patches.shape}, and its grid is {item.grid}"
        if item.row_tokens is not None and (item.row_tokens < 1 or item.num_tokens % (item.row_tokens + 1)):
            return f"image {i} has {item.num_tokens} tokens, which are no rows of {item.row_tokens} and one"
        end = item.end
    if rotary is not None and rotary.positions.shape != (3, num_prompt):
        return f"the rotary positions are {rotary.positions.shape}, not (3, {num_prompt})"
    return None
