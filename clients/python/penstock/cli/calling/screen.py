"""Writes to the terminal, in a form that is safe.

A server's text is not ours, and a terminal obeys some characters: they move the cursor, rename the window, or
hide what was written before. So everything that a server said passes through `write` or `visible`.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

_CONTROLS = (*range(0x20), 0x7F, *range(0x80, 0xA0))
_ORDERING = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that reverse the direction of the text after them, and so can make a line read as
another one.
"""
_REPLACED = {code: "�" for code in _CONTROLS if chr(code) not in "\n\t"}
_ESCAPED = {
    **{code: f"\\x{code:02x}" for code in _CONTROLS},
    **{code: f"\\u{code:04x}" for code in _ORDERING},
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\t",
}
_JSON_ESCAPED = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), *_ORDERING)}
"""Characters to escape that JSON itself leaves as they are."""


def write(text: str) -> None:
    """Show a model's text at once. On a terminal control characters are replaced, because they could rewrite
    it.
    """
    sys.stdout.write(text.replace("\r\n", "\n").translate(_REPLACED) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def visible(text: str) -> str:
    """Return the text as one line, with an escape for every control character except tabs."""
    return text.translate(_ESCAPED)


def complain(command: str, message: str) -> None:
    """Print one line on stderr."""
    print(f"penstock {command}: {visible(message)}", file=sys.stderr)


def plain(value: object) -> Any:
    """Convert dataclasses, enums, digests, paths and times to values that json can write. NaN, which JSON
    does not have, becomes null.
    """
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_json(value: object, *, one_line: bool = False) -> None:
    """Print as JSON, with control characters escaped: indented, or as one line, which is written at once."""
    text = json.dumps(plain(value), indent=None if one_line else 2, ensure_ascii=False)
    print(text.translate(_JSON_ESCAPED), flush=one_line)
