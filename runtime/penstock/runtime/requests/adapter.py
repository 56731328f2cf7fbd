"""An adapter's weights, as a request has them. No jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """A LoRA adapter on the host, as it goes to the device. Adapters of one content have one digest."""

    values: NDArray[Any]
    """[units * rank] in the model's dtype, see `ops.adapters`."""
    digest: str
    """SHA-256 of the values, in hexadecimal."""
    rank: int
    """The largest rank of its matrices."""
    scaling: float
    """The largest factor of its products."""
    targets: tuple[str, ...]
    """The last parts of the names of the layers that it changes, sorted."""
