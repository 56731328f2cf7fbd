"""Pushes all tensors of a checkpoint, for `bench.probes.updates`, from a process of its own.

It answers each line on stdin, a JSON object with `address`, `update_id`, `stage_only` and `staging`, with one
on stdout: how long the call took and what was answered.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from penstock.runtime.loading.safetensors_files import TensorEntry, find_tensors
from penstock.v1 import inference_pb2_grpc, weights_pb2

MIB = 2**20
CHUNK_BYTES = 2 * MIB
_DTYPES = {
    "bfloat16": weights_pb2.DATA_TYPE_BF16,
    "float16": weights_pb2.DATA_TYPE_F16,
    "float32": weights_pb2.DATA_TYPE_F32,
}
Message = weights_pb2.UpdateWeightsRequest


def messages(entries: Mapping[str, TensorEntry], **begin: Any) -> Iterator[Message]:
    """Yield the messages of one update of these tensors, without checksums. The files are read as the
    messages are sent.
    """
    specs = [
        weights_pb2.TensorSpec(name=name, dtype=_DTYPES[entry.dtype.name], shape=entry.shape)
        for name, entry in entries.items()
    ]
    manifest = weights_pb2.TensorManifest(tensors=specs)
    yield Message(begin=weights_pb2.UpdateWeightsBegin(manifest=manifest, **begin))
    for index, entry in enumerate(entries.values()):
        data = np.ascontiguousarray(entry.map()).reshape(-1).view(np.uint8)
        for offset in range(0, len(data), CHUNK_BYTES):
            part = data[offset : offset + CHUNK_BYTES].tobytes()
            yield Message(chunk=weights_pb2.TensorChunk(tensor_index=index, offset=offset, data=part))
    total = sum(entry.num_bytes for entry in entries.values())
    yield Message(commit=weights_pb2.UpdateWeightsCommit(total_bytes=total))


def pushed(entries: Mapping[str, TensorEntry], address: str, **begin: Any) -> dict[str, Any]:
    """Send one update and say how it went."""
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(60)
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        began = time.perf_counter()
        reply = stub.UpdateWeights(messages(entries, **begin))
        taken = time.perf_counter() - began
    return {
        "seconds": taken,
        "outcome": weights_pb2.UpdateOutcome.Name(reply.outcome),
        "bytes": sum(entry.num_bytes for entry in entries.values()),
        "staged_s": reply.staged_in.ToNanoseconds() / 1e9,
    }


def main(checkpoint: Path, niceness: int) -> None:
    os.nice(niceness)
    entries = find_tensors(checkpoint)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(pushed(entries, **json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
