"""Refuses the fields of the contract that this release does not honour, and messages of too many parts.

A field that is set and has no effect is refused, never ignored. `REFUSED` names these fields; all others are
honoured. tests/service/requests/test_support.py walks the descriptors, and fails for a field that is neither
refused nor named there with the test of its effect. Paths are dotted, from the request message down, without
the indices of repeated fields. A refused path covers everything below it.

`check_parts` counts the parts of a large message before protobuf parses it. Protobuf holds Python's
interpreter while it parses, so nothing else of the server runs meanwhile. Eight megabytes of text take a
millisecond, but eight megabytes of two-byte messages take a fifth of a second and hundreds of megabytes of
memory. The count here can be interrupted, and ends as soon as there are too many parts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, TypeVar

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from numpy.typing import NDArray

from penstock.runtime.errors import InvalidRequest, UnsupportedFeature, Violation

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
    """Return the type of message in this field, if it is one to look into; the entries of a map are counted
    as single parts.
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


MAX_WALKED = 1_000
"""How many messages within one request are searched for unknown fields."""
MAX_UNKNOWN = 20
"""How many unknown fields an error names."""
M = TypeVar("M", bound=Message)

Refused = Mapping[str, tuple[object, ...]]
_NOTHING: Refused = {}

REFUSED: Mapping[str, Refused] = {"penstock.v1.UpdateWeightsRequest": {"begin.adapter": ()}}
"""From a message's name to the paths that are refused, each with the values that are accepted
nevertheless.
"""


def check_supported(
    request: Message, lacking: Refused = _NOTHING, why: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise UnsupportedFeature, which names every field that is set and not honoured, with indices.

    `lacking` are paths that this server cannot honour as it was started, each with the values that are
    accepted nevertheless. `why` says for some of them what keeps the server from honouring them.
    """
    refused = {**REFUSED.get(request.DESCRIPTOR.full_name, _NOTHING), **lacking}
    found = list(_unsupported(request, "", "", refused)) if refused else []
    if found:
        raise UnsupportedFeature(found, "; ".join(dict.fromkeys(why[path] for path in found if path in why)))


def _unsupported(message: Message, rule_at: str, shown_at: str, refused: Refused) -> Iterator[str]:
    for field, value in message.ListFields():
        rule, shown = rule_at + field.name, shown_at + field.name
        if rule in refused:
            if value not in refused[rule]:
                yield shown
        # Nothing has to look into each of the ten thousand turns of a chat if nothing is refused there.
        elif any(path.startswith(f"{rule}.") for path in refused):
            many = field.is_repeated
            for i, item in enumerate(value if many else [value]):
                below = f"{shown}[{i}]." if many else f"{shown}."
                yield from _unsupported(item, rule + ".", below, refused)


def check_known(message: M, parse: Callable[[bytes], M], data: bytes) -> None:
    """Raise if the message has fields that the contract does not have, or has with another wire type, because
    protobuf drops those.

    An unknown number raises UnsupportedFeature, as it comes from a newer client. A known number with a wrong
    type raises InvalidRequest, because that client is broken. `message` is `parse(data)`; its unknown fields
    are removed.
    """
    size = message.ByteSize()
    # done in C; a walk over all its messages would take a thousand times as long
    message.DiscardUnknownFields()
    if message.ByteSize() != size:
        check_wire(parse(data))
        raise UnsupportedFeature([f"an unknown field, behind {MAX_WALKED} nested messages"])


def check_wire(message: Message) -> None:
    """Raise as `check_known` does, with the names of the first such fields."""
    unsupported: list[str] = []
    violations: list[Violation] = []
    for owner, path in itertools.islice(_messages(message, ""), MAX_WALKED):
        unknown = UnknownFieldSet(owner)
        for i in range(min(len(unknown), MAX_UNKNOWN)):
            known = owner.DESCRIPTOR.fields_by_number.get(unknown[i].field_number)
            if known is None:
                unsupported.append(f"{path}{owner.DESCRIPTOR.name}#{unknown[i].field_number}")
            else:
                violations.append(Violation(path + known.name, "has the wrong wire type"))
        if len(violations) + len(unsupported) >= MAX_UNKNOWN:
            break
    if violations:
        raise InvalidRequest(violations)
    if unsupported:
        raise UnsupportedFeature(unsupported)


def _messages(message: Message, path: str) -> Iterator[tuple[Message, str]]:
    """Yield the message and all messages in it, each with the path up to its fields."""
    yield message, path
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        many = field.is_repeated
        for i, item in enumerate(value if many else [value]):
            yield from _messages(item, f"{path}{field.name}[{i}]." if many else f"{path}{field.name}.")
