"""Has metrics show what the parts of a server keep count of anyway."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.runtime.measuring.registry import Registry
from penstock.service.lifecycle.health import Readiness
from penstock.service.limits.admission import Admission, Kind
from penstock.service.replies.reply_budget import ReplyBudget
from penstock.service.rpcs.ending import Sends
from penstock.service.telemetry.metrics import service_instruments as defined
from penstock.service.telemetry.otlp.tracing import Tracing
from penstock.service.threads.lanes import Lanes


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


def _spans(tracing: Tracing | None) -> Mapping[tuple[str, ...], float]:
    if tracing is None:
        return {}
    return {
        ("exported",): tracing.exported,
        ("dropped",): tracing.dropped,
        ("failed",): tracing.failed,
    }
