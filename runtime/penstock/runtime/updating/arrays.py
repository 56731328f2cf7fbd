"""Updates of arrays that the program itself has, by their names in a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import numpy.typing as npt

from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.host.background import BackgroundThread
from penstock.runtime.loading.dtypes import name_of
from penstock.runtime.sent_tensors import SentTensor
from penstock.runtime.updating.new_weights import NewWeights

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any] | jax.Array]


def described(tensors: Arrays) -> list[SentTensor]:
    """The arrays without their values, in their own order."""
    return [
        SentTensor(name, name_of(np.dtype(tensor.dtype)), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def put_all(thread: BackgroundThread, new: NewWeights, sent: Sequence[SentTensor], tensors: Arrays) -> int:
    """Puts all arrays into the new weights, on the thread, and returns how many bytes they have. Each is
    asked for on the calling thread. InvalidRequest if one is not what it was before.
    """
    return sum(thread.run(_put, new, tensor, np.asarray(tensors[tensor.name])) for tensor in sent)


def _put(new: NewWeights, sent: SentTensor, values: npt.NDArray[Any]) -> int:
    if (name_of(values.dtype), values.shape) != (sent.dtype, sent.shape):
        found = f"{name_of(values.dtype)}{list(values.shape)}"
        why = f"is {found} now, and was {sent.dtype}{list(sent.shape)} when it was asked for first"
        raise InvalidRequest([Violation(f"tensors[{sent.name!r}]", why)])
    values = np.ascontiguousarray(values)
    sha256 = hashlib.sha256(values.reshape(-1).view(np.uint8).data).digest()
    new.put(sent.name, values if new.needs(sent.name) else None, sha256)
    return values.nbytes
