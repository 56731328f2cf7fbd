"""How many parts a large message has, found out before protobuf takes it apart.

Protobuf holds the interpreter while it parses, so that nothing else of the server runs meanwhile. Eight
megabytes of text take it a millisecond, but of two-byte messages a fifth of a second, and hundreds of
megabytes of memory. This walk may be interrupted, and ends where there is too much.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from penstock.runtime.errors import InvalidRequest, Violation

LOOKED_AT_BYTES = 64 * 1024
"""A smaller message cannot have too many parts."""
MAX_FIELDS = 200_000
"""Of a message, also where the vocabulary is small, or not yet known."""
SPARE_FIELDS = 50_000
"""Beside a bias for every token of the vocabulary."""
MAX_IDS = 2**21
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_FIXED: Final = {FIXED64: 8, FIXED32: 4}
_NO_NUMBERS = (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE)


def check_parts(descriptor: Descriptor, data: bytes, vocab_size: int = 0) -> None:
    """Raises InvalidRequest where the message has more parts than there may be: MAX_FIELDS fields, or more
    for a large vocabulary, and MAX_IDS numbers in packed lists. Raises DecodeError where the bytes are no
    message, as far as that is seen.
    """
    if len(data) <= LOOKED_AT_BYTES:
        return
    max_fields = max(MAX_FIELDS, vocab_size + SPARE_FIELDS if vocab_size else 0)
    numbers: NDArray[np.uint8] = np.frombuffer(data, np.uint8)
    num_fields = num_ids = 0
    levels: list[tuple[Descriptor, int, str]] = [(descriptor, len(data), "")]
    at = 0
    while levels:
        message, end, path = levels[-1]
        if at >= end:
            if at > end:
                raise DecodeError("a field ends behind the message that it is in")
            levels.pop()
            continue
        num_fields += 1
        if num_fields > max_fields:
            described = f"the request has more than {max_fields} fields in all"
            raise InvalidRequest([Violation(path.removesuffix("."), described)])
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == VARINT:
            _, at = _varint(data, at)
            continue
        if kind in _FIXED:
            at += _FIXED[kind]
            continue
        if kind != BYTES:
            raise DecodeError(f"no field of the contract has the wire type {kind}")
        size, at = _varint(data, at)
        field = message.fields_by_number.get(tag >> 3)
        below = None if field is None else _message_in(field)
        if field is not None and below is not None and at + size <= end:
            levels.append((below, at + size, f"{path}{field.name}."))
            continue
        if field is not None and field.cpp_type not in _NO_NUMBERS:
            num_ids += int(np.count_nonzero(numbers[at : at + size] < 128))
            if num_ids > MAX_IDS:
                described = f"the request has more than {MAX_IDS} ids in all"
                raise InvalidRequest([Violation(path + field.name, described)])
        at += size


@functools.cache
def _message_in(field: FieldDescriptor) -> Descriptor | None:
    """The kind of message that parts are looked for in; the entry of a map is a part itself."""
    kind = field.message_type
    return None if kind is None or kind.GetOptions().map_entry else kind


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number, and where the next byte after it is."""
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise DecodeError("a number does not end")
