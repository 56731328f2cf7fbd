"""What all RPCs of a server share, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.runtime.requests.context import Truncation
from penstock.runtime.requests.fanout import MAX_OUTPUTS
from penstock.service.backend import Backend
from penstock.service.lifecycle.underway import Calls
from penstock.service.limits.held_images import HeldImages
from penstock.service.limits.places import Places
from penstock.service.replies.readers import StallLog
from penstock.service.replies.reply_budget import ReplyBudget
from penstock.service.replies.streams import ServerSwitchboard
from penstock.service.requests.convert import Limits
from penstock.service.requests.features import DEFAULT_FEATURES, Features
from penstock.service.rpcs.access_check import Access
from penstock.service.servicers.abort import Arrivals
from penstock.service.telemetry.otlp.tracing import Tracing
from penstock.service.telemetry.tracing.service_spans import Telemetry
from penstock.service.threads.lanes import Lanes


def limits_of(
    engine: Backend, truncation: Truncation = Truncation.REJECT, features: Features = DEFAULT_FEATURES
) -> Limits:
    """What a server checks requests against."""
    return Limits(
        info=engine.info,
        max_logprobs=engine.config.max_logprobs,
        codec=engine.text,
        has_grammars=features.constraints and engine.grammars is not None,
        has_priority=engine.config.scheduling_policy == "priority",
        # more could never be queued together
        max_outputs=min(MAX_OUTPUTS, engine.config.max_queued_requests),
        max_outputs_queued=engine.config.max_queued_requests,
        truncation=truncation,
        features=features,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What all RPCs of a server share: its engine, what requests are checked against, and what carries and
    counts them. It is used on one event loop.
    """

    engine: Backend
    limits: Limits
    switchboard: ServerSwitchboard
    """Carries outputs from the engine's thread to the event loop."""
    telemetry: Telemetry
    access: Access
    """Says who may make a call, also one that is under way."""
    lanes: Lanes
    """The threads for work that would hold the event loop for long."""
    calls: Calls
    """Counts the calls that are being prepared."""
    places: Places
    """Counts requests for the engine's queue before the engine knows them."""
    budget: ReplyBudget
    """Bounds the bytes of replies that wait."""
    stalls: StallLog
    stall_limit_s: float
    """Seconds after which a stream that is not read, although output waits, is ended."""
    max_request_bytes: int
    """The largest message of a request that the server takes."""
    held_images: HeldImages
    """Bounds the memory of the images that requests hold."""
    tracing: Tracing | None = None
    """What records traces; None if the server has nowhere to send them to."""
    arrivals: Arrivals = field(default_factory=Arrivals)
    """The requests that `Abort` finds before the engine knows them."""
