"""Builds messages from serialized parts, so that large messages never exist as objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from google.protobuf.message import Message

_LENGTH_DELIMITED = 2


def field(message: type[Message], name: str, parts: Sequence[bytes]) -> list[bytes]:
    """Serialize the field `name` of `message`, which is a message itself, from its serialized parts.

    The parts of a message are serializations of it with some of its fields set; joined they are the whole
    message.
    """
    return [tag(message, name) + varint(sum(map(len, parts))), *parts]


def tag(message: type[Message], name: str) -> bytes:
    """What begins the field `name` of `message`: a message, text, or packed numbers. Its length follows."""
    return varint(message.DESCRIPTOR.fields_by_name[name].number << 3 | _LENGTH_DELIMITED)


def enclosed(tag: bytes, body: bytes) -> bytes:
    """A field with this tag and this content."""
    return tag + varint(len(body)) + body


def packed(values: Iterable[int]) -> bytes:
    """The content of a repeated field of unsigned numbers."""
    return b"".join(map(varint, values))


def varint(value: int) -> bytes:
    """A number from 0 on."""
    return _SHORT[value] if value < _NUM_SHORT else _varint(value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


_NUM_SHORT = 1 << 14
_SHORT = tuple(map(_varint, range(_NUM_SHORT)))
