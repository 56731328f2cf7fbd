"""What the engine must know of a model that reads pictures. No jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.runtime.requests.images import MediaItem, RotaryPositions

Grid = tuple[int, int, int]
"""How many patches a picture has in time, height and width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """The part of a served model that reads pictures, as the engine sees it."""

    image_token_id: int
    """The token that stands for a picture in a prompt; the engine repeats it for each of its embeddings."""
    video_token_id: int | None = None
    """The token that stands for a video, which the engine does not take; None: there is none."""
    patch_size: int
    """Height and width of a patch, in pixels."""
    merge_size: int
    """A token stands for a square of so many patches on each side."""
    temporal_patch_size: int
    """A patch has its pixels so many times."""
    patch_values: int
    """How many numbers a patch is."""
    inputs: Callable[[Sequence[MediaItem], int], Any]
    """(pictures, patches in all, padding included) -> what the encoder takes, arrays of numpy in a tree. Its
    shapes depend on the number of patches alone."""
    rotary_positions: Callable[[int, Sequence[MediaItem]], RotaryPositions]
    """(length of the prompt, its pictures) -> the positions of the prompt's tokens."""

    @property
    def patches_per_token(self) -> int:
        return self.merge_size**2

    @property
    def token_pixels(self) -> int:
        """How many pixels one token stands for."""
        return (self.patch_size * self.merge_size) ** 2

    def problem(self, item: MediaItem, max_tokens: int) -> str | None:
        """Why the encoder cannot take a picture, of which `max_tokens` are the most that it may have; None if
        it can.
        """
        if item.num_tokens > max_tokens:
            return f"has {item.num_tokens} tokens; at most {max_tokens} are encoded"
        if item.patches.shape[1] != self.patch_values:
            return f"has patches of {item.patches.shape[1]} values, not {self.patch_values}"
        if min(item.grid) < 1 or item.grid[1] % self.merge_size or item.grid[2] % self.merge_size:
            return f"has the grid {item.grid}; height and width must be multiples of {self.merge_size}"
        if item.num_patches != item.num_tokens * self.patches_per_token:
            return f"has {item.num_patches} patches, which are not {item.num_tokens} tokens"
        return None
