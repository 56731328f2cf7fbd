"""Puts the pictures of a prompt into it: checks them, makes patches of them, and makes room for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image as PilImage

from penstock.runtime.errors import InvalidRequest, PromptTooLong, Violation
from penstock.runtime.images.decoding import BadImage, decode, read_header
from penstock.runtime.images.image import Image, ImageLimits
from penstock.runtime.images.vision import Grid, Vision
from penstock.runtime.requests.images import MediaItem, RotaryPositions, digest_of

FULL_IMAGES = 4
"""How many images of the most pixels a request may have. Decoding one takes seconds."""
T = TypeVar("T")
U = TypeVar("U")


class Processor(Protocol):
    """Makes patches of pictures; `processor.ImageProcessor`, which says more, does so by transformers."""

    def num_tokens(self, width: int, height: int) -> int:
        """How many tokens a picture of so many pixels has. Raises BadImage."""
        ...

    def process(self, image: PilImage) -> tuple[NDArray[np.float32], Grid]:
        """The patches of a picture, float32[N, P], and its grid. Raises BadImage."""
        ...


class Placed(NamedTuple):
    """A prompt with its pictures."""

    token_ids: tuple[int, ...]
    media: tuple[MediaItem, ...] = ()
    rotary: RotaryPositions | None = None


class ImageReader:
    """Reads pictures for one model. Any thread may use it; a large picture takes a tenth of a second."""

    def __init__(self, vision: Vision, processor: Processor, limits: ImageLimits) -> None:
        self.limits = limits
        self._vision = vision
        self._processor = processor

    @property
    def image_token_id(self) -> int:
        """The token that stands for a picture in a prompt."""
        return self._vision.image_token_id

    def place(
        self,
        token_ids: Sequence[int],
        images: Sequence[Image],
        fields: Sequence[str],
        where: str,
        *,
        room: int,
    ) -> Placed:
        """Put the pictures, in their order, in the places of the prompt's image tokens. `fields` are the
        contract's paths of the pictures, and `where` is that of all of them.

        Raises InvalidRequest with every picture that cannot be read, or if there are too many, of too many
        pixels together, or not as many as places; PromptTooLong if the prompt would have more than `room` - 1
        tokens, before any picture is decoded.
        """
        places = [i for i, token in enumerate(token_ids) if token == self._vision.image_token_id]
        if self._vision.video_token_id in token_ids:
            described = f"the prompt has a place for a video (token {self._vision.video_token_id})"
            raise InvalidRequest([Violation(where, f"{described}, and videos are not taken")])
        if len(images) > self.limits.max_images:
            described = f"{len(images)} images; at most {self.limits.max_images} are taken"
            raise InvalidRequest([Violation(where, described)])
        if len(places) != len(images):
            described = (
                f"{len(images)} images, and the prompt has {len(places)} places for them (token "
                f"{self._vision.image_token_id})"
            )
            raise InvalidRequest([Violation(where, described)])
        if not images:
            return Placed(tuple(token_ids))
        sizes = _each(images, fields, lambda image: read_header(image, self.limits).size)
        pixels = sum(width * height for width, height in sizes)
        if pixels > FULL_IMAGES * self.limits.max_pixels:
            most = FULL_IMAGES * self.limits.max_pixels
            described = f"the images have {pixels} pixels together; at most {most} are taken"
            raise InvalidRequest([Violation(where, described)])
        counts = _each(sizes, fields, lambda size: self._processor.num_tokens(*size))
        total = len(token_ids) + sum(counts) - len(counts)
        if total > room - 1:
            raise PromptTooLong(total, room - 1)
        made = _each(images, fields, self._patches)
        return self._expanded(token_ids, places, made)

    def _patches(self, image: Image) -> tuple[NDArray[np.float32], Grid]:
        """The patches of one picture. Its header is read again, so that no picture has pixels in memory while
        others are decoded.
        """
        return self._processor.process(decode(read_header(image, self.limits)))

    def _expanded(
        self,
        token_ids: Sequence[int],
        places: Sequence[int],
        made: Sequence[tuple[NDArray[np.float32], Grid]],
    ) -> Placed:
        expanded: list[int] = []
        media: list[MediaItem] = []
        done = 0
        for place, (patches, grid) in zip(places, made, strict=True):
            expanded += token_ids[done:place]
            num_tokens = len(patches) // self._vision.patches_per_token
            media.append(MediaItem(patches, grid, digest_of(patches, grid), len(expanded), num_tokens))
            expanded += [self._vision.image_token_id] * num_tokens
            done = place + 1
        expanded += token_ids[done:]
        return Placed(tuple(expanded), tuple(media), self._vision.rotary_positions(len(expanded), media))


def _each(items: Sequence[T], fields: Sequence[str], make: Callable[[T], U]) -> list[U]:
    """What `make` makes of each. InvalidRequest with every BadImage that it raises."""
    made: list[U] = []
    bad: list[Violation] = []
    for item, field in zip(items, fields, strict=True):
        try:
            made.append(make(item))
        except BadImage as error:
            bad.append(Violation(f"{field}.{error.part}", str(error)))
    if bad:
        raise InvalidRequest(bad)
    return made
