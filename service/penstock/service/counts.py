"""Has metrics show what the parts of a server keep count of anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from penstock.runtime.adapters.interface import AdapterInfo, AdapterState
from penstock.runtime.measuring.registry import Registry
from penstock.service.lifecycle.health import Readiness
from penstock.service.limits.admission import Admission, Kind
from penstock.service.replies.reply_budget import ReplyBudget
from penstock.service.rpcs.ending import Sends
from penstock.service.telemetry.metrics import service_instruments as defined
from penstock.service.threads.lanes import Lanes

if TYPE_CHECKING:
    from penstock.service.telemetry.otlp.tracing import Tracing


def show_counts(
    registry: Registry,
    *,
    readiness: Readiness,
    admission: Admission,
    lanes: Lanes,
    sends: Sends,
    budget: ReplyBudget,
    tracing: Tracing | None,
) -> None:
    """Have the registry ask for these at each snapshot, on whichever thread makes it."""
    by_name = lanes.by_name.items()
    registry.gauge(defined.READY, lambda: {(): int(readiness.is_serving)})
    registry.gauge(
        defined.CALLS_ACTIVE, lambda: {(kind.name.lower(),): admission.active(kind) for kind in Kind}
    )
    registry.gauge(defined.LANE_WORK, lambda: {(name,): lane.held for name, lane in by_name})
    registry.gauge(defined.LANE_CAPACITY, lambda: {(name,): lane.most for name, lane in by_name})
    registry.observed_counter(defined.STREAMS_MERGED, lambda: {(): budget.merged})
    registry.observed_counter(defined.STREAMS_STALLED, lambda: {(): sends.num_stalled})
    registry.gauge(defined.REPLIES_WAITING, lambda: {(): budget.used})
    registry.observed_counter(defined.SPANS, lambda: _spans(tracing))


class AdapterRequests:
    """Counts the requests of each adapter. They are counted on the event loop, and read on any thread."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def took(self, adapter: str) -> None:
        """Count a request that the engine took."""
        self._counts[adapter] = self._counts.get(adapter, 0) + 1

    def of(self, names: Iterable[str]) -> Mapping[tuple[str, ...], float]:
        """Return the counts of these adapters. Those of others are forgotten, so that there are no more of
        them than adapters in memory.
        """
        known = set(names)
        for gone in self._counts.keys() - known:
            self._counts.pop(gone, None)
        return {(name,): float(self._counts.get(name, 0)) for name in known}


def show_adapters(
    registry: Registry,
    adapters: Callable[[], Sequence[AdapterInfo]],
    evictions: Callable[[], Mapping[str, int]],
    requests: AdapterRequests,
) -> None:
    """Have the registry ask at each snapshot how many adapters there are, how many left, and what was asked
    of them. `adapters` tells those in memory, and `evictions` how many left which memory for others.
    """

    def by_state() -> Mapping[tuple[str, ...], float]:
        states = Counter(info.state for info in adapters())
        return {(state,): float(states[state]) for state in get_args(AdapterState)}

    registry.gauge(defined.ADAPTERS, by_state)
    registry.observed_counter(
        defined.ADAPTER_EVICTIONS, lambda: {(memory,): float(count) for memory, count in evictions().items()}
    )
    registry.observed_counter(defined.ADAPTER_REQUESTS, lambda: requests.of(info.name for info in adapters()))


def _spans(tracing: Tracing | None) -> Mapping[tuple[str, ...], float]:
    if tracing is None:
        return {}
    return {
        ("exported",): tracing.exported,
        ("dropped",): tracing.dropped,
        ("failed",): tracing.failed,
    }
