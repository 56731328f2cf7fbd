"""The messages of a weight update, for any tensors, as a client sends them; and the tensors as a file."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import google_crc32c

from penstock.runtime.loading.dtypes import num_bytes
from penstock.runtime.sent_tensors import SentTensor
from penstock.v1 import weights_pb2
from tests.service.fake import TENSORS
from tests.service.update_calls import update_weights

Step = weights_pb2.UpdateWeightsRequest
Tensors = Mapping[str, tuple[SentTensor, bytes]]
"""From each name to the tensor's description and its bytes."""


def fake_tensors(fill: int) -> dict[str, tuple[SentTensor, bytes]]:
    """Make new weights for the fake engine: every byte is `fill`."""
    return {name: (sent, bytes([fill]) * (num_bytes(sent) or 0)) for name, sent in TENSORS.items()}


def bytes_of(tensors: Tensors) -> dict[str, bytes]:
    return {name: data for name, (_, data) in tensors.items()}


def written(tensors: Tensors, file: Path) -> str:
    """Write a safetensors file, as its format says. Returns its URI."""
    header, at = {}, 0
    for name, (sent, data) in tensors.items():
        offsets = [at, at + len(data)]
        header[name] = {"dtype": sent.dtype, "shape": list(sent.shape), "data_offsets": offsets}
        at += len(data)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(bytes_of(tensors).values()))
    return f"file://{file}"


def spec(sent: SentTensor, data: bytes | None = None) -> weights_pb2.TensorSpec:
    """Make a tensor of a manifest. With `data` it has the checksum of these bytes."""
    return weights_pb2.TensorSpec(
        name=sent.name,
        dtype=weights_pb2.DataType.Value(f"DATA_TYPE_{sent.dtype}"),
        shape=sent.shape,
        crc32c=0 if data is None else google_crc32c.value(data),
    )


def begin(tensors: Tensors | None = None, update_id: str = "u", label: str = "new", **fields: Any) -> Step:
    """Return the first message. Without tensors it has no manifest."""
    made = weights_pb2.UpdateWeightsBegin(update_id=update_id, version_label=label, **fields)
    if tensors is not None:
        made.manifest.tensors.extend([spec(sent, data) for sent, data in tensors.values()])
        made.manifest.SetInParent()
    return Step(begin=made)


def chunk(index: int, offset: int, data: bytes) -> Step:
    return Step(chunk=weights_pb2.TensorChunk(tensor_index=index, offset=offset, data=data))


def commit(total_bytes: int) -> Step:
    return Step(commit=weights_pb2.UpdateWeightsCommit(total_bytes=total_bytes))


def chunks(tensors: Tensors, size: int = 1000) -> Iterator[Step]:
    """All bytes, in chunks of at most `size`."""
    for index, (_, data) in enumerate(tensors.values()):
        for offset in range(0, len(data), size):
            yield chunk(index, offset, data[offset : offset + size])


def steps(tensors: Tensors, size: int = 1000, **fields: Any) -> list[Step]:
    """All messages of an update."""
    total = sum(len(data) for _, data in tensors.values())
    return [begin(tensors, **fields), *chunks(tensors, size), commit(total)]


async def push(rig: Any, messages: Iterable[Step], **call: Any) -> weights_pb2.UpdateWeightsResponse:
    """Send these messages, and return the answer."""
    async with asyncio.timeout(60):
        return await update_weights(rig.server.address, messages, **call)
