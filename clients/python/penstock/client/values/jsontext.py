"""JSON between Python values and the contract, which carries it as text."""

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
    """Text as it is, anything else as JSON, keys in their order.

    ValueError for what JSON lacks (NaN, a list in itself), TypeError for what is no JSON type.
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
    """The object that a text holds; ValueError when it holds anything else."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"is a JSON {_KINDS.get(type(value), 'value')}, not an object")
    return value
