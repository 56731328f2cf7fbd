"""Writes GGUF files by hand, right ones and those that lie."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

Typed = tuple[int, bytes]
"""The number of a type of values, and a value of it as a file has it."""


def text(value: str) -> bytes:
    """Make a text as a file has it."""
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def typed(value: object) -> Typed:
    """Make a value, with the type that fits it; lists are of texts, of truths, or of integers."""
    if isinstance(value, bool):
        return 7, bytes([value])
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, text(value)
    assert isinstance(value, list)
    elements = [typed(element) for element in value]
    kind = elements[0][0] if elements else 4
    return 9, struct.pack("<IQ", kind, len(elements)) + b"".join(data for _, data in elements)


def tensor(name: str, shape: Sequence[int], kind: int, offset: int) -> bytes:
    """Return the description of a tensor, whose sizes a file has in reverse."""
    sizes = b"".join(struct.pack("<Q", size) for size in reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def header(
    keys: Mapping[str, Typed] | Sequence[tuple[str, Typed]],
    tensors: Sequence[bytes] = (),
    *,
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    """Return the begin of a file. The numbers are those of what is there, unless they are given."""
    pairs = list(keys.items()) if isinstance(keys, Mapping) else list(keys)
    counts = [
        len(tensors) if num_tensors is None else num_tensors,
        len(pairs) if num_keys is None else num_keys,
    ]
    body = b"".join(text(key) + struct.pack("<I", kind) + data for key, (kind, data) in pairs)
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + body + b"".join(tensors)


def padded(data: bytes, alignment: int = 32) -> bytes:
    """Return the bytes up to the next multiple of the alignment."""
    return data + bytes(-len(data) % alignment)
