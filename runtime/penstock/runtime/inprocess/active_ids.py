"""Which request ids are in use by an engine's embedder."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from penstock.runtime.errors import DuplicateRequestId
from penstock.runtime.loop.interface import InFlightPolicy, Paused
from penstock.runtime.measuring.engine_metrics import EngineMetrics
from penstock.runtime.prompting.interface import TextEngine


class ActiveIds:
    """The ids of one engine's embedded requests, from before they are submitted until their readers know that
    they ended. So an id is not used again while outputs of its former request are on their way.

    No method waits for a lock: the garbage collector may close an abandoned stream on any thread.
    """

    def __init__(self) -> None:
        self._owners: dict[str, object] = {}

    def take(self, request_id: str) -> None:
        """Raise DuplicateRequestId where the id is taken."""
        owner = object()
        if self._owners.setdefault(request_id, owner) is not owner:
            raise DuplicateRequestId(request_id)

    def release(self, request_id: str) -> None:
        """Let the id be used again."""
        self._owners.pop(request_id, None)


class EmbeddedEngine(TextEngine, Protocol):
    """An engine whose requests are read in its own process."""

    @property
    def active_ids(self) -> ActiveIds:
        """The ids of the requests that are read here."""
        ...

    def pause(
        self,
        in_flight: InFlightPolicy = ...,
        *,
        drain_timeout_s: float | None = ...,
        free_kv_cache: bool = ...,
        offload_weights: bool = ...,
    ) -> Future[Paused]:
        """See `Engine.pause`."""
        ...

    def resume(self) -> Future[None]:
        """See `Engine.resume`."""
        ...

    def metrics(self) -> EngineMetrics:
        """See `Engine.metrics`."""
        ...
