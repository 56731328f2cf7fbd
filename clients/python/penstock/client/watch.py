"""What a server tells of its load while somebody watches it, and how it is read from the contract's messages.
Durations are in seconds.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import UTC, datetime

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from penstock.client.errors import ProtocolError
from penstock.client.generation import messages
from penstock.client.values.server_values import Load
from penstock.v1 import control_pb2, telemetry_pb2


@dataclass(frozen=True, slots=True)
class EndedRequests:
    """How many requests ended, by why."""

    eos: int = 0
    stop: int = 0
    max_tokens: int = 0
    context_full: int = 0
    time_limit: int = 0
    aborted: int = 0
    cancelled: int = 0
    """The client went away, cancelled, or its deadline passed."""
    failed: int = 0
    """An error ended them."""
    prompt_read: int = 0
    """Inputs of `embed` and continuations of `score`, of which nothing is generated."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """How many steps the engine made, by what was in them."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0
    """Prompts and next tokens together."""
    window: int = 0
    """Several decode steps in one dispatch; each counts once."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Where the seconds of all steps went. Parts of two steps may pass at the same time."""

    schedule: float = 0.0
    pack: float = 0.0
    dispatch: float = 0.0
    wait: float = 0.0
    """For the device."""
    emit: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadTotals:
    """What the server has counted since `since`. Each of the n outputs of a request counts as one request."""

    since: datetime
    """In UTC."""
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    recomputed_tokens: int
    ended: EndedRequests
    preemptions: int
    steps: StepCounts
    step_rows: int
    """Rows of all steps together."""
    computed_tokens: int
    padding_tokens: int
    step_time: StepTime
    proposed_tokens: int = 0
    """Tokens that were proposed for requests and checked by the model."""
    accepted_tokens: int = 0
    """How many of those are among `generated_tokens`."""


@dataclass(frozen=True, slots=True)
class LoadRates:
    """Means over the last 10 seconds. Shares are from 0 to 1."""

    prompt_tokens_per_second: float
    generated_tokens_per_second: float
    ended_requests_per_second: float
    steps_per_second: float
    rows_per_step: float
    padding_share: float
    prefix_hit_share: float
    accepted_share: float = 0.0
    """Of the tokens that were proposed."""


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """How `count` latencies are distributed, in seconds; the others are None if there are none."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class LoadLatencies:
    """Latencies of the last 60 seconds. They begin when the server received the request."""

    time_to_first_token: LatencySummary
    inter_token: LatencySummary
    queue: LatencySummary
    end_to_end: LatencySummary


class RequestPhase(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    UNKNOWN = "unknown"
    """A phase of a newer contract, which this client does not know."""


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """One output of a request that the engine has."""

    request_id: str
    output_index: int
    key_id: str
    """Whose it is; empty on a server without keys."""
    phase: RequestPhase
    age: float
    """Seconds since the server received it."""
    prompt_tokens: int
    computed_tokens: int
    """Tokens of prompt and output whose keys and values are in the cache."""
    generated_tokens: int
    priority: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How busy the server was at one moment."""

    at: datetime
    """By the server's clock, in UTC."""
    load: Load
    kv_pages_cached: int
    """Free pages that cache a prefix until a request needs them."""
    max_running_requests: int
    totals: LoadTotals | None = None
    """None, as the next two, if the server was started without metrics."""
    rates: LoadRates | None = None
    latencies: LoadLatencies | None = None
    requests: tuple[RequestStatus, ...] = ()
    """The oldest ones first; empty unless `max_requests` was given."""


_PHASES = {number: name for name, number in telemetry_pb2.RequestPhase.items()}


def load_report(message: control_pb2.WatchLoadResponse) -> LoadReport:
    """Convert one message of WatchLoad. Raises ProtocolError if it has a time that does not exist."""
    return LoadReport(
        at=_time(message.at),
        load=messages.load(message.load),
        kv_pages_cached=message.kv_pages_cached,
        max_running_requests=message.max_running_requests,
        totals=_totals(message.totals) if message.HasField("totals") else None,
        rates=_rates(message.rates) if message.HasField("rates") else None,
        latencies=_latencies(message.latencies) if message.HasField("latencies") else None,
        requests=tuple(map(_request, message.requests)),
    )


def _totals(message: telemetry_pb2.LoadTotals) -> LoadTotals:
    ended, steps, time = message.ended, message.steps, message.step_time
    return LoadTotals(
        since=_time(message.since),
        prompt_tokens=message.prompt_tokens,
        cached_prompt_tokens=message.cached_prompt_tokens,
        generated_tokens=message.generated_tokens,
        recomputed_tokens=message.recomputed_tokens,
        ended=EndedRequests(
            eos=ended.eos,
            stop=ended.stop,
            max_tokens=ended.max_tokens,
            context_full=ended.context_full,
            time_limit=ended.time_limit,
            aborted=ended.aborted,
            cancelled=ended.cancelled,
            failed=ended.failed,
            prompt_read=ended.prompt_read,
        ),
        preemptions=message.preemptions,
        steps=StepCounts(steps.prefill, steps.decode, steps.mixed, steps.window),
        step_rows=message.step_rows,
        computed_tokens=message.computed_tokens,
        padding_tokens=message.padding_tokens,
        step_time=StepTime(*map(_seconds, (time.schedule, time.pack, time.dispatch, time.wait, time.emit))),
        proposed_tokens=message.proposed_tokens,
        accepted_tokens=message.accepted_tokens,
    )


def _rates(message: telemetry_pb2.LoadRates) -> LoadRates:
    return LoadRates(
        prompt_tokens_per_second=message.prompt_tokens_per_second,
        generated_tokens_per_second=message.generated_tokens_per_second,
        ended_requests_per_second=message.ended_requests_per_second,
        steps_per_second=message.steps_per_second,
        rows_per_step=message.rows_per_step,
        padding_share=message.padding_share,
        prefix_hit_share=message.prefix_hit_share,
        accepted_share=message.accepted_share,
    )


def _latencies(message: telemetry_pb2.LoadLatencies) -> LoadLatencies:
    return LoadLatencies(
        time_to_first_token=_summary(message.time_to_first_token),
        inter_token=_summary(message.inter_token),
        queue=_summary(message.queue),
        end_to_end=_summary(message.end_to_end),
    )


def _summary(message: telemetry_pb2.LatencySummary) -> LatencySummary:
    if not message.count:
        return LatencySummary()
    seconds = map(_seconds, (message.mean, message.p50, message.p90, message.p99))
    return LatencySummary(message.count, *seconds)


def _request(message: telemetry_pb2.RequestStatus) -> RequestStatus:
    phase = _PHASES.get(message.phase, "").removeprefix("REQUEST_PHASE_").lower()
    known = {member.value for member in RequestPhase}
    return RequestStatus(
        request_id=message.request_id,
        output_index=message.output_index,
        key_id=message.key_id,
        phase=RequestPhase(phase) if phase in known else RequestPhase.UNKNOWN,
        age=_seconds(message.age),
        prompt_tokens=message.prompt_tokens,
        computed_tokens=message.computed_tokens,
        generated_tokens=message.generated_tokens,
        priority=message.priority,
        preemptions=message.preemptions,
    )


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _time(timestamp: Timestamp) -> datetime:
    try:
        return timestamp.ToDatetime(UTC)
    except (ValueError, OverflowError) as error:
        raise ProtocolError.local(f"the server tells a time that does not exist: {error}") from error
