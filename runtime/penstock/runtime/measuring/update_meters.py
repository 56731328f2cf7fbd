"""UpdateMeters: what weight updates brought, and how long they took."""

from __future__ import annotations

from penstock.runtime.measuring import engine_instruments as defined
from penstock.runtime.measuring.registry import Registry

APPLIED, DISCARDED, FAILED = "applied", "discarded", "failed"


class UpdateMeters:
    """Takes what happens to weight updates, from any thread. Each that was begun ends once: it is applied,
    discarded after it was staged, or failed.
    """

    def __init__(self, registry: Registry) -> None:
        self._updates = registry.counter(defined.WEIGHTS_UPDATES)
        self._bytes = registry.counter(defined.WEIGHTS_BYTES)
        self._staging = registry.histogram(defined.WEIGHTS_STAGING_TIME)
        self._pause = registry.histogram(defined.WEIGHTS_PAUSE_TIME)
        for outcome in (APPLIED, DISCARDED, FAILED):
            self._updates.add(0, (outcome,))

    def received(self, num_bytes: int) -> None:
        """Note that bytes of tensors have come."""
        self._bytes.add(num_bytes)

    def staged(self, staging_s: float) -> None:
        """Count an update that is complete and checked, so many seconds after it began."""
        self._staging.record(staging_s)

    def applied(self, paused_s: float) -> None:
        """Count an update that went live; because of it no token could be made for so many seconds."""
        self._updates.add(1, (APPLIED,))
        self._pause.record(paused_s)

    def discarded(self) -> None:
        """Count a staged update that was let go of."""
        self._updates.add(1, (DISCARDED,))

    def failed(self) -> None:
        """Count an update that was refused after it had begun, broke off, or was taken back."""
        self._updates.add(1, (FAILED,))
