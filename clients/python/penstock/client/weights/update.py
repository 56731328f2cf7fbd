"""A weight update as it will be sent: what begins it, its tensors and what commits it.

Each tensor is read twice: for its checksum, and when it is its turn to be sent. So no more than a chunk is in
memory. An update has an id, so sending it again is safe.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from penstock.client.requests.checks import checked
from penstock.client.requests.weights_requests import Progress, UpdateOptions, begin_message
from penstock.client.weights.arrays import tensors_of
from penstock.client.weights.safetensors_files import tensors_in
from penstock.client.weights.tensors import Tensor, Tensors, digest_of, manifest_of
from penstock.v1 import weights_pb2

_MOST_CHUNK_BYTES: Final = 8 << 20
"""A server may take more, but that would only cost memory."""
Step = tuple[weights_pb2.UpdateWeightsRequest, int]
"""A message of the stream, and how many bytes of tensors are in it."""


@dataclass(frozen=True, slots=True)
class Update:
    """One update, which may be sent several times."""

    begin: weights_pb2.UpdateWeightsBegin
    """With its source; `described` adds the manifest."""
    tensors: tuple[Tensor, ...]
    """Empty for an update by URI, whose files the server reads itself."""
    progress: bool | Progress

    @property
    def update_id(self) -> str:
        return self.begin.update_id

    @property
    def num_bytes(self) -> int:
        """Of all tensors that will be sent."""
        return 0 if self.begin.validate_only else sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def needs_chunks(self) -> bool:
        return self.num_bytes > 0


def update_of(tensors: Tensors | None, uri: str | None, options: UpdateOptions) -> Update:
    """Make an update of the arguments of `update_weights`. Reads no tensor's bytes.

    Raises TypeError unless there is exactly one source, and what `begin_message`, `tensors_of` and
    `tensors_in` raise.
    """
    if (tensors is None) == (uri is None):
        raise TypeError("give either tensors (arrays or a path) or uri")
    begin = begin_message(options)
    begin.update_id = begin.update_id or uuid.uuid4().hex
    if uri is not None:
        with checked("begin.uri"):
            begin.uri = uri
    progress = options.get("progress")
    return Update(
        begin, () if tensors is None else _read(tensors), progress=True if progress is None else progress
    )


def _read(tensors: Tensors) -> tuple[Tensor, ...]:
    if isinstance(tensors, Mapping):
        return tensors_of(tensors)
    if isinstance(tensors, str | os.PathLike):
        return tensors_in(tensors)
    raise TypeError(f"tensors are a mapping of names to arrays or a path, not {type(tensors).__name__}")


def described(update: Update) -> Update:
    """The update with its manifest, which needs the checksums of all tensors: it reads all of their bytes,
    unless the update only asks whether they would be taken.
    """
    if update.begin.HasField("uri"):
        return update
    begin = weights_pb2.UpdateWeightsBegin()
    begin.CopyFrom(update.begin)
    begin.manifest.CopyFrom(manifest_of(update.tensors, checksums=not begin.validate_only))
    return replace(update, begin=begin)


def steps(update: Update, chunk_bytes: int) -> Iterator[Step]:
    """The messages of the stream, in order, for an update with its manifest. Each chunk is read when it is
    its turn, so no more than one is in memory.
    """
    yield weights_pb2.UpdateWeightsRequest(begin=update.begin), 0
    for index, tensor in enumerate(update.tensors if update.needs_chunks else ()):
        offset = 0
        for data in tensor.pieces(chunk_bytes):
            message = weights_pb2.UpdateWeightsRequest()
            message.chunk.tensor_index, message.chunk.offset, message.chunk.data = index, offset, data
            yield message, len(data)
            offset += len(data)
    commit = weights_pb2.UpdateWeightsCommit(total_bytes=update.num_bytes)
    yield weights_pb2.UpdateWeightsRequest(commit=commit), 0


def chunk_bytes_of(max_chunk_bytes: int) -> int:
    """How many bytes of a tensor to send at once, to a server whose most is this. It is 0 for a server that
    takes no updates, which says so itself when one begins.
    """
    return min(max_chunk_bytes or _MOST_CHUNK_BYTES, _MOST_CHUNK_BYTES)


def weights_digest(tensors: Tensors) -> bytes:
    """The SHA-256 that `WeightsUpdate.digest` and `ModelInfo.weights_digest` have after an update with these
    tensors. It reads all of their bytes.

    A trainer compares it to know that the server has exactly its weights. Raises as `update_weights` does for
    tensors that cannot be sent.
    """
    return digest_of(_read(tensors))
