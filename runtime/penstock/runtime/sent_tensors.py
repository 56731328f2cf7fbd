"""Tensors as a sender describes them, and what is wrong with one. No jax."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class TensorReason(enum.Enum):
    """Why a tensor is refused."""

    UNKNOWN_NAME = "unknown name"
    """The model has no tensor of this name."""
    MISSING = "missing"
    """The tensor is needed, and was not sent."""
    SHAPE = "shape"
    DTYPE = "dtype"
    """The dtype cannot be converted to the one served, or a value is beyond its range."""
    CHECKSUM = "checksum"
    """The bytes are not those of which the sender made the CRC32C or the SHA-256."""
    INCOMPLETE = "incomplete"
    """There are fewer or more bytes than the shape needs."""
    NON_FINITE = "non-finite"
    """A value is NaN or infinity, and the sender wants that refused."""


@dataclass(frozen=True, slots=True)
class SentTensor:
    """A tensor without its values."""

    name: str
    """Its name in a checkpoint."""
    dtype: str
    """As safetensors files name it, such as "BF16"; "I4", two values in a byte, is known too."""
    shape: tuple[int, ...]
    crc32c: int = 0
    """CRC32C (Castagnoli) of all its bytes; 0: not given."""
    sha256: bytes = b""
    """SHA-256 of all its bytes; empty: not given."""


@dataclass(frozen=True, slots=True)
class TensorProblem:
    """One thing wrong with one tensor. `expected` is None for an unknown name, `received` for a missing
    tensor.
    """

    name: str
    reason: TensorReason
    expected: SentTensor | None = None
    received: SentTensor | None = None
    why: str = ""
    """In words, what expected and received do not tell."""

    def __str__(self) -> str:
        if self.why:
            return f"{self.name} {self.why}"
        if self.expected is None or self.received is None:
            return f"{self.name} ({self.reason.value})"
        if self.reason is TensorReason.SHAPE:
            return f"{self.name} has shape {list(self.received.shape)}, expected {list(self.expected.shape)}"
        return f"{self.name} has dtype {self.received.dtype}, expected {self.expected.dtype}"
