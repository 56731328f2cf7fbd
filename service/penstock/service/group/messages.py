"""The calls of a leader's runner as messages, and back."""

from __future__ import annotations

import numpy as np

from penstock.runtime.following.interface import Call, Kind
from penstock.service.group import group_pb2

_TO_NUMBER = {kind: group_pb2.Kind.Value(f"KIND_{kind.name}") for kind in Kind}
_FROM_NUMBER = {number: kind for kind, number in _TO_NUMBER.items()}
_DTYPES = {
    name: np.dtype(name) for name in ("bool", "int32", "int64", "uint8", "uint32", "float32", "float64")
}


def call_bytes(call: Call) -> bytes:
    """The serialized FollowResponse with a call."""
    arrays = [
        group_pb2.Array(dtype=array.dtype.name, shape=array.shape, values=array.tobytes())
        for array in call.arrays
    ]
    made = group_pb2.Call(kind=_TO_NUMBER[call.kind], program=call.program, arrays=arrays)
    return group_pb2.FollowResponse(call=made).SerializeToString()


def call_of(message: group_pb2.Call) -> Call:
    """The call in a message. Its arrays cannot be written. ValueError for a message that means none."""
    if message.kind not in _FROM_NUMBER:
        raise ValueError(f"there is no kind of call with the number {message.kind}")
    arrays = []
    for array in message.arrays:
        if array.dtype not in _DTYPES:
            raise ValueError(f"calls have no arrays of {array.dtype!r}")
        arrays.append(np.frombuffer(array.values, _DTYPES[array.dtype]).reshape(tuple(array.shape)))
    return Call(_FROM_NUMBER[message.kind], message.program, tuple(arrays))
