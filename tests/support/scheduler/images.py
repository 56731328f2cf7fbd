"""Prompts with images for the scheduler's tests. An image is a number and a size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.runtime.requests.images import MediaItem, digest_of

PLACEHOLDER = 7
"""The token that stands for an image, as often as the image has tokens."""


def image(number: int, num_tokens: int, start: int = 0) -> MediaItem:
    """Make an image of 4 patches a token; images with other numbers have other digests."""
    patches = np.full((4 * num_tokens, 1), number, np.float32)
    grid = (1, 2, 2 * num_tokens)
    return MediaItem(patches, grid, digest_of(patches, grid), start, num_tokens)


def prompt_with(parts: Sequence[int | tuple[int, int]]) -> tuple[tuple[int, ...], tuple[MediaItem, ...]]:
    """Make a prompt of tokens and of images (number, number of tokens): its token ids and its images."""
    tokens: list[int] = []
    media: list[MediaItem] = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            media.append(image(*part, len(tokens)))
            tokens += [PLACEHOLDER] * part[1]
    return tuple(tokens), tuple(media)
