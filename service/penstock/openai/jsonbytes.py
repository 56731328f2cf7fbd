"""Writes JSON as it goes over the wire."""

from __future__ import annotations

import json
from typing import Any

_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_bytes(value: Any) -> bytes:
    """The JSON of a value in UTF-8, without spaces. Raises ValueError for NaN and infinity. A lone surrogate,
    which UTF-8 does not have, becomes a question mark.
    """
    return _ENCODE(value).encode("utf-8", "replace")
