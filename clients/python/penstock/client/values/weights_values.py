"""Values of weight updates and pauses: what became of them, and what is wrong with tensors.

Durations are in seconds.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from penstock.client.values.results import WeightsVersion
from penstock.client.values.server_values import TensorInfo


class UpdateOutcome(enum.Enum):
    """How far a weight update has come."""

    COMMITTED = "committed"
    """The new weights are in use."""
    STAGED = "staged"
    """They wait on the server for `commit_weights` or `discard_weights`."""
    VALIDATED = "validated"
    """The server would take them; nothing was sent and nothing has changed."""
    ALREADY_COMMITTED = "already_committed"
    """An update with this id went live before; this call has changed nothing."""
    UNKNOWN = "unknown"
    """An outcome of a newer contract, which this client does not know."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """What became of the requests that ran when the weights changed or the server paused, by count."""

    waited: int = 0
    """They finished first."""
    aborted: int = 0
    """They ended with what they had generated."""
    kept: int = 0
    """They went on with the KV of the old weights."""
    recomputed: int = 0
    """They went on after their prompt and output were computed again."""


@dataclass(frozen=True, slots=True)
class WeightsUpdate:
    """What `update_weights` did."""

    update_id: str
    outcome: UpdateOutcome
    current: WeightsVersion
    """The weights in use now."""
    previous: WeightsVersion
    """Those in use before; equal to `current` unless the update was committed."""
    tensors_updated: int
    bytes_received: int
    staged_s: float
    """From the beginning of the update until all of it was checked and ready to swap."""
    paused_s: float
    """How long the server could make no token."""
    in_flight: InFlight
    digest: bytes
    """SHA-256 of the tensors' names, dtypes, shapes and bytes, as `weights_digest` computes it; empty if they
    were only validated.
    """


@dataclass(frozen=True, slots=True)
class CommittedWeights:
    """What `commit_weights` did."""

    update_id: str
    outcome: UpdateOutcome
    """COMMITTED or ALREADY_COMMITTED."""
    current: WeightsVersion
    previous: WeightsVersion
    paused_s: float
    """How long the server could make no token."""
    in_flight: InFlight
    digest: bytes


@dataclass(frozen=True, slots=True)
class Paused:
    """What `pause` did."""

    in_flight: InFlight
    freed_bytes: int
    """Memory of the device that this call has freed, in bytes."""


class TensorReason(enum.Enum):
    """What is wrong with a tensor of an update."""

    UNKNOWN_NAME = "unknown_name"
    """The model has no such tensor."""
    MISSING = "missing"
    """The update lacks it, and is not partial."""
    SHAPE = "shape"
    DTYPE = "dtype"
    CHECKSUM = "checksum"
    """Other bytes arrived than were sent, or the array changed while it was sent."""
    INCOMPLETE = "incomplete"
    """Fewer or more bytes came than the shape needs."""
    NON_FINITE = "non_finite"
    """It holds NaN or infinity, and the update has `refuse_non_finite`."""
    UNKNOWN = "unknown"
    """A reason of a newer contract, which this client does not know."""


@dataclass(frozen=True, slots=True)
class TensorProblem:
    """Why the server refused one tensor."""

    name: str
    reason: TensorReason
    expected: TensorInfo | None = None
    """What the model has; None if it has no such tensor."""
    received: TensorInfo | None = None
    """What was sent; None if it was missing."""

    def __str__(self) -> str:
        expected, received = _described(self.expected), _described(self.received)
        match self.reason:
            case TensorReason.UNKNOWN_NAME:
                return f"{self.name}: the model has no such tensor"
            case TensorReason.MISSING:
                return f"{self.name}: is missing"
            case TensorReason.SHAPE | TensorReason.DTYPE:
                return f"{self.name}: must be {expected}, not {received}"
            case TensorReason.CHECKSUM:
                return f"{self.name}: other bytes arrived than were announced"
            case TensorReason.INCOMPLETE:
                return f"{self.name}: has not as many bytes as its shape needs"
            case TensorReason.NON_FINITE:
                return f"{self.name}: holds NaN or infinity"
            case TensorReason.UNKNOWN:
                return f"{self.name}: is refused"


def _described(tensor: TensorInfo | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
