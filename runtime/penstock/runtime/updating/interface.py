"""What is asked of a weight update, and what came of it. No jax."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from penstock.runtime.loop.interface import InFlightPolicy, InFlightReport, WeightsVersion


class Staging(enum.Enum):
    """Where new leaves wait until all are complete."""

    HOST = "host"
    """In host memory. The engine's thread places them one by one when the update goes live."""
    DEVICE = "device"
    """On the device, beside the leaves that serve: the shortest pause, and twice the memory."""
    IN_PLACE = "in place"
    """Nowhere: the engine stands still from the beginning, and each leaf replaces the old one as soon as it
    is complete. If the update fails after that, the model cannot serve until an update of all weights
    succeeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOptions:
    """What the caller of an update decides."""

    update_id: str
    """By this, an update that is sent again is known to have gone live already."""
    label: str
    """Becomes the label of the weights' version."""
    partial: bool = False
    """Whether tensors that are not sent stay as they are; else all tensors are needed."""
    expected_generation: int | None = None
    """The update is refused unless this generation serves, at the beginning and when it goes live."""
    in_flight: InFlightPolicy = InFlightPolicy.WAIT
    drain_timeout_s: float | None = None
    """With the policy WAIT, how long to wait for the running requests; None: without end."""
    staging: Staging = Staging.HOST
    stage_only: bool = False
    """Whether the update is to wait for `Updater.commit_staged` once it is complete. Not with IN_PLACE."""
    refuse_non_finite: bool = False
    """Whether a tensor with NaN or infinity is refused. Tensors that the model does not read may have some.
    """


class UpdateOutcome(enum.Enum):
    """What became of an update."""

    COMMITTED = "committed"
    """It is live."""
    STAGED = "staged"
    """It is complete, and waits for `Updater.commit_staged`."""
    VALIDATED = "validated"
    """Its tensors would be taken, as far as names, shapes and dtypes tell; nothing more was done."""
    ALREADY_COMMITTED = "already committed"
    """An update of this id went live before, so nothing was done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What came of an update. Times are in seconds."""

    outcome: UpdateOutcome
    current: WeightsVersion
    """The weights that serve now."""
    previous: WeightsVersion
    """The weights that served before; the same as `current` unless the update went live just now."""
    num_tensors: int = 0
    num_bytes: int = 0
    """Of all tensors, as they were sent."""
    staged_s: float = 0.0
    """From the beginning until everything was checked and ready to go live."""
    paused_s: float = 0.0
    """For how long no token could be made."""
    in_flight: InFlightReport = field(default_factory=InFlightReport)
    digest: bytes = b""
    """SHA-256 over names, dtypes, shapes and values of all tensors (`digest_of`); empty if only validated."""
