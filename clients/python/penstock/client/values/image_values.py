"""A picture of a prompt or of a turn."""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class Image:
    """A picture that the model is shown: the bytes of a file in a form that the server reads, such as PNG or
    JPEG (`ModelInfo.image_limits` lists them).

    `Image("cat.png")` reads the file at once (OSError), and `Image(data)` takes its bytes. Nothing is fetched
    from an address, neither here nor by the server.
    """

    data: bytes = field(repr=False)
    media_type: str = ""
    """The form that the bytes are to have, such as "image/png"; empty: whatever they tell."""

    def __init__(
        self, source: bytes | bytearray | memoryview | str | os.PathLike[str], media_type: str = ""
    ) -> None:
        if isinstance(source, str | os.PathLike):
            source = Path(source).read_bytes()
        if not isinstance(source, bytes | bytearray | memoryview):
            raise TypeError(f"give the path of a file, or its bytes, not {type(source).__name__}")
        if not isinstance(media_type, str):
            raise TypeError(f"media_type must be a text, not {type(media_type).__name__}")
        object.__setattr__(self, "data", bytes(source))
        object.__setattr__(self, "media_type", media_type)

    @classmethod
    def from_data_url(cls, url: str) -> Self:
        """Make a picture of an address such as "data:image/png;base64,...", which has the bytes in it. Raises
        ValueError for any other address, because nothing is fetched.
        """
        head, comma, encoded = url.partition(",")
        scheme, _, told = head.partition(":")
        if scheme.lower() != "data" or not comma:
            raise ValueError(
                "must be a data: URL, such as data:image/png;base64,...; addresses are not fetched"
            )
        media_type, *parameters = told.split(";")
        if not parameters or parameters[-1].strip().lower() != "base64":
            raise ValueError("the data of a data: URL must be in base64")
        try:
            return cls(base64.b64decode(encoded, validate=True), _registered(media_type.strip().lower()))
        except binascii.Error as error:
            raise ValueError(f"the data of the URL is not base64: {error}") from error


def _registered(media_type: str) -> str:
    """The registered name of a media type: many programs write JPEG's without the "e"."""
    return "image/jpeg" if media_type == "image/jpg" else media_type
