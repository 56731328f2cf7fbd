"""What a pusher of weights sends, made from the contract: nothing here is Penstock's but the messages."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.v1 import weights_pb2
from tests.service.rig import WAIT_S, Rig
from tests.service.update_calls import update_weights

Message = weights_pb2.UpdateWeightsRequest
Tensors = Mapping[str, NDArray[Any]]
DTYPES = {
    np.dtype(ml_dtypes.bfloat16): weights_pb2.DATA_TYPE_BF16,
    np.dtype(np.float16): weights_pb2.DATA_TYPE_F16,
    np.dtype(np.float32): weights_pb2.DATA_TYPE_F32,
    np.dtype(np.int8): weights_pb2.DATA_TYPE_I8,
}
WAIT = weights_pb2.IN_FLIGHT_POLICY_WAIT
ABORT = weights_pb2.IN_FLIGHT_POLICY_ABORT
KEEP = weights_pb2.IN_FLIGHT_POLICY_KEEP
RECOMPUTE = weights_pb2.IN_FLIGHT_POLICY_RECOMPUTE
COMMITTED = weights_pb2.UPDATE_OUTCOME_COMMITTED
STAGED = weights_pb2.UPDATE_OUTCOME_STAGED
_numbers = itertools.count()


def spec(name: str, tensor: NDArray[Any]) -> weights_pb2.TensorSpec:
    """Return what the manifest says of a tensor, with both checksums."""
    data = tensor.tobytes()
    return weights_pb2.TensorSpec(
        name=name,
        dtype=DTYPES[tensor.dtype],
        shape=tensor.shape,
        crc32c=google_crc32c.value(data),
        sha256=hashlib.sha256(data).digest(),
    )


def begin(tensors: Tensors, **fields: Any) -> Message:
    """Return the first message. An update has an id and a label of its own unless they are given."""
    name = f"update-{next(_numbers)}"
    manifest = weights_pb2.TensorManifest(tensors=[spec(n, t) for n, t in tensors.items()])
    given = {"update_id": name, "version_label": name, "manifest": manifest, **fields}
    return Message(begin=weights_pb2.UpdateWeightsBegin(**given))


def chunk(index: int, offset: int, data: bytes) -> Message:
    return Message(chunk=weights_pb2.TensorChunk(tensor_index=index, offset=offset, data=data))


def chunks(tensors: Tensors, size: int = 1 << 20) -> Iterator[Message]:
    """Yield the bytes of all tensors, in the order of the manifest, in chunks of at most `size`."""
    for index, tensor in enumerate(tensors.values()):
        data = tensor.tobytes()
        for offset in range(0, len(data), size):
            yield chunk(index, offset, data[offset : offset + size])


def commit(total_bytes: int) -> Message:
    return Message(commit=weights_pb2.UpdateWeightsCommit(total_bytes=total_bytes))


def num_bytes(tensors: Tensors) -> int:
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())


def whole(tensors: Tensors, *, size: int = 1 << 20, **fields: Any) -> list[Message]:
    """All messages of an update."""
    return [begin(tensors, **fields), *chunks(tensors, size), commit(num_bytes(tensors))]


def digest(tensors: Tensors) -> bytes:
    """Return what UpdateWeightsResponse.digest says it is."""
    names = {value: weights_pb2.DataType.Name(value).removeprefix("DATA_TYPE_") for value in DTYPES.values()}
    lines = [
        f"{name} {names[DTYPES[tensors[name].dtype]]} {','.join(map(str, tensors[name].shape))} "
        f"{hashlib.sha256(tensors[name].tobytes()).hexdigest()}\n"
        for name in sorted(tensors)
    ]
    return hashlib.sha256("".join(lines).encode()).digest()


async def send(rig: Rig, messages: Iterable[Message]) -> weights_pb2.UpdateWeightsResponse:
    """Send these messages, end the stream, and return the answer."""
    return await update_weights(rig.server.address, messages, timeout=6 * WAIT_S)


async def push(rig: Rig, tensors: Tensors, **fields: Any) -> weights_pb2.UpdateWeightsResponse:
    return await send(rig, whole(tensors, **fields))
