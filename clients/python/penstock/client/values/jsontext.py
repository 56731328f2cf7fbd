"""Converts between Python values and JSON text, which the contract carries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_KINDS = {
    list: "array",
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


def json_text(value: object) -> str:
    """Return text unchanged, and anything else as JSON, with keys in their order. Raises ValueError for what
    JSON cannot express (NaN, a list that contains itself), and TypeError for other types.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        value = dict(value)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError("is nested too deeply for JSON") from None


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError if the text holds anything else."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"is a JSON {_KINDS.get(type(value), 'value')}, not an object")
    return value
