"""Builds messages from serialized parts, so that large messages never exist as objects."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import Message

_LENGTH_DELIMITED = 2


def field(message: type[Message], name: str, parts: Sequence[bytes]) -> list[bytes]:
    """Serialize the field `name` of `message`, which is a message itself, from its serialized parts.

    The parts of a message are serializations of it with some of its fields set; joined they are the whole
    message.
    """
    number = message.DESCRIPTOR.fields_by_name[name].number
    return [_varint(number << 3 | _LENGTH_DELIMITED) + _varint(sum(map(len, parts))), *parts]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
