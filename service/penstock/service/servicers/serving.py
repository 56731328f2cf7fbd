"""What all RPCs of a server share, and how `Abort` finds requests before the engine knows them.

`Serving` is what they share, as one value. `AbortTarget` is what `Abort` asks for, and `Arrivals` are the
requests that it can find before the engine knows them. The engine learns a request's id with `submit`.
`Abort` must be able to find the request from the moment its RPC starts: an abort that arrives while the
prompt is being tokenized would otherwise find nothing, and the request would run after all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.runtime.errors import DuplicateRequestId
from penstock.runtime.prompting.prompts import Truncation
from penstock.runtime.requests.request import MAX_OUTPUTS, Finish, FinishReason
from penstock.service.backend import Backend
from penstock.service.counts import AdapterRequests
from penstock.service.lifecycle.underway import Calls
from penstock.service.limits.admission import HeldImages, Places
from penstock.service.replies.outputs import ServerSwitchboard, StallLog
from penstock.service.replies.reply_budget import ReplyBudget
from penstock.service.requests.generate import DEFAULT_FEATURES, Features, Limits, Violations
from penstock.service.rpcs.interceptors import Access
from penstock.service.telemetry.tracing.service_spans import Telemetry
from penstock.service.threads.lanes import Lanes
from penstock.v1 import inference_pb2

if TYPE_CHECKING:
    from penstock.service.telemetry.otlp.tracing import Tracing

MAX_ABORT_IDS = 10_000
MAX_REASON_CHARS = 1000


@dataclass(frozen=True, slots=True)
class AbortTarget:
    """The requests that an Abort names: by ids, by a prefix of their ids, or all. Exactly one of the three is
    set.
    """

    ids: Mapping[str, None] | None
    """Ids in the order in which the caller named them; a mapping, so that looking one up is cheap."""
    prefix: str | None
    everything: bool

    def parts(self, size: int) -> Sequence[AbortTarget]:
        """Split this target into targets of at most `size` ids each. A target without ids is not split."""
        if self.ids is None:
            return [self]
        ids = list(self.ids)
        starts = range(0, len(ids), size)
        return [AbortTarget(dict.fromkeys(ids[at : at + size]), None, False) for at in starts]

    def matches(self, request_id: str) -> bool:
        if self.prefix is not None:
            return request_id.startswith(self.prefix)
        return self.everything or request_id in (self.ids or {})


def to_target(message: inference_pb2.AbortRequest) -> AbortTarget:
    """Check and convert the message. Raises InvalidRequest where it names nothing: that never means
    everything.
    """
    bad = Violations()
    # The engine's lock is held while ids are looked up, so there is a limit on them.
    num_ids = len(message.request_ids.ids)
    few = bad.allows("request_ids.ids", num_ids, MAX_ABORT_IDS, "ids")
    ids = dict.fromkeys(message.request_ids.ids) if few else {}
    kind = message.WhichOneof("target")
    if kind is None:
        bad.add("target", "one of request_ids, request_id_prefix and all is required")
    elif kind == "request_ids" and not num_ids:
        bad.add("request_ids.ids", "must not be empty")
    elif kind == "request_id_prefix" and not message.request_id_prefix:
        bad.add("request_id_prefix", "must not be empty")
    if len(message.reason) > MAX_REASON_CHARS:  # every aborted request repeats it
        bad.add("reason", f"must have at most {MAX_REASON_CHARS} characters, not {len(message.reason)}")
    bad.raise_if_any()
    return AbortTarget(
        ids if kind == "request_ids" else None, message.request_id_prefix or None, kind == "all"
    )


@dataclass(slots=True)
class Arrival:
    """A request whose prompt is being tokenized; `finish` is set once it was aborted."""

    finish: Finish | None = None


class Arrivals:
    """All arrivals of one server, by the engine's id of the request. Used on the event loop only."""

    def __init__(self) -> None:
        self._arrivals: dict[str, Arrival] = {}

    @contextlib.contextmanager
    def tokenizing(self, request_id: str) -> Iterator[Arrival]:
        """Let `Abort` find this id while the context is open. Raises DuplicateRequestId if it is open for
        this id already.

        The caller must end the request or submit it to the engine before the context closes, without an
        `await` after that.
        """
        if request_id in self._arrivals:
            raise DuplicateRequestId(request_id)
        arrival = self._arrivals[request_id] = Arrival()
        try:
            yield arrival
        finally:
            del self._arrivals[request_id]

    def abort(self, meant: Callable[[str], bool], message: str) -> list[str]:
        """Mark every arrival whose id is `meant`, so that it is never submitted; return these ids. If a
        request is aborted twice, the first message is kept.
        """
        found = [request_id for request_id in self._arrivals if meant(request_id)]
        for request_id in found:
            arrival = self._arrivals[request_id]
            arrival.finish = arrival.finish or Finish(FinishReason.ABORTED, message=message)
        return found


def limits_of(
    engine: Backend, truncation: Truncation = Truncation.REJECT, features: Features = DEFAULT_FEATURES
) -> Limits:
    """Return what a server checks requests against."""
    return Limits(
        info=engine.info,
        max_logprobs=engine.config.max_logprobs,
        codec=engine.text,
        has_grammars=features.constraints and engine.has_grammars,
        has_priority=engine.config.scheduling_policy == "priority",
        has_adapters=engine.adapters.is_on,
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
    adapter_requests: AdapterRequests
    """Counts the requests of each adapter."""
    tracing: Tracing | None = None
    """What records traces; None if the server has nowhere to send them to."""
    arrivals: Arrivals = field(default_factory=Arrivals)
    """The requests that `Abort` finds before the engine knows them."""
