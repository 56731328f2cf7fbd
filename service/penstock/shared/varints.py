"""Protobuf's integers, for messages that are written by hand because they are written for each token."""

from __future__ import annotations


def _long(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


_NUM_SHORT = 1 << 14
_SHORT = tuple(map(_long, range(_NUM_SHORT)))


def varint(value: int) -> bytes:
    """Write an integer as protobuf does; a negative one as a 64-bit one."""
    return _SHORT[value] if 0 <= value < _NUM_SHORT else _long(value & 0xFFFFFFFFFFFFFFFF)
