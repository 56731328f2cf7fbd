"""The calls of a leader's runner, and what is told of weight updates, as messages and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from penstock.runtime.following.interface import (
    Call,
    Kind,
    Piece,
    Prepared,
    Taken,
    UpdateBegin,
    UpdateEnd,
    UpdateOver,
    UpdateRecord,
)
from penstock.runtime.sent_tensors import SentTensor
from penstock.runtime.updating.interface import Staging
from penstock.service.group import group_pb2
from penstock.service.replies.messages import tag
from penstock.shared.varints import varint

_TO_NUMBER = {kind: group_pb2.Kind.Value(f"KIND_{kind.name}") for kind in Kind}
_FROM_NUMBER = {number: kind for kind, number in _TO_NUMBER.items()}
_DTYPES = {
    name: np.dtype(name) for name in ("bool", "int32", "int64", "uint8", "uint32", "float32", "float64")
}


_CALL = tag(group_pb2.FollowResponse, "call")
_ARRAYS = tag(group_pb2.Call, "arrays")
_VALUES = tag(group_pb2.Array, "values")
_Form: TypeAlias = tuple[np.dtype[Any], tuple[int, ...]]
"""The dtype and the shape of an array."""


def call_bytes(call: Call) -> bytes:
    """Make the serialized FollowResponse with a call. It is joined of parts, because the engine's thread
    waits for it, and to make messages takes five times as long.
    """
    forms = tuple((array.dtype, array.shape) for array in call.arrays)
    begin, *heads = _heads(call.kind, call.program, forms)
    parts: list[Any] = [begin]  # bytes and arrays, whose memory is joined as it is
    for head, array in zip(heads, call.arrays, strict=True):
        parts += (head, np.ascontiguousarray(array))
    return b"".join(parts)


@lru_cache(maxsize=1024)
def _heads(kind: Kind, program: str, forms: Sequence[_Form]) -> tuple[bytes, ...]:
    """Serialize a call but for its values: its begin, and what comes before the values of each array."""
    begin = group_pb2.Call(kind=_TO_NUMBER[kind], program=program).SerializeToString()
    heads, size = [], len(begin)
    for dtype, shape in forms:
        num_bytes = math.prod(shape) * dtype.itemsize
        array = group_pb2.Array(dtype=dtype.name, shape=shape).SerializeToString()
        array += _VALUES + varint(num_bytes)
        heads.append(_ARRAYS + varint(len(array) + num_bytes) + array)
        size += len(heads[-1]) + num_bytes
    return (_CALL + varint(size) + begin, *heads)


def call_of(message: group_pb2.Call) -> Call:
    """Read the call in a message. Its arrays cannot be written. ValueError for a message that means none."""
    if message.kind not in _FROM_NUMBER:
        raise ValueError(f"there is no kind of call with the number {message.kind}")
    arrays = []
    for array in message.arrays:
        if array.dtype not in _DTYPES:
            raise ValueError(f"calls have no arrays of {array.dtype!r}")
        arrays.append(np.frombuffer(array.values, _DTYPES[array.dtype]).reshape(tuple(array.shape)))
    return Call(_FROM_NUMBER[message.kind], message.program, tuple(arrays))


def update_bytes(record: UpdateRecord) -> bytes:
    """Make the serialized FollowResponse with a part of an update."""
    response = group_pb2.FollowResponse()
    match record:
        case UpdateBegin(number, tensors, staging, uri):
            sent = [group_pb2.Tensor(name=each.name, dtype=each.dtype, shape=each.shape) for each in tensors]
            begin = group_pb2.UpdateBegin(number=number, tensors=sent, staging=staging.value, uri=uri)
            response.update_begin.CopyFrom(begin)
        case Piece(number, tensor_index, data):
            piece = response.piece
            piece.number, piece.tensor_index, piece.data = number, tensor_index, bytes(data)
        case UpdateEnd(number):
            response.update_end.number = number
        case UpdateOver(number):
            response.update_over.number = number
    return response.SerializeToString()


def record_of(message: group_pb2.FollowResponse) -> Call | UpdateRecord | None:
    """Read the call or the part of an update in a message; None: it has another thing. ValueError for one
    that means nothing.
    """
    match message.WhichOneof("record"):
        case "call":
            return call_of(message.call)
        case "update_begin":
            begin = message.update_begin
            tensors = tuple(SentTensor(each.name, each.dtype, tuple(each.shape)) for each in begin.tensors)
            return UpdateBegin(begin.number, tensors, Staging(begin.staging), begin.uri)
        case "piece":
            piece = message.piece
            return Piece(piece.number, piece.tensor_index, piece.data)
        case "update_end":
            return UpdateEnd(message.update_end.number)
        case "update_over":
            return UpdateOver(message.update_over.number)
    return None


def report_message(report: Taken | Prepared) -> group_pb2.FollowRequest:
    """Make the message with what a follower tells of an update."""
    if isinstance(report, Taken):
        return group_pb2.FollowRequest(taken=group_pb2.Taken(num_bytes=report.num_bytes))
    prepared = group_pb2.Prepared(
        number=report.number, digest=report.digest, too_large=report.too_large, problem=report.problem
    )
    return group_pb2.FollowRequest(prepared=prepared)


def prepared_of(message: group_pb2.Prepared) -> Prepared:
    """Read what a follower has told of an update."""
    return Prepared(message.number, message.digest, dict(message.too_large), message.problem)
