"""A tensor of an update, wherever its bytes are, and what is computed of all of its bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c

from penstock.v1 import weights_pb2

Tensors = Mapping[str, Any] | str | os.PathLike[str]
"""Arrays by the names that they have in a checkpoint, or the path of a safetensors file or of a directory of
them.
"""
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor, whose bytes are read anew whenever they are wanted."""

    name: str
    dtype: weights_pb2.DataType.ValueType
    shape: tuple[int, ...]
    num_bytes: int
    """Its size on the wire: int4 takes half a byte for each element."""
    pieces: Callable[[int], Iterator[bytes]]
    """Yields its bytes, little-endian and row-major, in pieces of at most this many bytes."""


def crc32c_of(tensor: Tensor) -> int:
    """The CRC32C (Castagnoli) of the tensor's bytes."""
    crc = 0
    for piece in tensor.pieces(_PIECE_BYTES):
        crc = google_crc32c.extend(crc, piece)
    return crc


def manifest_of(tensors: Sequence[Tensor], *, checksums: bool) -> weights_pb2.TensorManifest:
    """Describe the tensors. For checksums all of their bytes are read."""
    return weights_pb2.TensorManifest(
        tensors=[
            weights_pb2.TensorSpec(
                name=t.name, dtype=t.dtype, shape=t.shape, crc32c=crc32c_of(t) if checksums else 0
            )
            for t in tensors
        ]
    )


def digest_of(tensors: Sequence[Tensor]) -> bytes:
    """The digest of an update with these tensors, as UpdateWeightsResponse.digest defines it."""
    whole = hashlib.sha256()
    for tensor in sorted(tensors, key=lambda t: t.name):
        own = hashlib.sha256()
        for piece in tensor.pieces(_PIECE_BYTES):
            own.update(piece)
        dtype = weights_pb2.DataType.Name(tensor.dtype).removeprefix("DATA_TYPE_")
        shape = ",".join(map(str, tensor.shape))
        whole.update(f"{tensor.name} {dtype} {shape} {own.hexdigest()}\n".encode())
    return whole.digest()
