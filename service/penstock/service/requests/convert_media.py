"""Converts the contract's pictures to checked values. Nothing of them is decoded here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.runtime.errors import UnsupportedFeature
from penstock.runtime.media.decoding import BadImage, check_bytes
from penstock.runtime.media.image import Image, ImageLimits
from penstock.service.requests.convert_params import Violations
from penstock.v1 import types_pb2

MAX_PARTS = 10_000
"""The most parts that all turns of a chat may have together."""
WHY_NO_IMAGES = "the model reads no images"
_MAX_NAMED = 20
"""How many pictures an error names that the model cannot read at all."""


def media(
    messages: Sequence[types_pb2.Image], limits: ImageLimits | None, bad: Violations
) -> tuple[Image, ...]:
    """The pictures of a prompt of text or token ids. Adds what is wrong with them to `bad`."""
    return _checked([(f"media[{i}]", image) for i, image in enumerate(messages)], "media", limits, bad)


def contents(
    turns: Sequence[types_pb2.ChatMessage], limits: ImageLimits | None, bad: Violations
) -> list[str | tuple[str | Image, ...]] | None:
    """What is said in each turn of a chat. Adds what is wrong with parts to `bad`, and returns None if there
    are too many. Raises UnsupportedFeature for pictures if `limits` is None: the model reads none.
    """
    found: list[tuple[str, types_pb2.Image]] = []
    num_parts = 0
    for i, turn in enumerate(turns):
        if not turn.parts:
            continue
        at = f"chat.messages[{i}]"
        num_parts += len(turn.parts)
        if num_parts > MAX_PARTS:
            bad.add(f"{at}.parts", f"at most {MAX_PARTS} parts in all messages together")
            return None
        if turn.content:
            bad.add(f"{at}.parts", "not together with content")
        for j, part in enumerate(turn.parts):
            kind = part.WhichOneof("part")
            if kind == "image":
                found.append((f"{at}.parts[{j}].image", part.image))
            elif kind is None:
                bad.add(f"{at}.parts[{j}]", "one of text and image is required")
    images = iter(_checked(found, "chat.messages", limits, bad))
    return [_content(turn, images) for turn in turns]


def _content(turn: types_pb2.ChatMessage, images: Iterator[Image]) -> str | tuple[str | Image, ...]:
    if not turn.parts:
        return turn.content
    none = Image(b"")
    return tuple(
        part.text if part.WhichOneof("part") != "image" else next(images, none) for part in turn.parts
    )


def _checked(
    found: Sequence[tuple[str, types_pb2.Image]], where: str, limits: ImageLimits | None, bad: Violations
) -> tuple[Image, ...]:
    """The pictures, each of which has its path; `where` is the path of all of them. None of them if there are
    too many.
    """
    if not found:
        return ()
    if limits is None:
        raise UnsupportedFeature([path for path, _ in found[:_MAX_NAMED]], WHY_NO_IMAGES)
    if not bad.allows(where, len(found), limits.max_images, "images"):
        return ()
    images = []
    for path, message in found:
        image = Image(message.data, message.media_type)
        try:
            check_bytes(image, limits)
        except BadImage as error:
            bad.add(f"{path}.{error.part}", str(error))
        images.append(image)
    return tuple(images)
