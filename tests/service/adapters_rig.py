"""The messages of an adapter that is pushed, and small adapters on a disk for the fake engine."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from penstock.v1 import adapters_pb2, weights_pb2
from tests.service.update_calls import push_adapter

Step = adapters_pb2.PushAdapterRequest
CONFIG = '{"peft_type": "LORA", "r": 4}'
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
TENSORS: Mapping[str, np.ndarray[Any, np.dtype[np.float32]]] = {
    NAME.format("A"): np.arange(32, dtype=np.float32).reshape(4, 8),
    NAME.format("B"): np.ones((8, 4), np.float32),
}


def spec(name: str, **fields: Any) -> weights_pb2.TensorSpec:
    array = TENSORS[name]
    data = array.tobytes()
    known: dict[str, Any] = {
        "name": name,
        "dtype": weights_pb2.DATA_TYPE_F32,
        "shape": array.shape,
        "crc32c": google_crc32c.value(data),
        "sha256": hashlib.sha256(data).digest(),
    }
    return weights_pb2.TensorSpec(**(known | fields))


def begin(name: str = "sql", specs: Iterable[weights_pb2.TensorSpec] | None = None, **fields: Any) -> Step:
    """Return the first message of an adapter with TENSORS."""
    made = adapters_pb2.PushAdapterBegin(**({"name": name, "config_json": CONFIG} | fields))
    made.manifest.tensors.extend([spec(one) for one in TENSORS] if specs is None else specs)
    return Step(begin=made)


def chunk(index: int, offset: int, data: bytes) -> Step:
    return Step(chunk=weights_pb2.TensorChunk(tensor_index=index, offset=offset, data=data))


def chunks(size: int = 50) -> list[Step]:
    """All bytes, in chunks of at most `size`, those of the two tensors interleaved."""
    made = []
    datas = [array.tobytes() for array in TENSORS.values()]
    for offset in range(0, max(map(len, datas)), size):
        made += [chunk(i, offset, data[offset : offset + size]) for i, data in enumerate(datas)]
    return made


TOTAL = sum(array.nbytes for array in TENSORS.values())


def commit(total_bytes: int = TOTAL) -> Step:
    return Step(commit=adapters_pb2.PushAdapterCommit(total_bytes=total_bytes))


async def push(rig: Any, messages: Iterable[Step], **call: Any) -> adapters_pb2.PushAdapterResponse:
    """Send these messages, and return the answer."""
    async with asyncio.timeout(60):
        return await push_adapter(rig.server.address, messages, **call)


def on_disk(folder: Path, name: str, content: str = "1") -> Path:
    """Make a directory that the fake engine takes for an adapter."""
    (folder / name).mkdir(parents=True)
    (folder / name / "content").write_text(content)
    return folder / name
