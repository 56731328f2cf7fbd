"""Images of strangers: what is decoded, and what is refused before or while it is."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pil
from PIL.PngImagePlugin import PngInfo

from penstock.runtime.images.decoding import BadImage, decode, read_header, sniff
from penstock.runtime.images.image import MEDIA_TYPES, Image, ImageLimits

LIMITS = ImageLimits(max_images=4, max_bytes=50_000, max_pixels=10_000, max_tokens=16)
FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}


def encoded(image: Pil.Image, media_type: str = "image/png", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, FORMATS[media_type], **options)
    return buffer.getvalue()


def stripes(width: int = 40, height: int = 20) -> Pil.Image:
    """Red on the left, blue on the right."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : width // 2, 0] = 255
    pixels[:, width // 2 :, 2] = 255
    return Pil.fromarray(pixels)


def read(data: bytes, media_type: str = "") -> Pil.Image:
    return decode(read_header(Image(data, media_type), LIMITS))


@pytest.mark.parametrize("media_type", MEDIA_TYPES)
def test_every_format_is_decoded(media_type: str) -> None:
    data = encoded(stripes(), media_type)
    assert sniff(data) == media_type
    image = read(data, media_type).convert("RGB")
    assert image.size == (40, 20)
    left, right = np.array(image)[10, 5], np.array(image)[10, 35]
    np.testing.assert_allclose(left, [255, 0, 0], atol=12)
    np.testing.assert_allclose(right, [0, 0, 255], atol=12)


@pytest.mark.parametrize("mode", ["lossless", "lossy", "alpha"])
def test_webp_says_its_size_in_each_of_its_forms(mode: str) -> None:
    image = stripes(41, 23).convert("RGBA" if mode == "alpha" else "RGB")
    if mode == "alpha":
        image.putalpha(100)
    data = encoded(image, "image/webp", lossless=mode == "lossless")
    assert read(data).size == (41, 23)


def test_of_an_animation_the_first_frame_counts() -> None:
    frames = [Pil.new("RGB", (8, 8), color) for color in ("red", "lime", "blue")]
    for media_type in ("image/gif", "image/webp", "image/png"):
        data = encoded(frames[0], media_type, save_all=True, append_images=frames[1:])
        assert read(data).convert("RGB").getpixel((3, 3))[0] > 240, media_type  # type: ignore[index]


def test_exif_turns_the_image() -> None:
    exif = Pil.Exif()
    exif[0x0112] = 6  # as a phone that was held upright writes it
    for media_type in ("image/jpeg", "image/png", "image/webp"):
        assert read(encoded(stripes(), media_type, exif=exif)).size == (20, 40)


def huge_png(width: int, height: int) -> bytes:
    """Make a few hundred bytes that say they are a large image."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(1000)))
        + chunk(b"IEND", b"")
    )


def huge_webp() -> bytes:
    """Make a canvas of 16384 x 16384, for which Pillow would make room twice when it opens it."""
    body = bytes([0, 0, 0, 0]) + (16383).to_bytes(3, "little") * 2
    return b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<I", 10) + body


def huge_gif() -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"," + bytes(9)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(huge_png(101, 100), id="png"),
        pytest.param(huge_png(2**31 - 1, 2**31 - 1), id="bomb"),
        pytest.param(huge_webp(), id="webp"),
        pytest.param(encoded(stripes(200, 100), "image/jpeg"), id="jpeg"),
        pytest.param(encoded(stripes(200, 100), "image/gif"), id="gif"),
    ],
)
def test_too_many_pixels_are_refused_by_the_header(data: bytes) -> None:
    with pytest.raises(BadImage, match=r"has \d+ x \d+ pixels; at most 10000 are taken"):
        read_header(Image(data), LIMITS)


@pytest.mark.parametrize(
    ("data", "media_type", "part", "message"),
    [
        (b"", "", "data", "must not be empty"),
        (b"x" * 50_001, "", "data", "has 50001 bytes; at most 50000 are taken"),
        (b"<svg/>", "", "data", "none of the formats image/png, image/jpeg"),
        (b"BM" + bytes(60), "", "data", "none of the formats"),
        (b"II*\0" + bytes(60), "image/tiff", "data", "none of the formats"),
        (encoded(stripes()), "image/jpeg", "media_type", "is 'image/jpeg', and the data is image/png"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "", "data", "cannot be decoded"),
        (b"\xff\xd8\xff\xe0" + bytes(40), "", "data", "cannot be decoded"),
        (b"RIFF\x10\0\0\0WEBPVP8 " + bytes(40), "", "data", "cannot be decoded"),
        (b"RIFF\x10\0\0\0WEBP", "", "data", "cannot be decoded"),
        (b"GIF89a", "", "data", "cannot be decoded"),
        (huge_gif(), "", "data", "cannot be decoded|pixels"),
        (huge_png(0, 5), "", "data", "cannot be decoded|pixels"),
    ],
)
def test_what_is_no_image_is_refused(data: bytes, media_type: str, part: str, message: str) -> None:
    with pytest.raises(BadImage, match=message) as raised:
        read(data, media_type)
    assert raised.value.part == part


@pytest.mark.parametrize("media_type", MEDIA_TYPES)
def test_an_image_that_ends_early_is_refused(media_type: str) -> None:
    rng = np.random.default_rng(1)
    noise = Pil.fromarray(rng.integers(0, 255, (60, 60, 3), np.uint8))
    data = encoded(noise, media_type)
    assert len(data) > 400
    for length in (30, len(data) // 3, len(data) // 2):
        with pytest.raises(BadImage, match="cannot be decoded"):
            read(data[:length])


@pytest.mark.parametrize("media_type", MEDIA_TYPES)
def test_damaged_images_are_decoded_or_refused(media_type: str) -> None:
    """Bytes are exchanged at random; nothing but BadImage may come of it."""
    rng = random.Random(3)
    data = encoded(stripes(), media_type)
    outcomes = set()
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            outcomes.add(read(bytes(damaged)).size[0] > 0)
        except BadImage:
            outcomes.add(False)
    assert False in outcomes


def test_a_text_that_inflates_is_refused() -> None:
    info = PngInfo()
    info.add_text("comment", "x" * 4_000_000, zip=True)
    data = encoded(stripes(), pnginfo=info)
    assert len(data) < LIMITS.max_bytes
    with pytest.raises(BadImage, match="cannot be decoded"):
        read(data)


def test_an_image_is_bytes_or_a_file(tmp_path: Any) -> None:
    data = encoded(stripes())
    (tmp_path / "image.png").write_bytes(data)
    for source in (data, tmp_path / "image.png", str(tmp_path / "image.png")):
        assert Image(source) == Image(data)
    assert str(len(data)) not in repr(Image(data))
    with pytest.raises(FileNotFoundError):
        Image(tmp_path / "other.png")
