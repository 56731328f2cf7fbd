"""Reasoning as the one string that OpenAI calls `encrypted_content`.

A caller whose responses are not kept sends items of reasoning back, and many send nothing of them but this
string. It holds the whole text. It is not encrypted, because the caller has the text in any case.
"""

from __future__ import annotations

import base64
import binascii

_PREFIX = "penstock-reasoning:"


def carried(text: str) -> str:
    """The string that carries the text."""
    return _PREFIX + base64.b64encode(text.encode()).decode()


def text_of(string: str) -> str:
    """The text that `carried` made the string of. Raises ValueError for a string that it did not make."""
    if not string.startswith(_PREFIX):
        raise ValueError("it was not made by this front")
    try:
        return base64.b64decode(string.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ValueError("it has been changed since this front made it") from error
