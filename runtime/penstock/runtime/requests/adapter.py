"""An adapter's weights, as a request has them. No jax."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


def digest_of_values(values: NDArray[Any]) -> str:
    """The digest of an adapter with these values."""
    return hashlib.sha256(np.ascontiguousarray(values).view(np.uint8).data).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """A LoRA adapter on the host, as it goes to the device. Adapters of one content have one digest."""

    values: NDArray[Any]
    """[units * rank] in the model's dtype, see `ops.adapters`; for a model that is cut over devices [devices,
    units * rank]."""
    digest: str
    """SHA-256 of the values, in hexadecimal; see `digest_of_values`."""
    rank: int
    """The largest rank of its matrices."""
    scaling: float
    """The largest factor of its products."""
    targets: tuple[str, ...]
    """The last parts of the names of the layers that it changes, sorted."""
