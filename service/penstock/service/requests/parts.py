"""Counts the parts of a large message before protobuf parses it.

Protobuf holds Python's interpreter while it parses, so nothing else of the server runs meanwhile. Eight
megabytes of text take a millisecond, but eight megabytes of two-byte messages take a fifth of a second and
hundreds of megabytes of memory. The count here can be interrupted, and ends as soon as there are too many
parts.
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
"""Messages up to this size cannot have too many parts."""
MAX_FIELDS = 200_000
"""The fields that every message may have, even if the vocabulary is small or not known yet."""
SPARE_FIELDS = 50_000
"""The fields that a message may have beside a bias for every token of the vocabulary."""
MAX_IDS = 2**21
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_FIXED: Final = {FIXED64: 8, FIXED32: 4}
_NO_NUMBERS = (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE)


def check_parts(descriptor: Descriptor, data: bytes, vocab_size: int = 0) -> None:
    """Raise InvalidRequest if the message has too many parts: more than MAX_FIELDS fields (more are allowed
    for a large vocabulary), or more than MAX_IDS numbers in packed lists. Raise DecodeError if the bytes are
    visibly no message.
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
    """The type of message in this field, if it is one to look into; the entries of a map are counted as
    single parts.
    """
    kind = field.message_type
    return None if kind is None or kind.GetOptions().map_entry else kind


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a number. Returns it and the position after it."""
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise DecodeError("a number does not end")
