"""Decodes an image that a stranger sent, with limits. The header is read first, so that a small file that
would become a huge image is refused before any pixel is made.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import IO

from PIL import ImageOps
from PIL.GifImagePlugin import GifImageFile
from PIL.Image import Image as PilImage
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from penstock.runtime.images.image import Image, ImageLimits

_OPENERS: dict[str, Callable[[IO[bytes]], ImageFile]] = {
    "image/png": PngImageFile,
    "image/jpeg": JpegImageFile,
    "image/webp": WebPImageFile,
    "image/gif": GifImageFile,
}
"""Pillow's classes themselves: `PIL.Image.open` would choose by its own list of formats, and has one bound of
pixels for the whole process."""


class BadImage(ValueError):
    """An image that is refused. `part` is what is wrong with it: "data" or "media_type"."""

    def __init__(self, message: str, part: str = "data") -> None:
        self.part = part
        super().__init__(message)


def sniff(data: bytes) -> str:
    """Return the media type that the bytes begin like; empty if it is none of those that are read."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return "image/gif" if data[:6] in (b"GIF87a", b"GIF89a") else ""


def check_bytes(image: Image, limits: ImageLimits) -> str:
    """Return the media type of an image that is neither too large nor of another format than it says;
    otherwise raise BadImage. It takes no time, because only the first bytes are looked at.
    """
    data = image.data
    if not data:
        raise BadImage("must not be empty")
    if len(data) > limits.max_bytes:
        raise BadImage(f"has {len(data)} bytes; at most {limits.max_bytes} are taken")
    media_type = sniff(data)
    if media_type not in limits.media_types:
        raise BadImage(f"is in none of the formats {', '.join(limits.media_types)}")
    if image.media_type and image.media_type != media_type:
        raise BadImage(f"is {image.media_type[:40]!r}, and the data is {media_type}", "media_type")
    return media_type


def read_header(image: Image, limits: ImageLimits) -> ImageFile:
    """Return the image with its size known and no pixel decoded. Raises BadImage as `check_bytes` does, and
    for what has too many pixels or is not readable.
    """
    data, media_type = image.data, check_bytes(image, limits)
    if media_type == "image/webp":
        _check_size(*_webp_size(data), limits)  # Pillow makes two canvases as soon as it opens one
    try:
        opened = _OPENERS[media_type](io.BytesIO(data))
    except Exception as error:  # a decoder of hostile bytes may raise anything
        raise _unreadable(error) from error
    _check_size(*opened.size, limits)
    return opened


def decode(opened: ImageFile) -> PilImage:
    """Decode the first frame of what `read_header` has returned, turned as its EXIF orientation says. Raises
    BadImage where the bytes end early or make no image.
    """
    try:
        opened.load()
        turned: PilImage = ImageOps.exif_transpose(opened)
    except Exception as error:
        raise _unreadable(error) from error
    return turned


def _unreadable(error: Exception) -> BadImage:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return BadImage(f"cannot be decoded: {reason[:200]}")


def _check_size(width: int, height: int, limits: ImageLimits) -> None:
    if width < 1 or height < 1:
        raise BadImage(f"has {width} x {height} pixels")
    if width * height > limits.max_pixels:
        raise BadImage(f"has {width} x {height} pixels; at most {limits.max_pixels} are taken")


def _webp_size(data: bytes) -> tuple[int, int]:
    """Read width and height by the first chunk of a WebP file (RFC 9649)."""
    kind, body = data[12:16], data[20:30]
    if len(body) == 10:
        if kind == b"VP8X":
            return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
        if kind == b"VP8L" and body[0] == 0x2F:
            bits = int.from_bytes(body[1:5], "little")
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        if kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
            width, height = (int.from_bytes(body[at : at + 2], "little") for at in (6, 8))
            return width & 0x3FFF, height & 0x3FFF
    raise BadImage("cannot be decoded: its first chunk says no size")
