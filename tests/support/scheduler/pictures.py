"""Prompts with pictures for the scheduler's tests. A picture is a number and a size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.runtime.requests.images import MediaItem, digest_of

PLACEHOLDER = 7
"""The token that stands for a picture, as often as the picture has tokens."""


def picture(number: int, num_tokens: int, start: int = 0) -> MediaItem:
    """Make a picture of 4 patches a token; pictures with other numbers have other digests."""
    patches = np.full((4 * num_tokens, 1), number, np.float32)
    grid = (1, 2, 2 * num_tokens)
    return MediaItem(patches, grid, digest_of(patches, grid), start, num_tokens)


def prompt_with(parts: Sequence[int | tuple[int, int]]) -> tuple[tuple[int, ...], tuple[MediaItem, ...]]:
    """Make a prompt of tokens and of pictures (number, number of tokens): its token ids and its pictures."""
    tokens: list[int] = []
    media: list[MediaItem] = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            media.append(picture(*part, len(tokens)))
            tokens += [PLACEHOLDER] * part[1]
    return tuple(tokens), tuple(media)
