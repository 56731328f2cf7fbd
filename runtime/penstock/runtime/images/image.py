"""An image as a caller gives it, and what the engine takes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
"""The formats that are read. Of an animation the first frame counts."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image of a prompt: bytes in one of the formats of `MEDIA_TYPES`, or the path of a file that has
    them, which is read at once (OSError).
    """

    data: bytes = field(repr=False)
    media_type: str = ""
    """What the bytes are to be; empty: whatever they begin like."""

    def __init__(self, source: bytes | str | os.PathLike[str], media_type: str = "") -> None:
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "media_type", media_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What an engine takes of a request's images."""

    max_images: int
    """Most images of a request."""
    max_bytes: int
    """Most bytes of one, as it is sent."""
    max_pixels: int
    """Most pixels of one, as its header says."""
    max_tokens: int
    """Most tokens that one stands for; larger images are made smaller."""
    media_types: tuple[str, ...] = MEDIA_TYPES
