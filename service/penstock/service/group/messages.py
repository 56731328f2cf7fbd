"""The calls of a leader's runner, and what is told of weight updates, as messages and back."""

from __future__ import annotations

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

_TO_NUMBER = {kind: group_pb2.Kind.Value(f"KIND_{kind.name}") for kind in Kind}
_FROM_NUMBER = {number: kind for kind, number in _TO_NUMBER.items()}
_DTYPES = {
    name: np.dtype(name) for name in ("bool", "int32", "int64", "uint8", "uint32", "float32", "float64")
}


def call_bytes(call: Call) -> bytes:
    """Make the serialized FollowResponse with a call."""
    arrays = [
        group_pb2.Array(dtype=array.dtype.name, shape=array.shape, values=array.tobytes())
        for array in call.arrays
    ]
    made = group_pb2.Call(kind=_TO_NUMBER[call.kind], program=call.program, arrays=arrays)
    return group_pb2.FollowResponse(call=made).SerializeToString()


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
            piece = group_pb2.Piece(number=number, tensor_index=tensor_index, data=bytes(data))
            response.piece.CopyFrom(piece)
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
