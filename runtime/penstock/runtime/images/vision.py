"""What the engine must know of a model that reads images. No jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.runtime.requests.images import MediaItem, RotaryPositions

Grid = tuple[int, int, int]
"""How many patches an image has in time, height and width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """The part of a served model that reads images, as the engine sees it."""

    image_token_id: int
    """The token whose embeddings are replaced by those of images."""
    written_token_id: int | None = None
    """The token that a prompt has for each image, where it is not that of the embeddings."""
    refused_tokens: tuple[tuple[int, str], ...] = ()
    """Tokens that stand for what the engine does not take, each with what that is, such as "a video"."""
    patches_per_token: int
    """How many patches become one embedding."""
    patch_values: int
    """How many numbers a patch is."""
    inputs: Callable[[Sequence[MediaItem], int], Any]
    """(images, patches in all, padding included) -> what the encoder takes, arrays of numpy in a tree. Its
    shapes depend on the number of patches alone."""
    rotary_positions: Callable[[int, Sequence[MediaItem]], RotaryPositions] | None = None
    """(length of the prompt, its images) -> the positions of the prompt's tokens. None: each token's is its
    place in the prompt."""
    num_patches: int | None = None
    """How many patches every image has, or every tile that is encoded; None: that depends on its size."""
    most_tokens: int | None = None
    """How many embeddings an image has at most; None: `max_image_tokens` alone says it."""
    around: tuple[int, int] | None = None
    """The tokens that texts have before and behind an image, where a text may have the first alone in the
    place of all; see `ImageReader.written_out`."""
    both_ways: bool = False
    """Whether the decoder's tokens of an image see those behind them in the same image, too. Then all of
    them are computed in one step."""
    grid_problem: Callable[[Grid], str | None] = lambda grid: None
    """Why the encoder cannot take an image of this grid; None if it can."""

    def problem(self, item: MediaItem, max_tokens: int) -> str | None:
        """Say why the encoder cannot take an image, of which `max_tokens` are the most that it may have;
        None if it can.
        """
        most = max_tokens if self.most_tokens is None else min(max_tokens, self.most_tokens)
        if item.num_tokens > most:
            return f"has {item.num_tokens} tokens; at most {most} are encoded"
        if item.patches.shape[1] != self.patch_values:
            return f"has patches of {item.patches.shape[1]} values, not {self.patch_values}"
        problem = self.grid_problem(item.grid)
        if problem is None and item.num_patches != item.num_embeddings * self.patches_per_token:
            return f"has {item.num_patches} patches, which are not {item.num_embeddings} embeddings"
        return problem
