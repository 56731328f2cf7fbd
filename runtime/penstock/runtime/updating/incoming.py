"""Tensors whose bytes come in pieces, with their checksums; whether values are finite; and the digest of an
update, which tells whether two updates had the same tensors. No jax.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from penstock.runtime.errors import InvalidRequest, TensorsRefused, Violation
from penstock.runtime.loading.dtypes import DTYPES, num_bytes
from penstock.runtime.machine import host_memory
from penstock.runtime.sent_tensors import SentTensor, TensorProblem, TensorReason

_EXPONENTS: Mapping[str, tuple[npt.DTypeLike, int]] = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F8_E5M2": (np.uint8, 0x7C),
    "F8_E4M3": (np.uint8, 0x7F),  # it has no infinity, and one NaN of each sign
}
"""For each dtype, the bits that are all set in NaN and infinity and in no other value."""
_CHECKED_AT_ONCE = 1 << 20
"""How many bytes are checked at a time, so that intermediate values stay in the processor's cache."""


def digest_of(tensors: Iterable[tuple[SentTensor, bytes]]) -> bytes:
    """Compute the SHA-256 of a text that has one line for each tensor, in the order of their names: "NAME
    DTYPE D1,D2 HASH", where HASH is the SHA-256 of the tensor's bytes, given here beside it.
    """
    whole = hashlib.sha256()
    for tensor, sha256 in sorted(tensors, key=lambda entry: entry[0].name):
        shape = ",".join(map(str, tensor.shape))
        whole.update(f"{tensor.name} {tensor.dtype} {shape} {sha256.hex()}\n".encode())
    return whole.digest()


def tensor_at(sent: Sequence[SentTensor], index: int) -> SentTensor:
    """Return the tensor of a chunk. InvalidRequest for an index that the manifest has not."""
    if not 0 <= index < len(sent):
        described = f"must be below {len(sent)}, the number of tensors; it is {index}"
        raise InvalidRequest([Violation("chunk.tensor_index", described)])
    return sent[index]


def check_total(total_bytes: int, received: int) -> None:
    """Raise InvalidRequest if the sender says that it has sent more or fewer bytes than have come."""
    if total_bytes != received:
        described = f"is {total_bytes}; {received} bytes have come"
        raise InvalidRequest([Violation("commit.total_bytes", described)])


def too_long(sent: SentTensor) -> TensorsRefused:
    """Make the error for more bytes than a tensor has."""
    why = "has more bytes than its shape needs"
    return TensorsRefused([TensorProblem(sent.name, TensorReason.INCOMPLETE, sent, sent, why)])


class IncomingTensor:
    """One tensor while its bytes come, from the first to the last."""

    def __init__(
        self,
        sent: SentTensor,
        *,
        keep: bool,
        memory: npt.NDArray[np.uint8] | None = None,
        is_hashed: bool = True,
    ) -> None:
        """keep: whether its values are needed, beyond its checksums. memory: where they are kept; None: in
        memory of its own. is_hashed: whether `sha256` is needed even if the sender gave none.
        """
        self._sent = sent
        self._num_bytes = num_bytes(sent) or 0
        own = host_memory.zeros((self._num_bytes,), np.uint8) if keep and memory is None else None
        self._bytes = own if memory is None else memory
        self._crc32c = 0
        self._sha256 = hashlib.sha256() if is_hashed or sent.sha256 else None
        self.received = 0
        """How many bytes have come."""

    @property
    def is_complete(self) -> bool:
        """Whether all bytes have come."""
        return self.received == self._num_bytes

    @property
    def missing(self) -> int:
        """How many bytes are still to come."""
        return self._num_bytes - self.received

    def take(self, offset: int, data: bytes) -> None:
        """Take the next bytes. Raises InvalidRequest for bytes that are not the next ones, and TensorsRefused
        for more bytes than are missing.
        """
        if offset != self.received:
            described = f"is {offset}; the next byte of {self._sent.name} is {self.received}"
            raise InvalidRequest([Violation("chunk.offset", described)])
        if len(data) > self.missing:
            raise too_long(self._sent)
        self.append(data)

    def append(self, data: bytes) -> None:
        """Take the next bytes, of which there are no more than are missing."""
        if self._bytes is not None:
            self._bytes[self.received : self.received + len(data)] = np.frombuffer(data, np.uint8)
        if self._sent.crc32c:
            self._crc32c = google_crc32c.extend(self._crc32c, data)
        if self._sha256 is not None:
            self._sha256.update(data)
        self.received += len(data)

    @property
    def sha256(self) -> bytes:
        """The SHA-256 of the bytes that have come; only for a tensor that is hashed."""
        assert self._sha256 is not None
        return self._sha256.digest()

    @property
    def is_intact(self) -> bool:
        """Whether the bytes have the checksums that the sender gave, if it gave any."""
        sent = self._sent
        return self._crc32c == sent.crc32c and (not sent.sha256 or sent.sha256 == self.sha256)

    @property
    def values(self) -> npt.NDArray[Any] | None:
        """The values, if they were to be kept."""
        if self._bytes is None:
            return None
        return self._bytes.view(DTYPES[self._sent.dtype]).reshape(self._sent.shape)


def is_finite(dtype: str, values: npt.NDArray[Any]) -> bool:
    """Say whether no value is NaN or infinity. Integers are finite. `values` are contiguous."""
    if dtype not in _EXPONENTS:
        return True
    bits, mask = _EXPONENTS[dtype]
    flat = values.reshape(-1).view(bits)
    exponent = flat.dtype.type(mask)
    step = _CHECKED_AT_ONCE // flat.itemsize
    return not any(
        ((flat[begin : begin + step] & exponent) == exponent).any() for begin in range(0, flat.size, step)
    )
