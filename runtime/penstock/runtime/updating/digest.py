"""The digest of an update: it tells whether two updates had the same tensors. No jax."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from penstock.runtime.sent_tensors import SentTensor


def digest_of(tensors: Iterable[tuple[SentTensor, bytes]]) -> bytes:
    """The SHA-256 of a text that has one line for each tensor, in the order of their names:
    "NAME DTYPE D1,D2 HASH", where HASH is the SHA-256 of the tensor's bytes, given here beside it.
    """
    whole = hashlib.sha256()
    for tensor, sha256 in sorted(tensors, key=lambda entry: entry[0].name):
        shape = ",".join(map(str, tensor.shape))
        whole.update(f"{tensor.name} {tensor.dtype} {shape} {sha256.hex()}\n".encode())
    return whole.digest()
