"""Puts the images of a prompt into it: checks them, makes patches of them, and makes room for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

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


class Patches(NamedTuple):
    """What the encoder is given of an image, or of a part that it encodes on its own, such as a tile."""

    values: NDArray[np.float32]
    """float32[N, P], see `MediaItem.patches`."""
    grid: Grid
    num_tokens: int
    """How many image tokens it needs."""
    row_ends: tuple[int, ...] = ()
    """The tokens of text behind each row of its image tokens, of which each row has as many. Empty: there are
    none."""


Part: TypeAlias = tuple[int, ...] | Patches
"""Tokens of text that stand before, between or behind patches; or patches."""


class Processor(Protocol):
    """Makes patches of images. Each kind of encoder has one (`processors`)."""

    def num_tokens(self, width: int, height: int) -> int:
        """Tell how many tokens take the place of the token of an image of so many pixels. Raises
        BadImage.
        """
        ...

    def process(self, image: PilImage) -> Sequence[Part]:
        """Return what takes the place of an image's token. Raises BadImage."""
        ...


class Placed(NamedTuple):
    """A prompt with its images."""

    token_ids: tuple[int, ...]
    media: tuple[MediaItem, ...] = ()
    rotary: RotaryPositions | None = None


class ImageReader:
    """Reads images for one model. Any thread may use it; a large image takes a tenth of a second."""

    def __init__(
        self,
        vision: Vision,
        processor: Processor,
        limits: ImageLimits,
        marks: tuple[str, str, str] | None = None,
    ) -> None:
        """Take as `marks` the texts of the tokens that stand before an image, for it, and behind it, where
        texts may have the first alone (`Vision.around`).
        """
        self.limits = limits
        self._marks = marks
        self._vision = vision
        self._processor = processor

    @property
    def image_token_id(self) -> int:
        """The token that stands for an image in a prompt."""
        written = self._vision.written_token_id
        return self._vision.image_token_id if written is None else written

    def written_out(self, text: str) -> str:
        """Write out a text in which images stand as the model's processor writes them: between two tokens
        and blank lines, for a model whose templates write the first of these tokens in the place of all. It
        is done in the text because a tokenizer may join blank lines with those around them.
        """
        if self._marks is None:
            return text
        begin, image, end = self._marks
        whole = f"{begin}{image}{end}"
        parts = text.split(whole)
        return whole.join(part.replace(begin, f"\n\n{whole}\n\n") for part in parts)

    def place(
        self,
        token_ids: Sequence[int],
        images: Sequence[Image],
        fields: Sequence[str],
        where: str,
        *,
        room: int,
    ) -> Placed:
        """Put the images, in their order, in the places of the prompt's image tokens. `fields` are the
        contract's paths of the images, and `where` is that of all of them.

        Raises InvalidRequest with every image that cannot be read, or if there are too many, of too many
        pixels together, or not as many as places; PromptTooLong if the prompt would have more than `room` - 1
        tokens, before any image is decoded.
        """
        places = [i for i, token in enumerate(token_ids) if token == self.image_token_id]
        if self.image_token_id != self._vision.image_token_id and self._vision.image_token_id in token_ids:
            described = (
                f"the prompt has token {self._vision.image_token_id}, which stands for a part of an image: "
                f"write token {self.image_token_id} in the place of a whole one"
            )
            raise InvalidRequest([Violation(where, described)])
        for token, kind in self._vision.refused_tokens:
            if token in token_ids:
                described = f"the prompt has a place for {kind} (token {token}), which is not taken"
                raise InvalidRequest([Violation(where, described)])
        if len(images) > self.limits.max_images:
            described = f"{len(images)} images; at most {self.limits.max_images} are taken"
            raise InvalidRequest([Violation(where, described)])
        if len(places) != len(images):
            described = (
                f"{len(images)} images, and the prompt has {len(places)} places for them (token "
                f"{self.image_token_id})"
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
        made = _each(images, fields, self._parts)
        return self._expanded(token_ids, places, made)

    def _parts(self, image: Image) -> Sequence[Part]:
        """Return what takes the place of one image. Its header is read again, so that no image has pixels
        in memory while others are decoded.
        """
        return self._processor.process(decode(read_header(image, self.limits)))

    def _expanded(
        self,
        token_ids: Sequence[int],
        places: Sequence[int],
        made: Sequence[Sequence[Part]],
    ) -> Placed:
        expanded: list[int] = []
        media: list[MediaItem] = []
        done = 0
        for place, parts in zip(places, made, strict=True):
            expanded += token_ids[done:place]
            for part in parts:
                if isinstance(part, Patches):
                    tokens, row = self._tokens_of(part)
                    digest = digest_of(part.values, part.grid)
                    media.append(MediaItem(part.values, part.grid, digest, len(expanded), len(tokens), row))
                    expanded += tokens
                else:
                    expanded += part
            done = place + 1
        expanded += token_ids[done:]
        positions = self._vision.rotary_positions
        rotary = None if positions is None else positions(len(expanded), media)
        return Placed(tuple(expanded), tuple(media), rotary)

    def _tokens_of(self, part: Patches) -> tuple[list[int], int | None]:
        """Return the tokens of patches, and `MediaItem.row_tokens`."""
        image = self._vision.image_token_id
        if not part.row_ends:
            return [image] * part.num_tokens, None
        row = part.num_tokens // len(part.row_ends)
        return [token for end in part.row_ends for token in (*[image] * row, end)], row


def _each(items: Sequence[T], fields: Sequence[str], make: Callable[[T], U]) -> list[U]:
    """Return what `make` makes of each. InvalidRequest with every BadImage that it raises."""
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
